"""``enable`` and ``disable``: polyconv in place of ATen's convolution, for every caller in the process.

``aten::convolution``, its backward, and ``aten::_convolution``, which graphs of ``torch.jit.trace`` call, get kernels
for the CPU and CUDA, below autograd, autocast, ``torch.func`` and modes, all of which stay PyTorch's. Native code
(``csrc/runtime``) knows the calls that are planned as ATen's, and passes them through; the others come to the operators
of this module. The native module fits one version of torch. On others the kernels are registered from Python, and a
passthrough takes some 16 microseconds more.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import CHANNELS_LAST, Geometry, Policy, checked_policy, normalise
from ..backend import backend_name
from ..lowering.epilogue import summed_per_channel
from ..problem import Problem
from ..runtime import state_version
from ..runtime.bypass import bypass_with
from ..runtime.frozen_weights import frozen_marks
from ..runtime.scopes import ScopeEntry, ScopeStack
from ..util import tf32
from ..util.lru import LruTable
from .execute import compute_dgrad, compute_fprop, compute_wgrad, describe_dgrad, describe_fprop, describe_wgrad
from .operands import HALF, Layout, dgrad_problem, fprop_problem, geometry_of, transposed_layout, wgrad_problem
from .prepare import Call, recall, tell_if_behind
from .schema import library

MODULE = "polyconv.runtime._native"
_DTYPES = {"cpu": (torch.float32, torch.float64, *HALF), "cuda": (torch.float32, *HALF)}


class Arguments(NamedTuple):
    """Arguments of ``aten::convolution`` after the tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


# ---- the switch


class Enabling:
    """Override of ATen's convolution, in force until :func:`disable` or the end of its ``with`` block."""

    def __init__(self, policy: Policy = "auto") -> None:
        self._entry: ScopeEntry[Policy] = ScopeEntry(policy)
        self._depth = 0
        _enabled.put(self._entry)

    def __enter__(self) -> Enabling:
        self._depth += 1
        if self._entry not in _enabled.entries:
            _enabled.put(self._entry)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            _enabled.take(self._entry)


def enable(policy: Policy = "auto") -> Enabling:
    """Use polyconv for every convolution of torch in this process, until :func:`disable`.

    It reaches what :func:`polyconv.replace` does not: subclasses of torch's modules, calls of
    ``torch.nn.functional.conv2d``, code of other packages, graphs of ``torch.compile``. Where polyconv plans ATen's
    kernel, that is called as before. As a context manager it ends with the block::

        with polyconv.enable():
            y = model(x)

    The override counts for all threads. Blocks may be nested, and may overlap in several threads: the last one to end
    restores torch's kernels. Autocast is torch's own: in its regions ATen computes in their dtype.

    Args:
        policy: for CUDA tensors, as in :func:`polyconv.replace`. Of nested blocks, that of the last one counts.
    """
    return Enabling(checked_policy(policy))


def disable() -> None:
    """Reverse :func:`enable`, inside its blocks as well: PyTorch's dispatcher has the kernels that it had before."""
    for entry in _enabled.entries:
        _enabled.take(entry)


def is_enabled() -> bool:
    return bool(_enabled.entries)


def _policy() -> Policy | None:
    """Policy in force; None while nothing is enabled."""
    entries = _enabled.entries
    return entries[-1].value if entries else None


def _settle() -> None:
    """Register or remove the kernels. Called with ``STATE_LOCK`` held."""
    global _registered
    wanted = is_enabled()
    if wanted == (_registered is not None):
        return
    native = why_not_native() is None
    if wanted:
        _registered = _register_native() if native else _register_in_python()
    elif _registered is not None:
        unregister, _registered = _registered, None
        unregister()


_registered: Callable[[], None] | None = None
"""Function that removes the kernels, None while there are none."""
_enabled: ScopeStack[Policy] = ScopeStack(_settle)
state_version.include(_policy)


@lru_cache(maxsize=1)
def why_not_native() -> str | None:
    """Why the kernels of the override are registered from Python; None if they are native."""
    try:
        built_with = import_module(MODULE).torch_version
    except ImportError as error:
        return f"{MODULE} is not there, or does not fit torch {torch.__version__} ({error})"
    if torch.__version__.partition("+")[0] == built_with:
        return None
    return f"{MODULE} was built with torch {built_with}, and this is {torch.__version__}"


def _register_native() -> Callable[[], None]:
    native = import_module(MODULE)
    notify = partial(_notify, native.changed)
    notify()
    native.override(True, torch.cuda.is_available())
    state_version.listeners.append(notify)
    bypass_with(native.bypassing)

    def unregister() -> None:
        bypass_with(None)
        state_version.listeners.remove(notify)
        native.override(False, False)

    return unregister


def _notify(changed: Callable[[bool], None]) -> None:
    changed(bool(frozen_marks))


