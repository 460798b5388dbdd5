"""PyTorch's own convolution: where it is the best that is known, and where polyconv has no kernel.

The planner weighs it like any other candidate, and ``explain`` says where it runs. What ATen's convolution cannot
express (a different padding on two sides, cropping, a padding mode) is done by padding a copy first: the copy that
polyconv's kernels avoid.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from ..accuracy import error_of, reduction_of
from ..epilogue import apply_epilogue
from ..problem import Activation, PaddingMode, Pass, Problem
from ..rounding import ceil_div
from . import native
from .borders import fold, pad
from .candidates import CpuCandidate
from .device import CpuDevice
from .running import Run
from .weights import TransformedWeights

NAME = "ATen"
"""PyTorch's own convolution, where it is the best that is known."""

_HALF_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the dtypes that results are rounded to; products are summed in float32."""
_LARGEST_TO_SCALE = 5
"""The largest of many results, in units of their scale: it is rounded the most."""
_LARGEST_OF_SUMS = 4
"""The largest error of many such results on the way to them, in the same units and per square root of a term: a result
of 3.5 times the scale, and 3.5 standard deviations of its roundings."""
_ASKED_OF_ONEDNN = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """PyTorch's kernels take everything, and sum in an order of their own: the error is that of one long sum."""
    padded = "" if takes_padding(problem) else " on a padded copy"
    apart = _applied_apart(problem)
    yield CpuCandidate(
        NAME,
        f"PyTorch's convolution{padded}" + (f", {' and '.join(apart)} not fused" if apart else ""),
        direct=True,
        cycles=direct_cycles(problem, device) + len(apart) * _pass_cycles(problem, device),
        error=error_of(problem, None, reduction_of(problem), ()) + _half_error(problem),
    )


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return partial(run, problem)


def _half_error(problem: Problem) -> float:
    """What half precision adds to the error: a rounding at the end, and some on the way.

    A sum of n terms that grows in half precision is rounded n - 1 times before, each time in proportion to what has
    been summed up. These roundings are random. They are worst where a large result meets with bad luck; that a result
    is the largest of all and has the worst luck of all is not to be expected.
    """
    if problem.dtype not in _HALF_ROUNDING:
        return 0.0
    on_the_way = _LARGEST_OF_SUMS * sqrt(_terms_in_half(problem) - 1)
    return _HALF_ROUNDING[problem.dtype] * (_LARGEST_TO_SCALE + on_the_way)


def _terms_in_half(problem: Problem) -> int:
    """How many numbers of half precision PyTorch adds up to one result, each sum rounded.

    One, where oneDNN computes. On a processor without the instructions that oneDNN wants for a dtype, PyTorch
    multiplies matrices: the input gradient is put together tap by tap, the weight gradient image by image. What is done
    apart from the convolution comes on top: a residual, an activation, the images of a pixel in a border.
    """
    terms = 1
    if not _runs_in_onednn(problem.dtype):
        terms = {Pass.FPROP: 1, Pass.DGRAD: prod(problem.kernel), Pass.WGRAD: problem.batch}[problem.kind]
    if problem.kind is Pass.DGRAD and any(problem.padding) and problem.padding_mode is not PaddingMode.ZEROS:
        terms += 3
    return terms + len(_applied_apart(problem))


def _runs_in_onednn(dtype: str) -> bool:
    """Whether PyTorch leaves convolutions of a half-precision dtype to oneDNN here: it asks the processor."""
    supported = getattr(torch.ops.mkldnn, _ASKED_OF_ONEDNN[dtype], None)
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() and bool(supported and supported())


def why_alone(problem: Problem) -> str:
    """Why nothing of polyconv's own can run a problem."""
    if problem.dtype not in ("float32", "float64"):
        return f"polyconv has no CPU kernels for {problem.dtype}"
    return native.why_absent() or "nothing else can run it"


