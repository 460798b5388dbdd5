"""Checks that need PyTorch's own CUDA, on a fake one: they run, and detect their faults.

Streams and events do nothing, a graph is the list of launches captured, and launches are executed on the memory of CPU
tensors. So this verifies the checks, not a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch

from fake_cuda import LaunchRecord, execute
from polyconv.cuda import LaunchError
from polyconv.problem import Pass
from polyconv.tools.doctor.check import Result, Verdict
from polyconv.tools.doctor.checks import graphs, large, streams_and_threads, timing, training
from polyconv.tools.doctor.device_under_test import DeviceUnderTest
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.doctor import VirtualGpuUnderTest, VirtualRedzoneBackend
from virtual_gpu.gpu import VirtualGpu


class Stream:
    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Executed:
    """Launches with the memory that they may touch, to be executed again."""

    def __init__(self) -> None:
        self.launches: list[tuple[LaunchRecord, list[tuple[int, int]]]] = []

    def __call__(self, launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
        self.launches.append((launch, buffers))
        execute(launch, buffers)


class Graph(Executed):
    def replay(self) -> None:
        for launch, buffers in self.launches:
            execute(launch, buffers)


class KeepingGpu(VirtualGpuUnderTest):
    """One backend for all calls, so that it keeps its scratch memory, as a graph would."""

    def backend(self, **arguments: Any) -> VirtualRedzoneBackend:
        return super().backend(**arguments) if arguments else self._kept

    @cached_property
    def _kept(self) -> VirtualRedzoneBackend:
        return super().backend()


@contextmanager
def pretended(**constants: Any) -> Iterator[VirtualGpuUnderTest]:
    """PyTorch's CUDA as far as the checks use it; ``constants`` of the modules get other values."""
    executed = Executed()

    @contextmanager
    def graph(captured: Graph) -> Iterator[None]:
        before = len(executed.launches)
        yield
        captured.launches = executed.launches[before:]

    with VirtualGpu(executed) as gpu, ExitStack() as stack:
        subject = KeepingGpu(gpu)
        for name, stand_in in {
            "Stream": Stream,
            "stream": lambda _: nullcontext(),
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "mem_get_info": lambda _: (2**40, 2**40),
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(
            patch.object(timing, "CudaBackend", lambda index, **arguments: subject.backend(**arguments))
        )
        for name, value in constants.items():
            module = next(one for one in (large, timing, streams_and_threads) if hasattr(one, name))
            stack.enter_context(patch.object(module, name, value))
        yield subject


def in_virtual_gpu(function: Any) -> dict[str, Result]:
    found: dict[str, Result] = run_in_virtual_gpu(function, timeout=500)
    return found


def test_streams_and_graphs() -> None:
    found = in_virtual_gpu(_streams_and_graphs)
    assert {str(result.verdict) for result in found.values()} == {"ok"}, found
    assert all(result.figures["error"] < 1e-5 for result in found.values())


def _streams_and_graphs() -> dict[str, Result]:
    with pretended(AHEAD=1) as subject, subject.at_work():
        return {
            "side stream": streams_and_threads.side_stream(subject),
            "not warm": graphs.without_a_run_before(subject),
            "warm": graphs.after_a_run(subject),
        }


def test_a_capture_that_is_refused_has_to_say_what_to_do() -> None:
    found = in_virtual_gpu(_refused_captures)
    assert found["helpful"].verdict is Verdict.OK
    assert found["helpless"].verdict is Verdict.PROBLEM


def _refused_captures() -> dict[str, Result]:
    found = {}
    for name, words in {"helpful": "run it once before it is captured", "helpless": "operation not permitted"}.items():
        with pretended() as subject, patch.object(graphs, "_captured", side_effect=LaunchError(words)):
            found[name] = graphs.without_a_run_before(subject)
    return found


def test_a_graph_that_reads_old_numbers_is_noticed() -> None:
    assert in_virtual_gpu(_stale_graph)["stale"].verdict is Verdict.PROBLEM


def _stale_graph() -> dict[str, Result]:
    with pretended() as subject, subject.at_work(), patch.object(Graph, "replay"):
        return {"stale": graphs.after_a_run(subject)}


def test_times_and_large_tensors() -> None:
    found = in_virtual_gpu(_times_and_large_tensors)
    assert {str(result.verdict) for result in found.values()} == {"ok"}, found
    for kind in Pass:
        layer = found[f"tiny, {kind}"]
        assert layer.figures["us"].keys() == {"ours", "float32", "TF32", "bfloat16"}
        assert layer.figures["measured_to_modelled"]
    assert found["launch gap"].figures["us"] > 0
    assert found["input"].figures["error"] < 1e-5
    assert found["output"].figures["error"] < 1e-5


def _times_and_large_tensors() -> dict[str, Result]:
    tiny = {"tiny": ((1, 8, 4, 6), (8, 8, 3, 3), {"padding": (1, 1, 1, 1)})}
    with pretended(LAYERS=tiny, REPEATS=1, SAMPLES=1, TINY=2, SIDE=40) as subject, subject.at_work():
        parts = {**timing.parts(subject), **large.parts(subject)}
        return {name: part() for name, part in parts.items()}


def test_too_little_memory_is_a_result() -> None:
    found = in_virtual_gpu(_too_little_memory)
    assert [str(result.verdict) for result in found.values()] == ["not here", "not here"]
    assert found["input"].words == "needs 10 GiB of memory, and 1 are free"


def _too_little_memory() -> dict[str, Result]:
    with pretended() as subject, patch.object(torch.cuda, "mem_get_info", lambda _: (2**30, 2**34)):
        return {name: part() for name, part in large.parts(subject).items()}


def test_replicas_train_as_one() -> None:
    """On the CPU, where DataParallel has one replica; and two processes that stay in step."""
    subject: Any = DeviceUnderTest(quick=True)
    assert training.data_parallel(subject).verdict is Verdict.OK
    assert training.two_ranks(subject).verdict is Verdict.OK
