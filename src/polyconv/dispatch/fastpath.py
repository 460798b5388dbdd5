"""Fast path: a forward pass without PyTorch's dispatcher, where the dispatcher would only find the kernel.

The dispatcher checks each call for autocast, ``torch.func``, modes, tracers and tensor subclasses, which takes about
30 microseconds for an operator written in Python. The fast path takes one lookup, by shapes and arguments, of a
prepared call, and one guard on how the dispatcher would see the tensors. If that fails, :func:`convolve` returns None
and the operator is called.

Passthrough: if ATen's convolution is the plan of every pass, it is called as ``torch.nn.Conv2d`` calls it, so that the
derivative is PyTorch's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import is_
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..arguments import Extent, Geometry, Padding, activation_name, normalise, per_axis, suggests_channels_last
from ..autotune.online import awaited
from ..backend import backend_for
from ..lowering.aten import CONVOLUTIONS, backward_arguments
from ..lowering.epilogue import apply_epilogue, summed_per_channel
from ..problem import Activation, Problem
from ..runtime import state_version
from ..runtime.frozen_weights import frozen_marks
from ..runtime.guards import TYPES, alike, are_plain, is_watched
from ..util.lru import LruTable
from . import passthrough
from .execute import compute_dgrad, compute_fprop, compute_wgrad, describe_dgrad, describe_fprop, describe_wgrad
from .operands import (
    HALF,
    Layout,
    check_residual,
    check_tensors,
    dense_strides,
    described,
    dgrad_problem,
    fprop_problem,
    geometry_of,
    transposed_layout,
    wgrad_problem,
)
from .prepare import Call, are_passthrough, known, recall, remember
from .transforms.autograd import Gradients, dgrad_gradients, fprop_gradients

LONGEST_ROW = 8
"""Most calls cached for one key of shapes and arguments. They differ in strides, dtypes or ``requires_grad``."""

_OPTIONAL = (*TYPES, type(None))

_is_grad_enabled = torch.is_grad_enabled

_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


class ShortCall(Call):
    """A call with guards on its tensors. Calls with equal keys form a linked list, see ``following``."""

    __slots__ = ("arguments", "backwards", "fits", "fits_residual", "following", "left_to_torch", "place", "torchs")

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        geometry: Geometry,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        inference: bool,
        arguments: tuple[Any, ...],
        following: ShortCall | None,
        output_padding: tuple[int, ...] | None = None,
    ) -> None:
        """``output_padding``: None unless the convolution is transposed."""
        super().__init__(problem, layout, geometry, x.device, inference=inference)
        self.arguments = arguments
        """Arguments of the geometry as the caller wrote them."""
        self.fits = alike(x, w) if bias is None else alike(x, w, bias)
        self.fits_residual = alike() if residual is None else alike(residual)  # separate: it may be the input
        self.backwards: LruTable[Hashable, Backward] = LruTable(LONGEST_ROW)
        """Prepared gradients. The only mutable part of a call."""
        self.following = following
        self.place: int = 1 if following is None else following.place + 1
        transposed = output_padding is not None
        passes = [] if self.run is None else list((_transposed_passes if transposed else _passes)(self, x, w))
        is_left = bool(passes) and are_passthrough(passes, x.device, inference=inference)
        if self.run is not None and not is_left:
            self.run = awaited(backend_for(x.device), map(Problem.as_2d, passes[1:]), self.run)
        self.torchs = (_TRANSPOSED if transposed else CONVOLUTIONS)[problem.rank]
        stride, padding, dilation = map(_for_torch, (geometry.stride, geometry.padding[::2], geometry.dilation))
        self.left_to_torch: tuple[Any, ...] | None = None
        """Arguments of ATen's convolution if all passes are passthrough, else None."""
        if is_left and output_padding is not None:
            self.left_to_torch = (stride, padding, _for_torch(output_padding), geometry.groups, dilation)
        elif is_left:
            self.left_to_torch = (stride, padding, dilation, geometry.groups)

    def gradients(
        self, grad: Tensor, x: Tensor, w: Tensor, want_x: bool, want_w: bool, want_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias, None where not wanted. Their calls are prepared once."""
        number = state_version.current()
        wanted = want_x, want_w, want_bias
        # Saved-tensor hooks may have moved x and w.
        key = number, wanted, grad.stride(), x.stride(), w.stride(), (grad.data_ptr() | x.data_ptr()) & 15
        found = self.backwards[key]
        if found is None:
            found = Backward.of(self, grad, x, w, *wanted)
            if state_version.current() == number:
                self.backwards.put(key, found)
        dx = dw = db = None
        if found.left_to_torch is not None:
            dx, dw, db = torch.ops.aten.convolution_backward(grad, x, w, *found.left_to_torch)
        if found.dgrad is not None:
            dx = compute_dgrad(found.dgrad, grad, w, None)
        if found.wgrad is not None:
            dw, db = compute_wgrad(found.wgrad, grad, x)
        elif want_bias and not want_w:
            db = summed_per_channel(grad)
        return dx, dw, db if want_bias else None


class Backward(NamedTuple):
    """Prepared gradients of a call, for given strides of the tensors."""

    dgrad: Call | None
    wgrad: Call | None
    """Both are None where not wanted or passthrough."""
    left_to_torch: tuple[Any, ...] | None
    """Arguments of the one ``aten.convolution_backward`` for all passthrough gradients; None if there are none."""

    @classmethod
    def of(
        cls, call: Call, grad: Tensor, x: Tensor, w: Tensor, want_x: bool, want_w: bool, want_bias: bool
    ) -> Backward:
        geometry, device = call.geometry, grad.device
        dgrad = wgrad = None
        if want_x:
            dgrad = recall(dgrad_problem, describe_dgrad(grad, w, _layout_of(x), None, geometry), device)
        if want_w:
            wgrad = recall(wgrad_problem, describe_wgrad(grad, x, _layout_of(w), want_bias, geometry), device)
        x_left, w_left = (_is_left(found, device) for found in (dgrad, wgrad))
        torchs: tuple[Any, ...] | None = None
        if x_left or w_left:
            torchs = backward_arguments(call.problem, (x_left, w_left, w_left and want_bias))
        return cls(None if x_left else dgrad, None if w_left else wgrad, torchs)


def _is_left(call: Call | None, device: torch.device) -> bool:
    return call is not None and call.run is not None and are_passthrough([call.problem], device, inference=False)


def _layout_of(tensor: Tensor) -> Layout:
    """Layout of the gradient of ``tensor``."""
    return tuple(tensor.shape), suggests_channels_last(tensor.shape, tensor.stride())


def _for_torch(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    """A single int if all are equal: ATen parses it in a third of the time."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _passes(call: Call, x: Tensor, w: Tensor) -> Iterator[Problem]:
    """Problems of a call and its gradients, which are assumed to be dense, as in :func:`polyconv.explain`."""
    yield call.problem
    grad = (call.layout[0], dense_strides(*call.layout))
    if not call.inference and x.requires_grad:
        yield dgrad_problem(grad, described(w), _layout_of(x), None, x.dtype, True, call.geometry)[0]
    if not call.inference and w.requires_grad:
        yield wgrad_problem(grad, described(x), _layout_of(w), call.problem.bias, x.dtype, True, call.geometry)[0]


def _transposed_passes(call: Call, x: Tensor, w: Tensor) -> Iterator[Problem]:
    """:func:`_passes` of a transposed convolution: its gradients are a forward pass and a weight gradient."""
    yield call.problem
    grad = (call.layout[0], dense_strides(*call.layout))
    if not call.inference and x.requires_grad:
        yield fprop_problem(grad, described(w), None, False, "none", False, x.dtype, True, call.geometry)[0]
    if not call.inference and w.requires_grad:
        yield wgrad_problem(described(x), grad, _layout_of(w), False, x.dtype, True, call.geometry)[0]


def convolve(
    rank: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Padding,
    dilation: Extent,
    groups: int,
    padding_mode: str,
    tolerance: float | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    module: torch.nn.Module | None = None,
) -> Tensor | None:
    """Run a convolution over ``rank`` axes. Returns None if the operator has to be called.

    ``module``: the calling module, if its attributes alone determine the arguments; enables the passthrough cache.
    """
    if type(x) not in TYPES or type(w) not in TYPES or is_watched():
        return None
    if type(bias) not in _OPTIONAL or type(residual) not in _OPTIONAL:
        return None
    number, graded, is_vouched = state_version.current(), _is_grad_enabled(), id(w) in frozen_marks
    if activation == "silu" and graded and _want_gradient(x, w, bias, residual):
        # The derivative of SiLU needs its input, so it is applied separately.
        sums = convolve(rank, x, w, bias, stride, padding, dilation, groups, padding_mode, tolerance, None, residual)
        return None if sums is None else F.silu(sums)
    try:
        address = x.data_ptr() if residual is None else x.data_ptr() | residual.data_ptr()
        key: Hashable = (
            number,
            graded,
            rank,
            x.shape,
            w.shape,
            address & 15,
            is_vouched,
            None if bias is None else bias.is_nested,
            None if residual is None else residual.is_nested,
            stride,
            padding,
            dilation,
            groups,
            padding_mode,
            tolerance,
            activation,
        )
        row = cast("ShortCall | None", known[key])
    except (TypeError, RuntimeError):  # an unhashable argument (a list); a tensor without shape or storage
        return None
    call = _fitting(row, x, w, bias, residual)
    if call is not None:
        # 1.0 and True are equal to 1 as keys, but not integers.
        one, two, three, four = call.arguments
        same = one is stride and two is padding and three is dilation and four is groups
        if not same and not _are_exact(rank, stride, padding, dilation, groups):
            return None
    else:
        if not _may_be_remembered(rank, x, w, bias, residual):
            return None
        if not _are_exact(rank, stride, padding, dilation, groups):
            return None
        check_tensors(x, "input", w, "weight", bias, residual)
        numbers = stride, padding, dilation, groups, padding_mode, tolerance
        geometry = geometry_of(*normalise(w.shape[2:], *numbers, rank=rank))
        inference = not (graded and _want_gradient(x, w, bias, residual))
        frozen = inference and is_vouched
        description = describe_fprop(x, w, bias, residual, activation_name(activation), frozen, geometry)
        problem, layout = fprop_problem(*description)
        if residual is not None:
            check_residual(residual, layout[0])
        call = ShortCall(
            problem,
            layout,
            geometry,
            x,
            w,
            bias,
            residual,
            inference=inference,
            arguments=(stride, padding, dilation, groups),
            following=row if row is not None and row.place < LONGEST_ROW else None,
        )
        remember(key, number, call)
    if call.left_to_torch is not None:
        y = call.torchs(x, w, bias, *call.left_to_torch)
        if residual is not None or activation is not None:
            return apply_epilogue(y, residual, call.problem.activation)
        if module is not None:
            values = stride, padding, dilation, groups, padding_mode, tolerance, activation
            how = call.fits, call.torchs, call.left_to_torch
            passthrough.remember(module, number, graded, is_vouched, bias, *how, passthrough.ATTRIBUTES, values)
        return y
    return compute_fprop(call, x, w, bias, residual) if call.inference else _record(call, x, w, bias, residual)


def transpose(
    rank: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Extent,
    output_padding: Extent,
    groups: int,
    dilation: Extent,
    tolerance: float | None,
    module: torch.nn.Module | None = None,
) -> Tensor | None:
    """:func:`convolve` for a transposed convolution, which is an input gradient with a bias."""
    if type(x) not in TYPES or type(w) not in TYPES or type(bias) not in _OPTIONAL or is_watched():
        return None
    number, graded, is_vouched = state_version.current(), _is_grad_enabled(), id(w) in frozen_marks
    arguments = stride, padding, output_padding, groups, dilation
    try:
        nested = None if bias is None else bias.is_nested
        aligned = x.data_ptr() & 15
        key: Hashable = (number, graded, "transposed", rank, x.shape, w.shape, aligned, nested, *arguments, tolerance)
        row = cast("ShortCall | None", known[key])
    except (TypeError, RuntimeError):  # an unhashable argument (a list); a tensor without shape or storage
        return None
    call = _fitting(row, x, w, bias, None)
    same = call is not None and all(map(is_, call.arguments, arguments))
    if not same and not (_are_exact(rank, stride, padding, dilation, groups) and _are_exact(rank, output_padding)):
        return None
    if call is None:
        if not _may_be_remembered(rank, x, w, bias, None):
            return None
        check_tensors(x, "input", w, "weight", bias)
        settled, layout = transposed_layout(rank, x, w, bias, *arguments, tolerance)
        geometry = geometry_of(*settled)
        problem, _ = dgrad_problem(*describe_dgrad(x, w, layout, bias, geometry))
        call = ShortCall(
            problem,
            layout,
            geometry,
            x,
            w,
            bias,
            None,
            inference=not (graded and _want_gradient(x, w, bias)),
            arguments=arguments,
            following=row if row is not None and row.place < LONGEST_ROW else None,
            output_padding=per_axis("output_padding", output_padding, rank),
        )
        remember(key, number, call)
    if call.left_to_torch is not None:
        mode = getattr(module, "padding_mode", None)
        if mode == "zeros":  # there is a module, and no other thread has just set a mode that it would reject
            how = call.fits, call.torchs, call.left_to_torch
            values = *arguments, tolerance, mode
            passthrough.remember(module, number, graded, is_vouched, bias, *how, passthrough.TRANSPOSED, values)
        return call.torchs(x, w, bias, *call.left_to_torch)
    return compute_dgrad(call, x, w, bias) if call.inference else _record_transposed(call, x, w, bias)


def _fitting(
    call: ShortCall | None, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
) -> ShortCall | None:
    """First call of a linked list whose guards accept these tensors; None if there is none."""
    while call is not None:
        fits = call.fits(x, w) if bias is None else call.fits(x, w, bias)
        if fits and (residual is None or call.fits_residual(residual)):
            break
        call = call.following
    return call


def _want_gradient(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _may_be_remembered(rank: int, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the dispatcher would only find the kernel, and guards can describe the tensors."""
    if x.dtype not in (torch.float32, torch.float64) and not (x.is_cpu and x.dtype in HALF):  # a GPU may widen them
        return False
    if any(tensor.dim() != rank + 2 for tensor in (x, w, residual) if tensor is not None) or x is w:
        return False
    return are_plain(*(tensor for tensor in (x, w, bias, residual) if tensor is not None))


class _Recorded(_SingleLevelFunction):
    """Autograd node of a prepared call. It has no ``setup_context``, because torch would inspect the arguments."""

    @staticmethod
    def forward(
        ctx: Any, call: ShortCall, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        y = compute_fprop(call, x, w, bias, residual)
        ctx.geometry, ctx.gradients = call.geometry, call.gradients
        ctx.set_materialize_grads(False)
        if call.problem.activation is Activation.RELU:
            ctx.save_for_backward(x, w, y)
        else:
            ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return (None, *fprop_gradients(ctx, grads[0], ctx.needs_input_grad[1:], ctx.gradients))


class _RecordedTransposed(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.geometry = call.geometry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return compute_dgrad(call, x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return (None, *dgrad_gradients(ctx, grads[0], ctx.needs_input_grad[1:]))


# `apply` of the base class: `Function.apply` first looks for torch.func transforms, which the guards exclude.
_record: Callable[..., Tensor] = _Recorded.apply  # type: ignore[attr-defined]
_record_transposed: Callable[..., Tensor] = _RecordedTransposed.apply  # type: ignore[attr-defined]


def _are_exact(rank: int, stride: object, padding: object = 0, dilation: object = 1, groups: object = 1) -> bool:
    """Whether each argument is an int, a tuple of ``rank`` ints, or a string."""
    for argument in (stride, padding, dilation):
        if type(argument) is tuple:
            if len(argument) != rank or not all(type(number) is int for number in argument):
                return False
        elif type(argument) is not int and type(argument) is not str:
            return False
    return type(groups) is int