class _Bypassed(threading.local):
    depth = 0


_bypassed = _Bypassed()


def _bypassing(function: Callable[..., Any], *arguments: Any) -> Any:
    _bypassed.depth += 1
    try:
        return function(*arguments)
    finally:
        _bypassed.depth -= 1


def _register_in_python() -> Callable[[], None]:
    ours = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            ours.impl("convolution", partial(_kernel, _ATEN, _convolution), key)
            ours.impl("_convolution", partial(_kernel, torch.ops.aten._convolution.default, _traced_convolution), key)
            ours.impl("convolution_backward", partial(_kernel, _ATEN_BACKWARD, _convolution_backward), key)
    bypass_with(_bypassing)

    def unregister() -> None:
        bypass_with(None)
        ours._destroy()

    return unregister


_ATEN = torch.ops.aten.convolution.default
_ATEN_BACKWARD = torch.ops.aten.convolution_backward.default
_NO_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
"""Where the dispatcher has the kernel that all devices share, and that is not overridden."""


def _kernel(op: Any, run: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    if _bypassed.depth or torch._C._get_tracing_state() is not None:
        return op.redispatch(_NO_KEY, *arguments)
    *result, _ = _bypassing(run, *arguments)
    return result[0] if len(result) == 1 else tuple(result)


# ---- the operators, which native code calls with the override bypassed, so that ATen's are ATen's here

_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding"
library.define(f"_convolution(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}, SymInt groups) -> (Tensor, bool)")
library.define(
    f"_convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_GEOMETRY}, "
    "SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor, bool)"
)


def _convolution(x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, bool]:
    """The convolution, and whether ATen computed it."""
    arguments = per_axis(w, args)
    inference = not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, w, bias)))
    frozen = inference and id(w) in frozen_marks and not x.is_cuda
    found = _planned(_plan_forward, (x, w), bias, arguments, inference, frozen)
    if found is None:
        return _ATEN(x, w, bias, *arguments), True
    return (compute_dgrad if arguments.transposed else compute_fprop)(found, x, w, bias, None), False


def _traced_convolution(*args: Any) -> tuple[Tensor, bool]:
    """``aten::_convolution``, which graphs of ``torch.jit.trace`` call: the same with four flags of cuDNN."""
    return _convolution(*args[:-4])


def _convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: Sequence[int] | None, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, bool]:
    """The gradients, None where not wanted, and whether ATen computed all of them."""
    arguments, wanted = per_axis(w, args[:-1]), tuple(args[-1])
    found = _planned(_plan_backward, (grad, x, w), None, arguments, wanted)
    for_x, for_w = (None, None) if found is None else found
    dx = dw = db = None
    rest = wanted[0] and for_x is None, wanted[1] and for_w is None, wanted[2] and for_w is None
    if for_w is None and wanted[2] and not any(rest[:2]):
        rest, db = (False, False, False), summed_per_channel(grad)
    if any(rest):
        dx, dw, db = _ATEN_BACKWARD(grad, x, w, bias_sizes, *arguments, rest)
    if for_x is not None:
        dx = compute_fprop(for_x, grad, w, None, None) if arguments.transposed else compute_dgrad(for_x, grad, w, None)
    if for_w is not None:
        dw, db = compute_wgrad(for_w, *((x, grad) if arguments.transposed else (grad, x)))
        if wanted[2] and arguments.transposed:
            db = summed_per_channel(grad)
    return dx, dw, db if wanted[2] else None, for_x is None and for_w is None


library.impl("_convolution", _convolution, "CompositeExplicitAutograd")
library.impl("_convolution_backward", _convolution_backward, "CompositeExplicitAutograd")


# ---- plans

_plans: LruTable[Hashable, tuple[Any]] = LruTable(1024)
"""Calls by state version and description. None in place of a call: ATen's."""


def _planned(
    plan: Callable[..., Any], tensors: tuple[Tensor, ...], bias: Tensor | None, arguments: Arguments, *how: Any
) -> Any:
    """Cached or new result of ``plan``. None if ATen has to run, which also raises errors about arguments."""
    number = state_version.current()
    one, *others = tensors if bias is None else (*tensors, bias)
    listed = (tuple(numbers) if isinstance(numbers, list) else numbers for numbers in arguments)
    described = tuple((each.shape, each.stride(), each.data_ptr() & 15) for each in (one, *others))
    flag = backend_name(one.device) == "cuda" and tf32.is_allowed()
    key = number, plan, described, one.dtype, one.device, bias is None, *listed, how, flag
    found = _plans[key]
    if found is None:
        alike = all((each.dtype, each.device) == (one.dtype, one.device) for each in others)
        found = (
            plan(*tensors, bias, arguments, *how) if alike and takes(tensors[-2], tensors[-1], arguments) else None,
        )
        if state_version.current() == number:
            _plans.put(key, found)
    return found[0]


