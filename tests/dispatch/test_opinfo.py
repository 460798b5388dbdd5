"""PyTorch's own OpInfo samples: results and errors agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import polyconv
from polyconv.dispatch.op import PUBLIC

NAMES = [op.name for op in PUBLIC]
OPINFOS = {op.name.rpartition(".")[2]: op for op in op_db if op.name.rpartition(".")[2] in NAMES}
SAMPLES = [
    pytest.param(name, sample, id=f"{name}-{i}")
    for name in NAMES
    for i, sample in enumerate(OPINFOS[name].sample_inputs("cpu", torch.float64, requires_grad=True))
]
ERRORS = [
    pytest.param(name, error, id=f"{name}-{i}")
    for name in NAMES
    if OPINFOS[name].error_inputs_func is not None  # torch has no samples for transposed convolutions
    for i, error in enumerate(OPINFOS[name].error_inputs("cpu"))
]


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 60
    assert len(ERRORS) >= 20


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_sample(name: str, sample: Any) -> None:
    ours = getattr(polyconv, name)(sample.input, *sample.args, **sample.kwargs)
    theirs = getattr(F, name)(sample.input, *sample.args, **sample.kwargs)
    torch.testing.assert_close(ours, theirs)
    leaves = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
    dy = torch.randn_like(theirs)
    for one, other in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_error(name: str, error: Any) -> None:
    sample = error.sample_input
    with pytest.raises(error.error_type, match=error.error_regex):
        getattr(polyconv, name)(sample.input, *sample.args, **sample.kwargs)
