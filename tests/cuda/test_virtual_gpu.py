"""The CUDA path end to end on the virtual V100: operator, plan, compiler, cache, driver, machine code, results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyconv
from geometries import CASES, Case
from polyconv.arguments import Geometry
from polyconv.autotune import online, preferences
from polyconv.backend import override
from polyconv.measure.workloads import find
from polyconv.model.explain import explain_plans
from polyconv.numerics import reference
from polyconv.problem import Pass, Problem
from recording import Calls
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

HEADLINES = {workload.id: workload for workload in find("headline")}

LARGER_CASES = {
    "more channels than a tile": Case((1, 33, 9, 10), (130, 33, 3, 3), kwargs={"padding": 1}),
    "more pixels than a tile": Case((2, 5, 23, 31), (17, 5, 3, 3), kwargs={"padding": 1}),
    "W1, shrunk": Case((2, 8, 24, 40), (16, 8, 5, 9), bias=False, kwargs={"padding": (2, 4), "dilation": (2, 3)}),
    "strided, larger": Case((2, 9, 29, 30), (40, 9, 3, 3), kwargs={"stride": 2, "padding": 1}),
    "groups across tiles": Case((1, 12, 12, 13), (72, 6, 3, 3), kwargs={"groups": 2, "padding": 1}),
    "depthwise, larger": Case((2, 8, 20, 37), (8, 1, 7, 7), kwargs={"groups": 8, "padding": 3}),
    "a stride past the image": Case((2, 5, 6, 7), (8, 5, 3, 3), kwargs={"stride": 2**32, "padding": 1}),
    "taps that meet nothing": Case((2, 5, 6, 7), (8, 5, 3, 3), kwargs={"dilation": 2**32, "padding": 2**32}),
    "outputs that see nothing": Case(
        (2, 5, 6, 7), (8, 5, 3, 3), kwargs={"stride": 10**6, "dilation": 10**6, "padding": 2 * 10**6}
    ),
}


@pytest.mark.parametrize("name", [*CASES, *LARGER_CASES])
def test_forward_and_backward(name: str) -> None:
    """Every element of the output and of all three gradients, against float64 on the CPU."""
    run_in_virtual_gpu(_forward_and_backward, {**CASES, **LARGER_CASES}[name])


def test_without_room_for_partial_sums() -> None:
    case = Case((4, 5, 23, 31), (17, 5, 3, 3), kwargs={"padding": 1})
    run_in_virtual_gpu(_forward_and_backward, case, environment={"POLYCONV_WORKSPACE_BYTES": "0"})


def _forward_and_backward(case: Case) -> None:
    torch.manual_seed(0)
    x, w, bias = case.tensors(torch.float32)
    gradient = torch.randn_like(polyconv.conv2d(x, w, bias, **case.kwargs))
    exact = _all_passes(case, *(None if t is None else t.double() for t in (x, w, bias, gradient)))
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        ours = _all_passes(case, x, w, bias, gradient)
        assert gpu.synchronisations == 0
        assert gpu.launches
    for name, got in ours.items():
        # Tolerance relative to the result's scale; a missing or doubled term is far outside.
        allowed = 1e-4 * (exact[name].square().mean().sqrt() + exact[name].abs())
        excess = ((got.double() - exact[name]).abs() / allowed.clamp_min(1e-30)).nan_to_num(nan=float("inf"))
        where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        assert excess.max() <= 1, f"{name}{list(where)} is {got[where]} and should be {exact[name][where]}"


def test_the_first_calls_are_autotuned() -> None:
    run_in_virtual_gpu(_autotuned_calls)


def _autotuned_calls() -> None:
    """Among polyconv's kernels only: every trial is correct, and one candidate is chosen."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 8, 9, 12), torch.randn(16, 8, 3, 3)
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    problem = Problem.make("fprop", x.shape, w.shape)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend, polyconv.benchmark(), torch.no_grad():
        names = backend.plan(problem).trials()
        assert len(names) > 1
        before = -1
        while before != online.turns():
            before = online.turns()
            torch.testing.assert_close(polyconv.conv2d(x, w).double(), exact, atol=1e-3, rtol=1e-4)
        (session,) = online._sessions.values()
        assert session.entry is not None
        assert session.entry.torch_seconds is None
        assert set(session.entry.seconds) == set(names)
        assert preferences.plan(backend, problem).choice == session.entry.choice
        assert "chosen by autotuning in this process" in explain_plans(backend, problem)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_epilogue_by_the_operator(activation: str) -> None:
    run_in_virtual_gpu(_epilogue, activation)


