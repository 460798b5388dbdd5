"""Fast path: a forward pass without PyTorch's dispatcher, where the dispatcher would only find the kernel.

The dispatcher checks each call for autocast, ``torch.func``, modes, tracers and tensor subclasses, which takes about
30 microseconds for an operator written in Python. The fast path takes one lookup, by shapes and arguments, of a
prepared call, and one guard on how the dispatcher would see the tensors. If that fails, :func:`call` takes the
operator path.

Passthrough: if ATen's convolution is the plan of every pass, it is called as ``torch.nn.Conv2d`` calls it, so that the
derivative is PyTorch's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..activation import Activation
from ..arguments import Geometry, activation_name, normalise, per_axis, suggests_channels_last
from ..autotune import preferences
from ..backend import backend_name
from ..lowering.aten import backward_arguments, gradients
from ..lowering.epilogue import apply_epilogue, summed_per_channel
from ..problem import Problem, Tolerance, dense_strides, planned_length
from ..runtime import state_version
from ..runtime.frozen_weights import frozen_marks
from ..runtime.guards import TYPES, alike, are_plain, is_watched
from ..util import tf32
from ..util.lru import LruTable
from . import operator_path, passthrough
from .execute import compute_dgrad, compute_fprop, compute_wgrad, describe_dgrad, describe_fprop, describe_wgrad
from .op import Args, Op
from .operands import (
    HALF,
    Layout,
    check_residual,
    check_tensors,
    described,
    dgrad_problem,
    fprop_problem,
    geometry_of,
    transposed_layout,
    wgrad_problem,
)
from .prepare import Call, known, recall, remember, tell_if_behind
from .transforms.autograd import Gradients, dgrad_gradients, fprop_gradients

LONGEST_ROW = 8
"""Most calls cached for one key of shapes and arguments. They differ in strides, dtypes or ``requires_grad``."""

_OPTIONAL = (*TYPES, type(None))
_DTYPES = (torch.float32, torch.float64, *HALF)

_is_grad_enabled = torch.is_grad_enabled


def call(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: Tolerance | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    module: torch.nn.Module | None = None,
    policy: str | None = None,
) -> Tensor:
    """Run a convolution.

    Args:
        args: the geometry. A transposed convolution has neither activation nor residual.
        module: the calling module, if its attributes alone determine the arguments; enables the passthrough cache.
        policy: that of :func:`polyconv.replace`; None if the program itself calls polyconv.
    """
    found, given = None, None
    if type(x) in TYPES and type(w) in TYPES and type(bias) in _OPTIONAL and type(residual) in _OPTIONAL:
        number, graded, is_frozen = state_version.current(), _is_grad_enabled(), id(w) in frozen_marks
        if activation is not None and graded and _want_gradient(x, w, bias, residual):
            applied = Activation(activation_name(activation))
            if not applied.is_saved_by_output:  # its derivative needs the sums, so it is applied separately
                return applied(call(op, x, w, bias, args, tolerance, None, residual, policy=policy))
        found = _find(op, x, w, bias, args, tolerance, activation, residual, number, graded, is_frozen, policy)
        if found is None and policy == "auto" and activation is None and residual is None and x.is_cuda:
            given = _atens_under_autocast(op, x, w, bias, args, tolerance, number, graded)
    if found is not None:
        given = found.aten_arguments
        if given is None:
            if found.inference:
                return found.compute(found, x, w, bias, residual)
            return _record(found, x, w, bias, residual)
    elif given is None:
        return operator_path.call(op, x, w, bias, args, tolerance, activation, residual, policy)
    y = op.aten(x, w, bias, *given)
    if found is not None and (residual is not None or activation is not None):
        return apply_epilogue(y, residual, found.problem.activation)
    if found is not None and found.is_new:  # perhaps one of very many lengths, each of which comes once
        found.is_new = False
    elif module is not None:
        guard = found.guard if found is not None else alike(x, w) if bias is None else alike(x, w, bias)
        last = getattr(module, "padding_mode", None) if op.transposed else activation
        if not op.transposed or last == "zeros":  # another thread may just have set a mode that the module rejects
            how = guard, op.aten, given, op.attributes, (*args, tolerance, last, policy)
            passthrough.remember(module, number, graded, is_frozen, bias, *how)
    return y


def _find(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: Tolerance | None,
    activation: str | None,
    residual: Tensor | None,
    number: int,
    graded: bool,
    is_frozen: bool,
    policy: str | None,
) -> GuardedCall | None:
    """Cached or new call for these arguments. None if the operator has to be called."""
    if is_watched():
        return None
    either = policy == "auto" and backend_name(x.device) == "cuda"
    try:
        address = x.data_ptr() if residual is None else x.data_ptr() | residual.data_ptr()
        key: tuple[Hashable, ...] = (
            number,
            graded,
            op,
            x.shape,
            w.shape,
            address & 15,
            is_frozen,
            None if bias is None else bias.is_nested,
            None if residual is None else residual.is_nested,
            args,
            tolerance,
            activation,
            tf32.is_allowed() if either or x.is_cuda else None,
        )
        row = cast("GuardedCall | None", known[key])
    except (TypeError, RuntimeError):  # an unhashable argument (a list); a tensor without shape or storage
        return None
    found = row
    while found is not None:
        if (found.guard(x, w) if bias is None else found.guard(x, w, bias)) and (
            residual is None or found.residual_guard(residual)
        ):
            break
        found = found.following
    if found is not None:
        # 1.0 and True are equal to 1 as keys, but not integers.
        one, two, three, four, five = found.args
        a, b, c, d, e = args
        same = one is a and two is b and three is c and four is d and five is e
        return found if same or _are_exact(op.rank, args) else None
    if not _may_be_remembered(op.rank, x, w, bias, residual) or not _are_exact(op.rank, args):
        return None
    check_tensors(x, "input", w, "weight", bias, residual)
    tensors = (x, w) if bias is None else (x, w, bias)
    signals, of_any_length = None, None
    if op.rank == 1 and x.dtype == torch.float32 and x.is_cpu and activation is None and residual is None:
        of_any_length = (*key[:3], x.shape[:2], *key[4:])
        signals = _signals[of_any_length]
        if signals is not None and row is None and (found := signals.find(*tensors)) is not None:
            remember(key, number, found)
            return found
    inference = not (graded and _want_gradient(x, w, bias, residual))
    problem, layout, geometry = _described(
        op, x, w, bias, args, tolerance, activation, residual, inference and is_frozen, policy if either else None
    )
    if policy == "own" and x.is_cuda:
        tell_if_behind(problem, x.device)
    following = row if row is not None and row.place < LONGEST_ROW else None
    found = GuardedCall(op, problem, layout, geometry, (x, w, bias, residual), args, following, inference=inference)
    remember(key, number, found)
    if of_any_length is not None and found.aten_arguments is not None and preferences.are_none(problem.as_2d()):
        signals = signals or _Signals(found, *tensors)
        signals.add(found, *tensors)
        if state_version.current() == number:
            _signals.put(of_any_length, signals)
    return found


def _described(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: Tolerance | None,
    activation: str | None,
    residual: Tensor | None,
    frozen: bool,
    policy: str | None,
) -> tuple[Problem, Layout, Geometry]:
    """Problem of a call, layout of its output, and its geometry. Raises if the arguments do not fit."""
    if op.transposed:
        settled, layout = transposed_layout(op.rank, x, w, bias, *args, tolerance)
        geometry = geometry_of(*settled.under_policy(policy))
        return *dgrad_problem(*describe_dgrad(x, w, layout, bias, geometry)), geometry
    geometry = geometry_of(*normalise(w.shape[2:], *args, tolerance, rank=op.rank).under_policy(policy))
    description = describe_fprop(x, w, bias, residual, activation_name(activation), frozen, geometry)
    problem, layout = fprop_problem(*description)
    if residual is not None:
        check_residual(residual, layout[0])
    return problem, layout, geometry


class GuardedCall(Call):
    """A call with guards on its tensors. Calls with equal keys form a linked list, see ``following``."""

    __slots__ = (
        "args",
        "aten_arguments",
        "backwards",
        "compute",
        "following",
        "guard",
        "is_new",
        "op",
        "place",
        "residual_guard",
    )

    def __init__(
        self,
        op: Op,
        problem: Problem,
        layout: Layout,
        geometry: Geometry,
        tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        args: Args,
        following: GuardedCall | None,
        *,
        inference: bool,
    ) -> None:
        x, w, bias, residual = tensors
        gradients = () if inference else _gradients(op, problem, layout, geometry, x, w)
        super().__init__(problem, layout, geometry, x.device, inference=inference, gradients=gradients)
        self.op = op
        self.compute: Callable[..., Tensor] = compute_dgrad if op.transposed else compute_fprop
        self.args = args
        """Arguments of the geometry as the caller wrote them."""
        self.guard = alike(x, w) if bias is None else alike(x, w, bias)
        self.residual_guard = alike() if residual is None else alike(residual)  # separate: it may be the input
        self.backwards: LruTable[Hashable, Backward] = LruTable(LONGEST_ROW)
        """Prepared gradients. With :attr:`is_new`, the only mutable part of a call."""
        self.is_new = False
        """Whether it was made by :meth:`guarding` and has not run yet."""
        self.following = following
        self.place: int = 1 if following is None else following.place + 1
        self.aten_arguments: tuple[Any, ...] | None = _aten_arguments(op, args, geometry) if self.passthrough else None
        """Arguments of ATen's convolution after the tensors if all passes are passthrough, else None."""

    def guarding(self, *tensors: Tensor) -> GuardedCall:
        """The same passthrough call for other tensors."""
        other = copy(self)
        other.guard, other.backwards = alike(*tensors), LruTable(LONGEST_ROW)
        other.following, other.place, other.is_new = None, 1, True
        return other

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
        if found.aten_arguments is not None:
            dx, dw, db = gradients(grad, x, w, *found.aten_arguments)
        if found.dgrad is not None:
            dx = compute_dgrad(found.dgrad, grad, w, None)
        if found.wgrad is not None:
            dw, db = compute_wgrad(found.wgrad, grad, x)
        elif want_bias and not want_w:
            db = summed_per_channel(grad)
        return dx, dw, db if want_bias else None


