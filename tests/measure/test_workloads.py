"""The named workloads: what their names find, and the problems that they ask for."""

from __future__ import annotations

import pytest
import torch

from polyconv.measure import workloads
from polyconv.measure.workloads import WorkloadError, find
from polyconv.problem import Pass


def test_short_names_and_ids() -> None:
    by_name, by_id = find("W1")[0], find("kb80")[0]
    assert (by_name.name, by_name.id) == ("W1", "kb80")
    assert (by_id.name, by_id.id) == ("kb80", "kb80")
    assert by_name.problem("fprop") == by_id.problem("fprop")
    assert find("w1") == find(" W1 ,")


def test_groups() -> None:
    assert [w.name for w in find("headline")] == ["W1", "W2", "W3"]
    assert len(find("all12")) == 12
    assert len(find("models")) == 28
    assert [w.id for w in find("all")] == list(workloads.catalogue())


def test_each_once_in_the_order_asked() -> None:
    assert [w.name for w in find("kb62,W1,headline")] == ["kb62", "W1", "W2"]


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(WorkloadError, match=r"'W9'.*W1 \(kb80\).*tiny-batch.*all12"):
        find("W1,W9")
    with pytest.raises(WorkloadError, match=r"kb57 .* is a ConvTranspose2d"):
        find("kb57")
    with pytest.raises(WorkloadError, match="no workload was named"):
        find(",")


def test_the_headline_problems() -> None:
    w1, w2, w3 = (w.problem(Pass.FPROP) for w in find("headline"))
    assert w1.y_shape == (8, 64, 508, 496)
    assert w3.y_shape == (8, 64, 508, 504)
    assert w2.batch * w2.out_channels * w2.out_size[0] * w2.out_size[1] == 2_139_103_232


@pytest.mark.parametrize("workload", find("all"), ids=lambda w: w.id)
def test_problems_are_torchs(workload: workloads.Workload) -> None:
    with torch.device("meta"):
        conv = torch.nn.Conv2d(
            workload.input[1],
            workload.out_channels,
            workload.kernel,
            workload.stride,
            workload.padding,
            workload.dilation,
            workload.groups,
            workload.bias,
        )
        y = conv(torch.empty(workload.input))
    for kind in Pass:
        problem = workload.problem(kind)
        assert problem.y_shape == y.shape
        assert problem.w_shape == conv.weight.shape
        assert problem.bias == (workload.bias and kind is not Pass.DGRAD)
