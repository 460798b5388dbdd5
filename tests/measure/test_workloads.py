"""Named workloads: name lookup, and their problems."""

from __future__ import annotations

import re
from typing import Any

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
    assert len(find("kernelbench")) == 24
    assert len(find("volumes")) == 11
    assert len(find("models")) == 28
    assert [w.id for w in find("all")] == [w.id for w in workloads.catalogue().values() if w.module == "Conv2d"]
    assert len([w for w in workloads.catalogue().values() if w.suite == "kernelbench"]) == 35


def test_each_once_in_the_order_asked() -> None:
    assert [w.name for w in find("kb62,W1,headline")] == ["kb62", "W1", "W2"]


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(WorkloadError, match=r"'W9'.*W1 \(kb80\).*tiny-batch.*all12"):
        find("W1,W9")
    with pytest.raises(WorkloadError, match="no workload was named"):
        find(",")


def test_the_headline_problems() -> None:
    w1, w2, w3 = (w.problem(Pass.FPROP) for w in find("headline"))
    assert w1.y_shape == (8, 64, 508, 496)
    assert w3.y_shape == (8, 64, 508, 504)
    assert w2.batch * w2.out_channels * w2.out_size[0] * w2.out_size[1] == 2_139_103_232


@pytest.mark.parametrize("workload", [*workloads.catalogue().values(), *workloads.issues()], ids=lambda w: w.id)
def test_problems_are_torchs(workload: workloads.Workload) -> None:
    sizes: Any = {key: getattr(workload, key) for key in ("stride", "padding", "dilation", "groups", "bias")}
    if workload.transposed:
        sizes["output_padding"] = workload.output_padding
    with torch.device("meta"):
        conv = getattr(torch.nn, workload.module)(workload.input[1], workload.out_channels, workload.kernel, **sizes)
        y = conv(torch.empty(workload.input))
    for kind in Pass:
        problem = workload.problem(kind)
        of_input, of_output = problem.x_shape, problem.y_shape
        if workload.transposed:
            of_input, of_output = of_output, of_input
        assert (of_input, of_output) == (workload.input, y.shape)
        assert problem.w_shape == conv.weight.shape
        assert problem.bias == (workload.bias and kind is not Pass.DGRAD)


def test_a_transposed_convolution_is_an_input_gradient() -> None:
    (workload,) = find("kb75")
    kinds = {kind: workload.problem(kind).kind for kind in Pass}
    assert kinds == {Pass.FPROP: Pass.DGRAD, Pass.DGRAD: Pass.FPROP, Pass.WGRAD: Pass.WGRAD}


def test_issues_say_what_is_special() -> None:
    """Each is named by an issue, and its dtype, its data and its lengths are in the file, not in code."""
    every = {layer.name: layer for layer in workloads.issues()}
    assert len(every) == len(workloads.issues()) > 30
    assert all(re.match(r"\w+#\d+ ", name) for name in every)
    assert {layer.dtype for layer in every.values()} == {"float32", "float16", "bfloat16"}
    assert every["pt#163347 fp16 3x3"].problem(Pass.FPROP).dtype == "float16"
    denormal = [name for name, layer in every.items() if layer.weight_scale == 1e-40]
    assert denormal == ["pt#67797 3x3 denormal", "pt#19651 depthwise denormal"]
    assert [layer.name for layer in every.values() if layer.lengths == 5000] == list(every)[-2:]
    assert not any(layer.bias and layer.transposed for layer in every.values())  # a reference of a pass has no bias