class _Signals:
    """Passthrough calls for signals that differ in their length only. A length whose choice is that of another
    (:func:`~polyconv.problem.planned_length`) takes its call instead of planning the same again."""

    def __init__(self, first: GuardedCall, x: Tensor, *others: Tensor) -> None:
        self._guard = alike(x, *others, any_length=True)
        self._step = first.geometry.stride[0] if first.op.transposed else 1
        self._start = first.problem.in_size[0] - self._step * x.shape[2]
        kernel, dilation = first.problem.kernel[0], first.problem.dilation[0]
        self._fits = sum(first.problem.padding), (kernel - 1) * dilation + 1
        self._calls: dict[int, GuardedCall] = {}

    def _planned(self, x: Tensor) -> int:
        # A transposed convolution is planned as an input gradient, whose length is that of its output.
        return planned_length(self._start + self._step * x.shape[2], *self._fits)

    def find(self, *tensors: Tensor) -> GuardedCall | None:
        """A call for these tensors, None if none is known."""
        found = self._calls.get(self._planned(tensors[0]))
        if found is None or not tensors[0].is_contiguous() or not self._guard(*tensors):
            return None
        return found.guarding(*tensors)

    def add(self, call: GuardedCall, *tensors: Tensor) -> None:
        """Let other lengths take a call."""
        if tensors[0].is_contiguous() and self._guard(*tensors):
            self._calls.setdefault(self._planned(tensors[0]), call)


