"""PyTorch's caching allocator and CUDA graphs: allocations, and calls that capture forbids."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from fake_cuda import PretendedGpu, counts
from fresh import run_fresh
from polyconv.autotune import preferences
from polyconv.backend import backend_for
from polyconv.model.explain import problems_of
from polyconv.problem import Pass

from .comparing import assert_near, exact_step, ours, replaced_on, step

pytestmark = pytest.mark.caching

_OUT_OF_MEMORY = 2
X = (2, 3, 8, 9)


# ---- allocations


def test_nothing_is_kept(gpu: PretendedGpu) -> None:
    """After a step its tensors and workspace are freed; further steps take no new memory from the GPU."""
    model, x = replaced_on("cuda"), torch.randn(X).cuda()
    step(model, x)
    allocated, taken = torch.cuda.memory_allocated(), counts().allocations
    for _ in range(3):
        step(model, x)
    assert torch.cuda.memory_allocated() == allocated
    assert counts().allocations == taken


def test_the_output_and_a_workspace_are_all_that_is_allocated() -> None:
    """Peak memory of a convolution: its output and the workspace of its plan."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    arguments = {"padding": (2, 4), "dilation": (2, 3)}
    (problem,) = (found for found in problems_of(polyconv.conv2d, x, w, **arguments) if found.kind is Pass.FPROP)
    workspace = preferences.plan(backend_for(x.device), problem).workspace_bytes
    assert workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = polyconv.conv2d(x, w, **arguments)
    assert torch.cuda.memory_allocated() - before == rounded(y.nbytes)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == rounded(y.nbytes) + rounded(workspace)


def rounded(size: int) -> int:
    """Allocator's size of a tensor: multiples of 512 bytes."""
    return -(-size // 512) * 512


def test_memory_of_a_side_stream_is_reused_there() -> None:
    """The workspace is freed while kernels may run: only later work on the same stream may reuse it."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    side = torch.cuda.Stream()

    def call() -> Tensor:
        return polyconv.conv2d(x, w, padding=(2, 4), dilation=(2, 3))

    call()
    taken = counts().allocations
    with torch.cuda.stream(side):
        call()
        call()
    assert counts().allocations > taken, "the side stream has been given memory of another stream"
    taken = counts().allocations
    call()
    with torch.cuda.stream(side):
        call()
    assert counts().allocations == taken


def test_out_of_memory_is_the_callers_to_hear(gpu: PretendedGpu) -> None:
    """Out of memory is no kernel's fault: nothing is blacklisted, and the next call runs as before."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    exact = F.conv2d(x.cpu().double(), w.cpu().double())
    polyconv.conv2d(x, w)
    gpu.fail("cudaMalloc", 1, 100, _OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.stream(torch.cuda.Stream()):  # before anything is cached
        polyconv.conv2d(x, w)
    assert gpu.repair()
    assert_near({"y": polyconv.conv2d(x, w)}, {"y": exact})


# ---- graphs


def test_a_forward_pass_is_captured_and_replayed(gpu: PretendedGpu) -> None:
    model, x, other = replaced_on("cuda"), torch.randn(X).cuda(), torch.randn(X)
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        gpu.launches.clear()
        with torch.cuda.graph(graph):
            y = model(x)
        assert not ours(gpu), "something was done, and not captured"
        x.copy_(other)
        graph.replay()
    assert ours(gpu)
    assert_near({"y": y}, {"y": exact_step(model, other)["y"]})


def test_a_training_step_is_captured_and_replayed() -> None:
    """Forward and backward; backward kernels are captured from an autograd thread."""
    model, x, other = replaced_on("cuda"), torch.randn(X).cuda(), torch.randn(X)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        y = model(x)
        y.square().mean().backward()
    x.copy_(other)
    graph.replay()
    exact = exact_step(model, other)
    del exact["dx"]
    assert_near({"y": y, **{name: p.grad for name, p in model.named_parameters()}}, exact)


def test_graphed_callables() -> None:
    model, x = replaced_on("cuda"), torch.randn(X)
    exact = exact_step(model, x)
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(X).cuda().requires_grad_(),))
    assert_near(step(model, x.cuda(), graphed), exact)


def captured(call: Callable[[], object], mode: str = "global") -> BaseException | None:
    """Error of a capture. PyTorch does not recover from it and captures nothing afterwards."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode=mode):
            call()
    except RuntimeError as error:
        return error
    return None


def test_the_allocator_may_allocate_while_a_graph_is_captured() -> None:
    """A graph has a private memory pool, so the allocator permits itself the call."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    polyconv.conv2d(x, w)
    taken = counts().allocations
    assert captured(lambda: polyconv.conv2d(x, w)) is None
    assert counts().allocations > taken


def test_the_first_call_cannot_be_captured() -> None:
    """The driver loads no kernel during capture: the error says so, and the call is correct later."""
    words, found, exact = run_fresh(first_call_in_a_capture)
    assert "runs for the first time while a CUDA graph is captured" in words
    assert_near({"y": found}, {"y": exact})


def first_call_in_a_capture() -> tuple[str, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 7, 11, 13), torch.randn(9, 7, 2, 3)
    with PretendedGpu():
        on_gpu = x.cuda(), w.cuda()
        error = captured(lambda: polyconv.conv2d(*on_gpu))
        assert error is not None
        words = f"{error}\n{error.__context__}"  # PyTorch may add its own warning about the lost capture
        return words, polyconv.conv2d(*on_gpu).cpu(), F.conv2d(x.double(), w.double())


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_other_threads_may_wait_meanwhile(mode: str) -> None:
    assert wait_during_a_capture(mode) == (False, False)


def test_in_the_global_mode_nobody_may_wait() -> None:
    """Both the waiting and the capturing thread get an error."""
    assert run_fresh(wait_during_a_capture, "global") == (True, True)


def wait_during_a_capture(mode: str) -> tuple[bool, bool]:
    """Whether a thread that synchronises gets an error, and whether the capturing thread does."""
    x, w = torch.randn(1, 3, 6, 7).cuda(), torch.randn(4, 3, 3, 3).cuda()
    polyconv.conv2d(x, w)
    errors = []

    def wait() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(error)

    def call() -> None:
        polyconv.conv2d(x, w)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    spoiled = captured(call, mode)
    return bool(errors), spoiled is not None
