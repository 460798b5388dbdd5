"""ATen's convolutions and their gradients as functions of a problem. Separate from :mod:`polyconv.cpu.engines.aten`, so
that importing polyconv does not import a planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..problem import Problem

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""ATen's convolution by rank."""


def convolution_backward(
    problem: Problem, dy: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool], padded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's gradients of input, weight and bias, as far as ``wanted``; ``padded``: x includes its padding."""
    arguments = backward_arguments(problem, wanted, padded)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(dy, x, w, *arguments)
    return result


def backward_arguments(problem: Problem, wanted: tuple[bool, bool, bool], padded: bool = False) -> tuple[Any, ...]:
    """Arguments of ``aten::convolution_backward`` after the tensors."""
    nothing = [0] * problem.rank
    padding = nothing if padded else list(problem.padding[::2])
    moves = list(problem.stride), padding, list(problem.dilation)
    return [problem.out_channels], *moves, False, nothing, problem.groups, list(wanted)