def _epilogue(activation: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 17, 23), torch.randn(16, 8, 3, 3)
    bias, residual = torch.randn(16), torch.randn(2, 16, 17, 23)
    exact = reference.with_epilogue(Geometry(padding=(1, 1, 1, 1)), x, w, bias, residual, activation)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        y = polyconv.conv2d(x, w, bias, padding=1, activation=activation, residual=residual)
        assert all("_epilogue" in launch.name for launch in gpu.launches[-1:])
    torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=1e-4)


def _all_passes(
    case: Case, x: Tensor | None, w: Tensor | None, bias: Tensor | None, gradient: Tensor | None
) -> dict[str, Tensor]:
    """The output and all gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in (("x", x), ("w", w), ("b", bias)) if t is not None}
    y = polyconv.conv2d(leaves["x"], leaves["w"], leaves.get("b"), **case.kwargs)
    y.backward(gradient)
    return {"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@pytest.mark.parametrize("kind", list(Pass))
@pytest.mark.parametrize("workload", HEADLINES)
def test_a_v100_accepts_every_launch_of_the_headline_workloads(workload: str, kind: Pass) -> None:
    """Grid, block, registers, shared memory and parameters at full size; nothing is computed."""
    run_in_virtual_gpu(_launch_at_full_size, HEADLINES[workload].problem(kind))


def _launch_at_full_size(problem: Problem) -> None:
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        prepared = backend.prepare(preferences.plan(backend, problem))
        addresses = {name: (i + 1) << 40 for i, name in enumerate(("x", "w", "y", "bias", "dw", "db", "workspace"))}
        with backend.device.activate():
            for launch in prepared.launches:
                launch(addresses, 0)
        assert len(gpu.launches) == len(prepared.plan.launches) > 0
        for seen, planned in zip(gpu.launches, prepared.plan.launches, strict=True):
            assert seen.params == planned.bind(addresses)


def test_the_gradient_of_a_sum_is_never_copied() -> None:
    """All strides are zero: dense, the dy of W2 would take 8.6 GB."""
    run_in_virtual_gpu(_gradient_of_a_sum)


def _gradient_of_a_sum() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 9, 9, requires_grad=True), torch.randn(12, 8, 3, 3, requires_grad=True)
    exact = torch.autograd.grad(torch.nn.functional.conv2d(x.double(), w.double(), padding=1).sum(), (x, w))
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        y = polyconv.conv2d(x, w, padding=1)
        with Calls() as calls:
            y.sum().backward()
        assert len(gpu.launches) >= 6  # two weight packings, fprop, dgrad, two stages of wgrad
    calls.assert_nothing_laid_out(y.numel())
    for leaf, want in zip((x, w), exact, strict=True):
        assert leaf.grad is not None
        assert (leaf.grad - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_bias_with_strides() -> None:
    """Kernels read the bias as a dense vector: other strides are made dense before."""
    run_in_virtual_gpu(_strided_bias)


def _strided_bias() -> None:
    x, w, bias = torch.randn(1, 8, 6, 6), torch.randn(5, 8, 3, 3), torch.randn(10)[::2]
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        y = polyconv.conv2d(x, w, bias)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, bias), rtol=1e-4, atol=1e-4)
