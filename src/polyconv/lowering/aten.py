"""ATen's convolutions and their gradients as functions of a problem, on any device. Separate from the planners, so that
importing polyconv does not import one.

What ATen cannot express (unequal padding, cropping, a padding mode) needs a padded copy.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import HALF_DTYPES, Pass, Problem
from ..runtime.bypass import bypassing
from .border import fold, pad, padded_size
from .epilogue import apply_epilogue

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""ATen's convolution by rank, or its override by :func:`polyconv.enable`."""


def convolution(x: Tensor, *arguments: Any) -> Tensor:
    """ATen's convolution of any rank, never its override."""
    return bypassing(CONVOLUTIONS[x.dim() - 2], x, *arguments)


def convolution_backward(
    problem: Problem, dy: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool], padded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's gradients of input, weight and bias, as far as ``wanted``; ``padded``: x includes its padding."""
    arguments = backward_arguments(problem, wanted, padded)
    return gradients(dy, x, w, *arguments)


def gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::convolution_backward``, never its override."""
    result: tuple[Tensor, Tensor, Tensor] = bypassing(torch.ops.aten.convolution_backward, *arguments)
    return result


def backward_arguments(problem: Problem, wanted: tuple[bool, bool, bool], padded: bool = False) -> tuple[Any, ...]:
    """Arguments of ``aten::convolution_backward`` after the tensors."""
    nothing = [0] * problem.rank
    padding = nothing if padded else list(problem.padding[::2])
    moves = list(problem.stride), padding, list(problem.dilation)
    return [problem.out_channels], *moves, False, nothing, problem.groups, list(wanted)


def run(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    """Fill the outputs, or replace one by ATen's result if its strides match, which saves a copy."""
    if problem.kind is not Pass.WGRAD:
        name = "y" if problem.kind is Pass.FPROP else "x"
        wanted = tensors[name]
        if problem.kind is Pass.FPROP:
            result = _fprop(problem, tensors["x"], tensors["w"], tensors.get("bias"))
            apply_epilogue(result, tensors.get("residual"), problem.activation)
        else:
            result = _dgrad(problem, tensors["y"], tensors["w"], wanted)
        if result.stride() == wanted.stride():
            tensors[name] = result
        else:
            wanted.copy_(result)
    else:
        _wgrad(problem, tensors["x"], tensors["y"], tensors["dw"], tensors.get("db"))


def takes_tensors(problem: Problem) -> bool:
    """True if ATen computes the problem correctly on a CPU without copies."""
    return problem.has_aten_padding and not _is_misread(problem) and not _is_overrun(problem)


def _fprop(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    native = problem.has_aten_padding
    x = x if native else pad(problem, x)
    padding = problem.padding[::2] if native else (0,) * problem.rank
    dtype = x.dtype
    if not x.is_cuda and _is_misread(problem):
        x, w, bias = x.float(), w.float(), None if bias is None else bias.float()
    return convolution(x, w, bias, problem.stride, padding, problem.dilation, problem.groups).to(dtype)


def _is_misread(problem: Problem) -> bool:
    """True if oneDNN's half-precision AMX kernels may read wrong rows (torch 2.13.0): one output column and a
    horizontal stride. The pass then runs in float32, which is cheap for one column."""
    return problem.dtype in HALF_DTYPES and problem.out_size[-1] == 1 and problem.stride[-1] > 1


def _is_overrun(problem: Problem) -> bool:
    """True if oneDNN's weight gradient may read past the image and crash (torch 2.13.0): AVX-512, single taps with a
    stride, few channels, channels_last. A copy in NCHW runs another kernel."""
    few = problem.channels_per_group[0] < 16 and problem.x_strides[1] == 1
    return problem.kind is Pass.WGRAD and max(problem.kernel) == 1 and max(problem.stride) > 1 and few


def _dgrad(problem: Problem, dy: Tensor, w: Tensor, dx: Tensor) -> Tensor:
    if problem.has_aten_padding:
        return convolution_backward(problem, dy, dx, w, (True, False, False))[0]
    # Only the shape is read, so an expanded scalar suffices.
    padded = dx.new_empty(()).expand(*problem.x_shape[:2], *padded_size(problem))
    grad_padded = convolution_backward(problem, dy, padded, w, (True, False, False), padded=True)[0]
    return fold(problem, grad_padded, dx)


def _wgrad(problem: Problem, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
    native = problem.has_aten_padding
    x = x if native else pad(problem, x)
    wanted = (False, True, db is not None)
    w = dw
    if not x.is_cuda and _is_overrun(problem):
        dy, x, w = dy.contiguous(), x.contiguous(), dw.new_empty(dw.shape)
    _, grad_weight, grad_bias = convolution_backward(problem, dy, x, w, wanted, padded=not native)
    dw.copy_(grad_weight)
    if db is not None:
        db.copy_(grad_bias)
