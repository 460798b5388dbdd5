"""PyTorch's caching of memory, and CUDA graphs, which need it: what is allocated, and what is forbidden when."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from polyconv.backends import backend_for
from polyconv.explanation import problems_of
from polyconv.problem import Pass
from pretended_cuda import PretendedGpu, counts

from .comparing import assert_near, exact_step, ours, replaced_on, step

pytestmark = pytest.mark.caching

_OUT_OF_MEMORY = 2
X = (2, 3, 8, 9)


# ---- what is allocated


def test_nothing_is_kept(gpu: PretendedGpu) -> None:
    """After a step its tensors are gone, and so is the workspace; further steps take nothing new from the GPU."""
    model, x = replaced_on("cuda"), torch.randn(X).cuda()
    step(model, x)
    allocated, taken = torch.cuda.memory_allocated(), counts().allocations
    for _ in range(3):
        step(model, x)
    assert torch.cuda.memory_allocated() == allocated
    assert counts().allocations == taken


def test_the_output_and_a_workspace_are_all_that_is_allocated() -> None:
    """At its highest while a convolution runs: its output, and as much besides as its plan says."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    arguments = {"padding": (2, 4), "dilation": (2, 3)}
    (problem,) = (found for found in problems_of(polyconv.conv2d, x, w, **arguments) if found.kind is Pass.FPROP)
    workspace = backend_for(x.device).plan(problem).workspace_bytes
    assert workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = polyconv.conv2d(x, w, **arguments)
    assert torch.cuda.memory_allocated() - before == rounded(y.nbytes)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == rounded(y.nbytes) + rounded(workspace)


def rounded(size: int) -> int:
    """What the allocator counts for a tensor: whole units of 512 bytes."""
    return -(-size // 512) * 512


def test_memory_of_a_side_stream_is_reused_there() -> None:
    """The workspace is freed while kernels may still run: it goes to later work on the same stream, and to no other."""
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
    """It is no kernel's fault: nothing is given up, and the next call is what it was."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    exact = F.conv2d(x.cpu().double(), w.cpu().double())
    polyconv.conv2d(x, w)
    torch.cuda.empty_cache()
    gpu.fail("cudaMalloc", 1, 100, _OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError):
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
    """Forward and backward, whose kernels are captured from a thread of autograd's."""
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
    """What is raised when something is captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            call()
    except BaseException as error:
        return error
    return None


def test_a_kernel_that_is_not_loaded_yet_cannot_be_captured() -> None:
    """The driver loads nothing while a graph is captured. The error says so, and the next call is right."""
    x, w = torch.randn(2, 7, 11, 13).cuda(), torch.randn(9, 7, 2, 3).cuda()
    error = captured(lambda: polyconv.conv2d(x, w))
    assert error is not None
    assert "captur" in str(error) + str(error.__context__)
    assert_near({"y": polyconv.conv2d(x, w)}, {"y": F.conv2d(x.cpu().double(), w.cpu().double())})
    assert captured(lambda: polyconv.conv2d(x, w)) is None


def test_the_allocator_may_allocate_while_a_graph_is_captured() -> None:
    """It says that it knows what it does. A graph's memory is its own, so that it has to."""
    x, w = torch.randn(2, 8, 24, 40).cuda(), torch.randn(16, 8, 5, 9).cuda()
    polyconv.conv2d(x, w)
    taken = counts().allocations
    assert captured(lambda: polyconv.conv2d(x, w)) is None
    assert counts().allocations > taken


@pytest.mark.parametrize(("mode", "fails"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_what_other_threads_do_meanwhile(mode: str, fails: bool) -> None:
    """A thread that waits for the GPU spoils a capture in the global mode, and no other."""
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
    assert bool(errors) == fails
    assert (spoiled is not None) == fails
    torch.cuda.synchronize()