def per_axis(w: Tensor, args: Sequence[Any]) -> Arguments:
    """Arguments with one number per axis: for ``padding="valid"`` ATen passes a single 0."""
    arguments, rank = Arguments(*args), w.dim() - 2
    if len(arguments.padding) == rank:
        return arguments
    given: dict[str, Any] = arguments._asdict()
    single = {name: one for name, one in given.items() if isinstance(one, (list, tuple)) and len(one) == 1}
    return Arguments(**given | {name: [*one] * rank for name, one in single.items()})


def takes(x: Tensor, w: Tensor, arguments: Arguments) -> bool:
    """Whether polyconv computes what ATen does. Errors are left to ATen."""
    rank = w.dim() - 2
    per_axis = arguments.stride, arguments.padding, arguments.dilation, arguments.output_padding
    if rank not in (1, 2, 3) or x.dim() != w.dim() or any(len(numbers) != rank for numbers in per_axis):
        return False
    if x.dtype not in _DTYPES.get(x.device.type, ()) or not x.numel() or not w.numel():
        return False
    if min(*arguments.stride, *arguments.dilation, arguments.groups) < 1 or min(arguments.padding) < 0:
        return False
    most = map(max, arguments.stride, arguments.dilation) if arguments.transposed else (1 for _ in range(rank))
    return all(0 <= added < limit for added, limit in zip(arguments.output_padding, most, strict=True))


def settled(x: Tensor, w: Tensor, bias: Tensor | None, arguments: Arguments) -> tuple[Geometry, Layout | None]:
    """Geometry of the call; of a transposed one also the layout of its output."""
    stride, padding, dilation, transposed, output_padding, groups = arguments
    if transposed:
        given = tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation), None
        settled, layout = transposed_layout(w.dim() - 2, x, w, bias, *given)
        return geometry_of(*settled.under_policy(_policy())), layout
    moves = tuple(stride), tuple(padding), tuple(dilation)
    geometry = normalise(w.shape[2:], *moves, groups, "zeros", None, rank=w.dim() - 2)
    return geometry_of(*geometry.under_policy(_policy())), None


def _plan_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, arguments: Arguments, inference: bool, frozen: bool
) -> Call | None:
    try:
        channels_last = _is_channels_last(x, w, bias, None, arguments)
        geometry, layout = settled(x, w, bias, arguments)
        described: tuple[Callable[..., tuple[Problem, Layout]], tuple[Any, ...]]
        if layout is not None:
            described = dgrad_problem, describe_dgrad(x, w, layout, bias, geometry)
        else:
            described = fprop_problem, describe_fprop(x, w, bias, None, "none", frozen, geometry)
        problem: Problem
        last: bool
        problem, (_, last) = described[0](*described[1])
    except RuntimeError:  # wrong shapes
        return None
    if last != channels_last:
        return None
    if x.is_cuda and _policy() == "own":
        tell_if_behind(problem, x.device)
    call = recall(*described, x.device, inference=inference)
    return None if call.passthrough else call


def _plan_backward(
    grad: Tensor, x: Tensor, w: Tensor, _: None, arguments: Arguments, wanted: Sequence[bool]
) -> tuple[Call | None, Call | None] | None:
    if not grad.numel():
        return None
    described: list[tuple[Callable[..., Any], tuple[Any, ...]] | None] = [None, None]
    try:
        last = _is_channels_last(x, w, None, [grad.shape[1]] if wanted[2] else None, arguments)
        geometry, _layout = settled(x, w, None, arguments)
        if wanted[0] and arguments.transposed:
            forward = describe_fprop(grad, w, None, None, "none", False, geometry)
            if fprop_problem(*forward)[1][1] == last:
                described[0] = fprop_problem, forward
        elif wanted[0]:
            described[0] = dgrad_problem, describe_dgrad(grad, w, (x.shape, last), None, geometry)
        if wanted[1]:
            roles, bias = ((x, grad), False) if arguments.transposed else ((grad, x), wanted[2])
            described[1] = wgrad_problem, describe_wgrad(*roles, (w.shape, last), bias, geometry)
    except RuntimeError:  # wrong shapes
        return None
    calls = (None if one is None else recall(*one, grad.device) for one in described)
    for_x, for_w = (None if call is None or call.passthrough else call for call in calls)
    return for_x, for_w


def _is_channels_last(
    x: Tensor, w: Tensor, bias: Tensor | None, bias_sizes: Sequence[int] | None, arguments: Arguments
) -> bool:
    """Whether ATen's outputs are channels_last, as fake tensors say they are: compiled graphs check the strides."""
    if w.dim() == 3:
        return False
    private: Any = torch._C
    backend = private._select_conv_backend(x, w, bias, *arguments, bias_sizes)
    found = private._conv_determine_backend_memory_format(x, w, backend)
    return bool(found == CHANNELS_LAST[w.dim()])
