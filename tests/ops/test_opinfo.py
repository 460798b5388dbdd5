"""PyTorch's own samples for conv2d: each sample agrees with torch, each wrong call raises as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import polyconv

OPINFO = next(op for op in op_db if op.name == "nn.functional.conv2d")
SAMPLES = list(OPINFO.sample_inputs("cpu", torch.float64, requires_grad=True))
ERRORS = list(OPINFO.error_inputs("cpu"))


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 30
    assert len(ERRORS) >= 10


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{i}" for i in range(len(SAMPLES))])
def test_sample(sample: Any) -> None:
    ours = polyconv.conv2d(sample.input, *sample.args, **sample.kwargs)
    theirs = F.conv2d(sample.input, *sample.args, **sample.kwargs)
    torch.testing.assert_close(ours, theirs)
    leaves = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
    dy = torch.randn_like(theirs)
    for one, other in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("error", ERRORS, ids=[f"{i}" for i in range(len(ERRORS))])
def test_error(error: Any) -> None:
    sample = error.sample_input
    with pytest.raises(error.error_type, match=error.error_regex):
        polyconv.conv2d(sample.input, *sample.args, **sample.kwargs)
