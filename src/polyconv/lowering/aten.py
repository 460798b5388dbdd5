"""ATen's convolutions and their gradients as functions of a problem. Separate from :mod:`polyconv.cpu.engines.aten`, so
that importing polyconv does not import a planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.bypass import bypassing

if TYPE_CHECKING:
    from ..problem import Problem

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
