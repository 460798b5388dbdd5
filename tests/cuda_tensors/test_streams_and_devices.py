"""Kernels run on the right stream and device from any caller, and leave both unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from fake_cuda import LaunchRecord, PretendedGpu, execute
from fresh import run_fresh

from .comparing import assert_near, exact_step, is_ours, ours, passes, replaced_on, step


def operands(device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    x, w, bias = torch.randn(2, 3, 6, 7), torch.randn(5, 3, 3, 3), torch.randn(5)
    return x.to(device), w.to(device), bias.to(device)


def streams(gpu: PretendedGpu) -> set[int]:
    return {launch.stream for launch in ours(gpu)}


def devices(gpu: PretendedGpu) -> set[int]:
    return {launch.device for launch in ours(gpu)}


# ---- streams


def test_the_current_stream(gpu: PretendedGpu) -> None:
    tensors, side = operands(), torch.cuda.Stream()
    polyconv.conv2d(*tensors)
    assert streams(gpu) == {0}
    gpu.launches.clear()
    with torch.cuda.stream(side):
        polyconv.conv2d(*tensors)
    assert streams(gpu) == {side.cuda_stream}
    gpu.launches.clear()
    polyconv.conv2d(*tensors)
    assert streams(gpu) == {0}


def test_backward_is_on_the_stream_of_forward(gpu: PretendedGpu) -> None:
    """Whatever stream is current by then, and in any thread."""
    leaves, side = [tensor.requires_grad_() for tensor in operands()], torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = polyconv.conv2d(*leaves)
    gradient = torch.ones_like(y)
    gpu.launches.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        y.backward(gradient)
    assert streams(gpu) == {side.cuda_stream}


# ---- devices


def test_a_device_that_is_not_current(gpu: PretendedGpu) -> None:
    model, x = replaced_on("cuda:1"), torch.randn(2, 3, 8, 9)
    found = step(model, x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert devices(gpu) == {1}
    assert all(tensor.device == torch.device("cuda:1") for tensor in found.values())
    assert_near(found, exact_step(model, x))


def test_inside_of_a_device_guard(gpu: PretendedGpu) -> None:
    """The tensors determine the device; the caller's current device does not change."""
    x, w, bias = operands("cuda:0")
    with torch.cuda.device(1):
        y = polyconv.conv2d(x, w, bias)
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == 1
    assert devices(gpu) == {0}
    assert_near({"y": y}, {"y": F.conv2d(x.cpu().double(), w.cpu().double(), bias.cpu().double())})


def test_each_device_has_its_own_current_stream(gpu: PretendedGpu) -> None:
    """A side stream of the other device affects only calls on that device."""
    on_first, on_second = operands("cuda:0"), operands("cuda:1")
    side = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(side), torch.cuda.device(0):
        polyconv.conv2d(*on_first)
        assert (devices(gpu), streams(gpu)) == ({0}, {0})
        gpu.launches.clear()
        polyconv.conv2d(*on_second)
        assert (devices(gpu), streams(gpu)) == ({1}, {side.cuda_stream})


def test_one_graph_on_two_devices(gpu: PretendedGpu) -> None:
    """One layer per device: autograd has a thread for each, and each computes on its own."""
    w0, w1 = torch.randn(4, 3, 3, 3), torch.randn(2, 4, 3, 3)
    x = torch.randn(2, 3, 8, 9)

    def both(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return polyconv.conv2d(polyconv.conv2d(x, first).to(second.device), second)

    gradient = torch.randn(2, 2, 4, 5)
    exact = passes(both, (x.double(), w0.double(), w1.double()), gradient.double())
    found = passes(both, (x.to("cuda:0"), w0.to("cuda:0"), w1.to("cuda:1")), gradient.to("cuda:1"))
    assert_near(found, exact)
    assert devices(gpu) == {0, 1}


# ---- threads


@pytest.fixture
def launching_threads() -> Iterator[list[int]]:
    """Threads that launch polyconv's kernels."""
    found: list[int] = []

    def executor(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
        if is_ours(launch):
            found.append(threading.get_ident())
        execute(launch, buffers)

    with PretendedGpu(executor):
        yield found


def test_backward_runs_in_threads_of_autograd(launching_threads: list[int]) -> None:
    model, x = replaced_on("cuda"), torch.randn(2, 3, 8, 9)
    model(x.cuda())
    assert set(launching_threads) == {threading.get_ident()}
    launching_threads.clear()
    found = step(model, x.cuda())
    assert len(set(launching_threads)) == 2
    assert_near(found, exact_step(model, x))


def test_several_threads_at_once() -> None:
    """Each thread has its own stream; plans are shared."""
    model, x = replaced_on("cuda"), torch.randn(2, 3, 8, 9)
    exact, failures = exact_step(model, x)["y"], []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(3):
                    assert_near({"y": model(x.cuda())}, {"y": exact})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


class DoublesAndConvolves(torch.autograd.Function):
    """Doubles its input; its gradient runs a convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return polyconv.conv2d(dy, *ctx.saved_tensors, padding=1), None


def test_first_use_in_backward() -> None:
    """Driver, compiler and first kernel are initialised in an autograd thread, on a device that is not current."""
    found, exact = run_fresh(first_use_in_backward)
    assert_near({"dx": found}, {"dx": exact})


def first_use_in_backward() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    w, dy = torch.randn(3, 3, 3, 3), torch.randn(2, 3, 6, 7)
    with PretendedGpu():
        x = torch.zeros(2, 3, 6, 7, device="cuda:1", requires_grad=True)
        DoublesAndConvolves.apply(x, w.to("cuda:1")).backward(dy.to("cuda:1"))
        assert x.grad is not None
        return x.grad.cpu(), F.conv2d(dy.double(), w.double(), padding=1)
