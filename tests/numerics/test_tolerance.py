"""The tolerance: where it is set, precedence, and that every pass follows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import polyconv
from polyconv import backend, settings
from recording import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with settings.use(), backend.override("cpu", Recorder()) as found:
        assert isinstance(found, Recorder)
        yield found


def tolerances(recorder: Recorder) -> list[tuple[str, float]]:
    return [(problem.kind.value, problem.tolerance) for problem in recorder.problems]


def train(module: torch.nn.Module) -> None:
    module(torch.randn(1, 3, 8, 8, requires_grad=True)).sum().backward()


def test_default(recorder: Recorder) -> None:
    train(polyconv.Conv2d(3, 4, 3))
    assert tolerances(recorder) == [("fprop", 1e-4), ("dgrad", 1e-4), ("wgrad", 1e-4)]


def test_set_for_the_process(recorder: Recorder) -> None:
    assert polyconv.set_tolerance(1e-3) == 1e-4
    train(polyconv.Conv2d(3, 4, 3))
    assert {tolerance for _, tolerance in tolerances(recorder)} == {1e-3}
    assert polyconv.set_tolerance(0) == 1e-3


def test_a_block_settles_the_backward_pass_too(recorder: Recorder) -> None:
    module = polyconv.Conv2d(3, 4, 3)
    with polyconv.tolerance(0):
        y = module(torch.randn(1, 3, 8, 8, requires_grad=True))
    y.sum().backward()
    assert tolerances(recorder) == [("fprop", 0.0), ("dgrad", 0.0), ("wgrad", 0.0)]
    train(module)
    assert tolerances(recorder)[3:] == [("fprop", 1e-4), ("dgrad", 1e-4), ("wgrad", 1e-4)]


def test_a_module_of_its_own(recorder: Recorder) -> None:
    with polyconv.tolerance(1e-2):
        train(polyconv.Conv2d(3, 4, 3, tolerance=1e-5))
    assert {tolerance for _, tolerance in tolerances(recorder)} == {1e-5}


def test_a_call_of_its_own(recorder: Recorder) -> None:
    polyconv.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), tolerance=0)
    assert tolerances(recorder) == [("fprop", 0.0)]


def test_replaced_modules_follow_the_setting(recorder: Recorder) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    polyconv.replace(model)
    with polyconv.tolerance(1e-3):
        train(model)
    assert {tolerance for _, tolerance in tolerances(recorder)} == {1e-3}


@pytest.mark.parametrize("value", [-1e-4, float("nan")])
def test_what_is_no_tolerance(value: float) -> None:
    words = "a tolerance is a number from 0"
    with pytest.raises(ValueError, match=words):
        polyconv.set_tolerance(value)
    with pytest.raises(ValueError, match=words):
        polyconv.Conv2d(3, 4, 3, tolerance=value)
    with pytest.raises(ValueError, match=words):
        polyconv.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), tolerance=value)
    with pytest.raises(ValueError, match=words), polyconv.tolerance(value):
        pass
