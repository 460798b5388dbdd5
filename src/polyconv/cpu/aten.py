"""The fall-back for CPU tensors: PyTorch's own convolution, until polyconv has CPU kernels.

It exists so that a model with polyconv's modules behaves the same everywhere, and so that everything above the backends
can be tested without a GPU. What ATen's convolution cannot express (a different padding on two sides, cropping, a
padding mode) is done by padding a copy first: the copy that the CUDA kernels avoid.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import PaddingMode, Pass, Problem


class AtenBackend:
    """Implements :class:`polyconv.backends.Backend` with ``torch.ops.aten``."""

    name = "aten"

    def run(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        if problem.kind is Pass.FPROP:
            _fprop(problem, tensors["x"], tensors["w"], tensors.get("bias"), tensors["y"])
        elif problem.kind is Pass.DGRAD:
            _dgrad(problem, tensors["y"], tensors["w"], tensors["x"])
        else:
            _wgrad(problem, tensors["x"], tensors["y"], tensors["dw"], tensors.get("db"))

    def explain(self, problem: Problem) -> str:
        padded = "" if _is_native(problem) else ", on a padded copy of the input"
        return f"{problem}\n  ATen's convolution runs{padded}: polyconv has no CPU kernels yet"


def _is_native(problem: Problem) -> bool:
    """Whether ATen takes the padding as it is: zeros, the same on both sides, not negative."""
    top, bottom, left, right = problem.padding
    if not (top or bottom or left or right):
        return True
    return problem.padding_mode is PaddingMode.ZEROS and top == bottom >= 0 and left == right >= 0


def pad(problem: Problem, x: Tensor) -> Tensor:
    """A copy of ``x`` with the problem's padding around it."""
    top, bottom, left, right = problem.padding
    mode = "constant" if problem.padding_mode is PaddingMode.ZEROS else problem.padding_mode.value
    return F.pad(x, (left, right, top, bottom), mode=mode)


def _fprop(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    native = _is_native(problem)
    x = x if native else pad(problem, x)
    padding = [problem.padding[0], problem.padding[2]] if native else [0, 0]
    y.copy_(F.conv2d(x, w, bias, problem.stride, padding, problem.dilation, problem.groups))


def _dgrad(problem: Problem, dy: Tensor, w: Tensor, dx: Tensor) -> None:
    if _is_native(problem):
        dx.copy_(_convolution_backward(problem, dy, dx, w, (True, False, False))[0])
        return
    padded_shape = list(problem.x_shape)
    padded_shape[2] += problem.padding[0] + problem.padding[1]
    padded_shape[3] += problem.padding[2] + problem.padding[3]
    # Only the shape of this tensor is read: an expanded scalar has it at no cost.
    padded = dx.new_empty(()).expand(padded_shape)
    grad_padded = _convolution_backward(problem, dy, padded, w, (True, False, False), padded=True)[0]
    dx.copy_(_pad_backward(problem, grad_padded, dx))


def _pad_backward(problem: Problem, grad: Tensor, dx: Tensor) -> Tensor:
    """The derivative of :func:`pad`, written out: operators run below autograd, which cannot be asked for it there."""
    top, bottom, left, right = problem.padding
    if problem.padding_mode is PaddingMode.ZEROS:
        return F.pad(grad, (-left, -right, -top, -bottom))
    if problem.padding_mode is PaddingMode.CIRCULAR:
        return _unwrap(_unwrap(grad, 3, left, right), 2, top, bottom)
    backward = {
        PaddingMode.REFLECT: torch.ops.aten.reflection_pad2d_backward,
        PaddingMode.REPLICATE: torch.ops.aten.replication_pad2d_backward,
    }[problem.padding_mode]
    result: Tensor = backward(grad, dx, [left, right, top, bottom])
    return result


def _unwrap(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Adds the gradients of wrapped copies to the pixels that they were copied from."""
    size = grad.shape[dim] - before - after
    inner = grad.narrow(dim, before, size).clone()
    inner.narrow(dim, size - before, before).add_(grad.narrow(dim, 0, before))
    inner.narrow(dim, 0, after).add_(grad.narrow(dim, before + size, after))
    return inner


def _wgrad(problem: Problem, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
    native = _is_native(problem)
    x = x if native else pad(problem, x)
    wanted = (False, True, db is not None)
    _, grad_weight, grad_bias = _convolution_backward(problem, dy, x, dw, wanted, padded=not native)
    dw.copy_(grad_weight)
    if db is not None:
        db.copy_(grad_bias)


def _convolution_backward(
    problem: Problem, dy: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool], padded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    padding = [0, 0] if padded else [problem.padding[0], problem.padding[2]]
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        dy,
        x,
        w,
        [problem.out_channels],
        list(problem.stride),
        padding,
        list(problem.dilation),
        False,
        [0, 0],
        problem.groups,
        list(wanted),
    )
    return result