def run(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    """Fill the outputs, or put ATen's in their place where they are laid out alike: that spares a copy."""
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


def _applied_apart(problem: Problem) -> list[str]:
    """What is done to the output after it was stored, in a pass over it each."""
    if problem.kind is not Pass.FPROP:
        return []
    activation = [] if problem.activation is Activation.NONE else [str(problem.activation)]
    return (["residual"] if problem.residual else []) + activation


def _pass_cycles(problem: Problem, device: CpuDevice) -> float:
    """Estimated cycles of one core to read and write the output once more."""
    return 10.0 * prod(problem.y_shape) / device.lanes


def direct_cycles(problem: Problem, device: CpuDevice) -> float:
    """Estimated cycles of one core for PyTorch's kernels, on tensors as they lie in memory.

    They leave out taps that fall into the padding, which are most of them where a dilation is as long as the image; but
    not in the weight gradient. With few channels they reach little more than half of their speed.
    """
    c, k = problem.channels_per_group
    if problem.kind is Pass.DGRAD:
        c, k = k, c
    pairs = c * ceil_div(k, device.lanes)
    met = problem.batch * _taps_met(problem) * _per_vector(problem)
    return _setup(problem) + problem.groups * pairs * (met + _per_weight(problem))


def _setup(problem: Problem) -> float:
    """Cycles of one call that compute nothing: oneDNN looks up a primitive, and for groups orders the weights anew."""
    return 20e3 if problem.groups == 1 else 150e3


def _per_vector(problem: Problem) -> float:
    """Cycles per product of a vector. The figures were fitted on a machine with AVX-512."""
    if problem.kernel == (1, 1):
        return {Pass.FPROP: 0.75, Pass.DGRAD: 1.2, Pass.WGRAD: 1.0}[problem.kind]
    if min(problem.channels_per_group) < 32:
        return 1.1 if problem.kind is Pass.WGRAD else 0.7
    cycles = {Pass.FPROP: 0.46, Pass.DGRAD: 0.5, Pass.WGRAD: 0.51}[problem.kind]
    if problem.stride != (1, 1):
        return {Pass.FPROP: 1.3, Pass.DGRAD: 2.0, Pass.WGRAD: 1.5}[problem.kind] * cycles
    if problem.kind is Pass.FPROP and problem.x_strides[1] == 1:
        return 0.9 * cycles
    if problem.kind is Pass.FPROP and max(problem.dilation) > 6:
        return 2 * cycles
    return cycles


def _per_weight(problem: Problem) -> float:
    """Cycles per vector of weights of one kernel: they are reordered, and in the weight gradient summed over images."""
    return prod(problem.kernel) * (50.0 if problem.kind is Pass.WGRAD else 2.0)


def _taps_met(problem: Problem) -> float:
    """Products per image and pair of channels."""
    met = 1.0
    for axis in range(2):
        extent, pad, d = problem.in_size[axis], problem.padding[2 * axis], problem.dilation[axis]
        out, stride = problem.out_size[axis], problem.stride[axis]
        if problem.kind is Pass.WGRAD:
            met *= out * problem.kernel[axis]
            continue
        reached = [
            min(out, ceil_div(extent + pad - i * d, stride)) - max(0, ceil_div(pad - i * d, stride))
            for i in range(problem.kernel[axis])
        ]
        met *= sum(max(0, count) for count in reached)
    return met


def takes_padding(problem: Problem) -> bool:
    """Whether ATen takes the padding as it is: zeros, the same on both sides, not negative."""
    top, bottom, left, right = problem.padding
    if not (top or bottom or left or right):
        return True
    return problem.padding_mode is PaddingMode.ZEROS and top == bottom >= 0 and left == right >= 0


def takes_tensors(problem: Problem) -> bool:
    """Whether ATen's convolution takes the tensors of a problem as they are, and can be trusted with them."""
    return takes_padding(problem) and not _is_misread(problem)


def _fprop(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    native = takes_padding(problem)
    x = x if native else pad(problem, x)
    padding = [problem.padding[0], problem.padding[2]] if native else [0, 0]
    dtype = x.dtype
    if _is_misread(problem):
        x, w, bias = x.float(), w.float(), None if bias is None else bias.float()
    return F.conv2d(x, w, bias, problem.stride, padding, problem.dilation, problem.groups).to(dtype)


def _is_misread(problem: Problem) -> bool:
    """Whether oneDNN's half-precision kernels may read the wrong rows, so that the pass has to be done in float32.

    Those for AMX do, where an output has one column and a horizontal stride (torch 2.13.0). One column is soon done.
    """
    return problem.dtype in _HALF_ROUNDING and problem.out_size[1] == 1 and problem.stride[1] > 1


def _dgrad(problem: Problem, dy: Tensor, w: Tensor, dx: Tensor) -> Tensor:
    if takes_padding(problem):
        return convolution_backward(problem, dy, dx, w, (True, False, False))[0]
    padded_shape = list(problem.x_shape)
    padded_shape[2] += problem.padding[0] + problem.padding[1]
    padded_shape[3] += problem.padding[2] + problem.padding[3]
    # Only the shape of this tensor is read: an expanded scalar has it at no cost.
    padded = dx.new_empty(()).expand(padded_shape)
    grad_padded = convolution_backward(problem, dy, padded, w, (True, False, False), padded=True)[0]
    return fold(problem, grad_padded, dx)


def _wgrad(problem: Problem, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
    native = takes_padding(problem)
    x = x if native else pad(problem, x)
    wanted = (False, True, db is not None)
    _, grad_weight, grad_bias = convolution_backward(problem, dy, x, dw, wanted, padded=not native)
    dw.copy_(grad_weight)
    if db is not None:
        db.copy_(grad_bias)


def convolution_backward(
    problem: Problem, dy: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool, bool], padded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's gradients of input, weight and bias, those that are wanted; ``padded``: x has its padding already."""
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
