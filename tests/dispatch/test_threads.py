"""The number of threads is part of the state: a plan is valid for the calling thread's number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import polyconv
from polyconv.backend import Run, override
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.planner import CpuPlan
from polyconv.measure.timing import threads
from polyconv.runtime import state_version


class Noting(CpuBackend):
    """Records the number of threads of each plan."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[int] = []

    def prepare(self, plan: CpuPlan, *, trial: bool = False) -> Run:
        self.planned.append(plan.device.cores)
        return super().prepare(plan, trial=trial)


@pytest.fixture
def backend() -> Iterator[Noting]:
    with override("cpu", Noting()) as backend, threads(1), torch.no_grad():
        yield backend


CALLS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]] = {
    "fast path": (torch.float32, nullcontext),
    "passthrough": (torch.bfloat16, nullcontext),
    "operator": (torch.float32, torch.overrides.BaseTorchFunctionMode),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_number_of_threads_is_planned_for(call: str, backend: Noting) -> None:
    dtype, mode = CALLS[call]
    conv, x = polyconv.Conv2d(16, 16, 3, dtype=dtype), torch.randn(1, 16, 12, 12, dtype=dtype)

    def computed(count: int) -> Tensor:
        with threads(count), mode():
            y: Tensor = conv(x)
            return y

    for count in (1, 1, 2, 2, 1, 2):
        computed(count)
    assert backend.planned == [1, 2]  # returning to a number finds its plans


def test_gradients_are_planned_for_the_threads_of_the_backward_pass(backend: Noting) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(1, 16, 96, 96, requires_grad=True)
    for count in (1, 2, 1, 2):
        with threads(count), torch.enable_grad():
            conv(x).square().sum().backward()
    assert sorted(set(backend.planned)) == [1, 2]
    before = len(backend.planned)
    with threads(2), torch.enable_grad():
        conv(x).square().sum().backward()
    assert len(backend.planned) == before


def test_what_explain_says_is_what_runs(backend: Noting) -> None:
    """Independent of earlier tests."""
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(1, 16, 12, 12)
    said = {}
    for count in (1, 2, 1):
        with threads(count):
            conv(x)
            said.setdefault(count, str(polyconv.explain(conv, x)))
            assert said[count] == str(polyconv.explain(conv, x))


def test_the_threads_that_count_are_those_of_the_calling_thread(backend: Noting) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(1, 16, 12, 12)
    conv(x)
    number, found = state_version.current(), []

    def elsewhere() -> None:
        torch.set_num_threads(2)
        with torch.no_grad():
            conv(x)
        found.append((torch.get_num_threads(), state_version.current()))

    thread = Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert backend.planned == [1, 2]
    assert found[0][0] == 2
    assert found[0][1] != number
    conv(x)
    here = torch.get_num_threads()  # with OpenMP, unchanged
    assert backend.planned == [1, 2]
    assert state_version.current() == (number if here == 1 else found[0][1])
