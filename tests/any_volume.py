"""Hypothesis strategy for 3-D convolutions, and their check against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from polyconv.activation import Activation
from polyconv.backend import Run, candidate_names
from polyconv.lowering.lower import lower
from polyconv.numerics import reference
from polyconv.problem import PaddingMode, Pass, Problem
from polyconv.selection import Preference
from virtual_gpu.gpu import VirtualGpu


@st.composite
def volumes(draw: st.DrawFn) -> Problem:
    """A 3-D forward problem of any layout and border; the other passes are derived from it."""
    mode = draw(st.sampled_from([PaddingMode.ZEROS, PaddingMode.ZEROS, *PaddingMode]))
    groups, c, k, batch = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    axes = []
    for _ in range(3):
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        least = max(1, dilation * (kernel - 1) + 1 - before - after)
        if mode is not PaddingMode.ZEROS:
            least = max(least, before + 1, after + 1)
        axes.append((draw(st.integers(least, least + 4)), kernel, stride, dilation, before, after))
    size, kernels, stride, dilation, before, after = zip(*axes, strict=True)
    problem = Problem.make(
        Pass.FPROP,
        (batch, groups * c, *size),
        (groups * k, c, *kernels),
        stride=stride,
        padding=tuple(side for pair in zip(before, after, strict=True) for side in pair),
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        activation=draw(st.sampled_from([Activation.NONE, Activation.RELU])),
    )
    assume(lower(problem, "cpu") is None)  # dispatch drops what sees no pixel before this
    return problem.channels_last() if draw(st.booleans()) else problem


def check(problem: Problem, prepare: Callable[[Problem], Run]) -> None:
    tensors, expected = operands(problem)
    outputs = {name: torch.full_like(dense(value, problem), float("nan")) for name, value in expected.items()}
    dtype = getattr(torch, problem.dtype)
    given = {**{name: value.to(dtype) for name, value in tensors.items()}, **outputs}
    prepare(problem)(given)
    for name, exact in expected.items():
        near = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
        allowed = near * (exact.square().mean().sqrt() + exact.abs())
        assert ((given[name].double() - exact).abs() <= allowed).all(), name


def dense(value: Tensor, problem: Problem) -> Tensor:
    last = problem.x_strides[1] == 1 and value.dim() == 5
    return value.to(getattr(torch, problem.dtype)).contiguous(
        memory_format=torch.channels_last_3d if last else torch.contiguous_format
    )


def check_as_machine_code(problem: Problem, candidate: str) -> None:
    torch.manual_seed(0)
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        assert candidate in candidate_names(backend, problem)
        check(problem, lambda problem: backend.prepare(backend.plan(problem, prefer=Preference(candidate)), trial=True))
        assert gpu.launches


def operands(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and expected results of a pass, in the problem's layout."""
    x, w, y, residual = (
        torch.randn(shape).as_strided(shape, strides).to(getattr(torch, problem.dtype)).double()
        for shape, strides in (
            (problem.x_shape, problem.x_strides),
            (problem.w_shape, problem.w_strides),
            (problem.y_shape, problem.y_strides),
            (problem.y_shape, problem.y_strides),
        )
    )
    bias = torch.randn(problem.out_channels).to(getattr(torch, problem.dtype)).double()
    if problem.kind is Pass.FPROP:
        given = {"x": x, "w": w}
        given |= ({"bias": bias} if problem.bias else {}) | ({"residual": residual} if problem.residual else {})
        added = given.get("bias"), given.get("residual"), str(problem.activation)
        return given, {"y": reference.with_epilogue(problem, x, w, *added)}
    if problem.kind is Pass.DGRAD:
        return {"y": y, "w": w}, {"x": reference.dgrad(problem, y, w, problem.x_shape)}
    dw, db = reference.wgrad(problem, x, y, problem.w_shape)
    return {"x": x, "y": y}, {"dw": dw, **({"db": db} if problem.bias else {})}