_signals: LruTable[Hashable, _Signals] = LruTable(256)
"""By the key of a call without the length."""


class Backward(NamedTuple):
    """Prepared gradients of a call, for given strides of the tensors."""

    dgrad: Call | None
    wgrad: Call | None
    """Both are None where not wanted or passthrough."""
    aten_arguments: tuple[Any, ...] | None
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
        x_passes, w_passes = (found is not None and found.passthrough for found in (dgrad, wgrad))
        arguments: tuple[Any, ...] | None = None
        if x_passes or w_passes:
            arguments = backward_arguments(call.problem, (x_passes, w_passes, w_passes and want_bias))
        return cls(None if x_passes else dgrad, None if w_passes else wgrad, arguments)


def _layout_of(tensor: Tensor) -> Layout:
    """Layout of the gradient of ``tensor``."""
    return tuple(tensor.shape), suggests_channels_last(tensor.shape, tensor.stride())


def _for_torch(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    """A single int if all are equal: ATen parses it in a third of the time."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _aten_arguments(op: Op, args: Args, geometry: Geometry) -> tuple[Any, ...]:
    """Arguments of ATen's convolution after the tensors."""
    stride, padding, dilation = map(_for_torch, (geometry.stride, geometry.padding[::2], geometry.dilation))
    if op.transposed:
        return stride, padding, _for_torch(per_axis("output_padding", args[2], op.rank)), geometry.groups, dilation
    return stride, padding, dilation, geometry.groups


def _atens_under_autocast(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: Tolerance | None,
    number: int,
    graded: bool,
) -> tuple[Any, ...] | None:
    """Arguments of ATen's convolution if a call on CUDA tensors differs from a plain one by autocast alone, and all its
    passes are ATen's in the dtype of the region; else None. ATen then casts, with autocast's cache of weights."""
    if not torch.is_autocast_enabled("cuda") or is_watched() or not _are_exact(op.rank, args):
        return None
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        if not _may_be_remembered(op.rank, x, w, bias, None):
            return None
    dtype, wanted = torch.get_autocast_dtype("cuda"), (graded and x.requires_grad, graded and w.requires_grad)
    key = number, op, described(x), described(w), bias is None, args, tolerance, x.device, dtype, wanted
    found = _under_autocast[key]
    if found is None:
        problem, layout, geometry = _described(op, x, w, bias, args, tolerance, None, None, False, "auto")
        problem = replace(problem, dtype=str(dtype).removeprefix("torch."))
        problem = replace(problem, torch_format=problem.dtype)
        grads = _gradients(op, problem, layout, geometry, x, w, dtype) if graded else ()
        call = Call(problem, layout, geometry, x.device, inference=not any(wanted), gradients=grads)
        found = (_aten_arguments(op, args, geometry) if call.passthrough else None,)
        if state_version.current() == number:
            _under_autocast.put(key, found)
    return found[0]


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_under_autocast: LruTable[Hashable, tuple[tuple[Any, ...] | None]] = LruTable(1024)
"""Results of :func:`_atens_under_autocast`."""


def _gradients(
    op: Op, problem: Problem, layout: Layout, geometry: Geometry, x: Tensor, w: Tensor, dtype: torch.dtype | None = None
) -> Iterator[Problem]:
    """Problems of the backward pass, whose tensors are assumed to be dense, as in :func:`polyconv.explain`.

    The gradients of a transposed convolution are a forward pass and a weight gradient with exchanged roles. ``dtype``:
    that of autocast.
    """
    grad, dtype = (layout[0], dense_strides(*layout)), dtype or x.dtype
    if x.requires_grad and op.transposed:
        yield fprop_problem(grad, described(w), None, False, "none", False, dtype, True, geometry)[0]
    elif x.requires_grad:
        yield dgrad_problem(grad, described(w), _layout_of(x), None, dtype, True, geometry)[0]
    if w.requires_grad and op.transposed:
        yield wgrad_problem(described(x), grad, _layout_of(w), False, dtype, True, geometry)[0]
    elif w.requires_grad:
        yield wgrad_problem(grad, described(x), _layout_of(w), problem.bias, dtype, True, geometry)[0]


def _want_gradient(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _may_be_remembered(rank: int, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the dispatcher would only find the kernel, and guards can describe the tensors."""
    if x.dtype not in _DTYPES or x is w:
        return False
    if any(tensor.dim() != rank + 2 for tensor in (x, w, residual) if tensor is not None):
        return False
    return are_plain(*(tensor for tensor in (x, w, bias, residual) if tensor is not None))


def _are_exact(rank: int, args: Args) -> bool:
    """Whether each argument is an int, a tuple of ``rank`` ints, or a string."""
    for argument in args:
        if type(argument) is tuple:
            if len(argument) != rank or not all(type(number) is int for number in argument):
                return False
        elif type(argument) is not int and type(argument) is not str:
            return False
    return True


class _Recorded(_SingleLevelFunction):
    """Autograd node of a prepared call. It has no ``setup_context``, because torch would inspect the arguments."""

    @staticmethod
    def forward(
        ctx: Any, call: GuardedCall, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        y = call.compute(call, x, w, bias, residual)
        ctx.geometry, ctx.call = call.geometry, call
        ctx.set_materialize_grads(False)
        if call.problem.activation is Activation.RELU:
            ctx.save_for_backward(x, w, y)
        else:
            ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        if ctx.call.op.transposed:
            return (None, *dgrad_gradients(ctx, grads[0], ctx.needs_input_grad[1:4]), None)
        return (None, *fprop_gradients(ctx, grads[0], ctx.needs_input_grad[1:], ctx.call.gradients))


# `apply` of the base class: `Function.apply` first looks for torch.func transforms, which the guards exclude.
_record: Callable[..., Tensor] = _Recorded.apply  # type: ignore[attr-defined]
