"""``tolerance="torch"``: how it is given, which flags decide, and what a CPU makes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cudnn

import polyconv
from polyconv import settings
from polyconv.cpu.planner import plan_cpu
from polyconv.dispatch.operands import geometry_of
from polyconv.numerics.prediction import torch_error
from polyconv.problem import TORCH_FLOAT32, TORCH_TOLERANCE, Pass, Problem
from polyconv.settings import Settings, checked_tolerance


@pytest.fixture(params=[True, False], ids=["TF32 allowed", "float32"])
def allowed(request: pytest.FixtureRequest) -> Iterator[bool]:
    with cudnn.flags(enabled=True, allow_tf32=request.param):
        yield request.param


def test_flags_of_the_call_decide(allowed: bool) -> None:
    for given in (checked_tolerance("torch"), TORCH_TOLERANCE):
        geometry = geometry_of((1, 1), (0, 0, 0, 0), (1, 1), 1, "zeros", given)
        assert geometry.tolerance == (TORCH_TOLERANCE if allowed else TORCH_FLOAT32)
    with polyconv.tolerance("torch"):
        assert geometry_of((1, 1), (0, 0, 0, 0), (1, 1), 1, "zeros").tolerance == geometry.tolerance


def test_a_cpu_has_no_tf32() -> None:
    """Fast algorithms run there if their error is no more than that of direct sums in float32."""
    for kind in Pass:
        for tolerance in (TORCH_TOLERANCE, TORCH_FLOAT32):
            problem = Problem.make(kind, (2, 32, 28, 28), (32, 32, 3, 3), padding=(1, 1, 1, 1), tolerance=tolerance)
            plan = plan_cpu(problem)
            assert plan.problem.tolerance == torch_error(problem, tf32=False) < 1e-4
            assert plan.chosen.direct or plan.predicted_error <= plan.problem.tolerance


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_modules_and_blocks(compiled: bool) -> None:
    x, conv = torch.randn(2, 8, 12, 14), polyconv.Conv2d(8, 8, 3, tolerance="torch")
    assert conv.tolerance == "torch"

    def calls(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        up = polyconv.conv_transpose2d(x, conv.weight, tolerance="torch")
        return conv(x), polyconv.conv2d(x, conv.weight, conv.bias, tolerance="torch"), up

    one, other, up = (torch.compile(calls, backend="aot_eager") if compiled else calls)(x.requires_grad_())
    want = torch.nn.functional.conv2d(x.double(), conv.weight.double(), conv.bias.double())  # type: ignore[union-attr]
    for got in (one, other):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    (one.sum() + up.sum()).backward()
    assert conv.weight.grad is not None


def test_settings() -> None:
    assert Settings.from_environment({"POLYCONV_TOLERANCE": "torch"}).tolerance == TORCH_TOLERANCE
    before = polyconv.set_tolerance("torch")
    try:
        assert settings.current().as_variables()["POLYCONV_TOLERANCE"] == "torch"
    finally:
        assert polyconv.set_tolerance(before) == TORCH_TOLERANCE
    for wrong in ("TF32", -1.0, float("nan")):
        with pytest.raises(ValueError):
            checked_tolerance(wrong)
