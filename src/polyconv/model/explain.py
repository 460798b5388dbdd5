"""``explain``: the plans of a call, without running it.

The model is called on fake tensors, which have shapes, strides and a device but no data, so explaining a large model on
a GPU costs neither time nor memory and needs no GPU. Each dispatched convolution is recorded, and its backend explains
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor

from .. import dispatch
from ..activation import Activation
from ..arguments import suggests_channels_last
from ..autotune import preferences
from ..backend import Backend, backend_for, backend_name
from ..dispatch.op import FORWARD, TRANSPOSED, Op
from ..dispatch.override import Arguments, is_enabled, per_axis, settled, takes
from ..lowering.base import IsAhead
from ..lowering.lower import ahead_on, lower, lowered
from ..numerics.known_weights import in_words
from ..problem import Pass, Problem, Strides, dense_strides
from ..runtime.frozen_weights import is_frozen
from .fake_tensors import DispatchRecorder, mode_of, stand_in

if TYPE_CHECKING:
    from ..cuda.planner import CudaDevice

Device: TypeAlias = Union[torch.device, str, "CudaDevice"]

_READABLE = (Tensor, torch.nn.Parameter)
"""Tensor types with readable values: neither fake nor distributed."""


@dataclass(frozen=True, slots=True)
class PassExplanation:
    """One pass of one convolution."""

    problem: Problem
    backend: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ConvExplanation:
    """One convolution of a model and its passes."""

    name: str
    """Name of its module, or of the function if it is in none."""
    passes: tuple[PassExplanation, ...]
    note: str = ""
    """Remarks about all passes, one per line."""

    def __str__(self) -> str:
        body = [str(one) for one in self.passes] + ([self.note] if self.note else [])
        indented = "\n".join("  " + line for text in body for line in text.splitlines())
        return f"{self.name}\n{indented}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every convolution of a call, in order. Prints as text."""

    convolutions: tuple[ConvExplanation, ...]

    def __str__(self) -> str:
        return "\n".join(str(conv) for conv in self.convolutions) or "no convolution runs in this call"

    __repr__ = __str__


def explain(target: Callable[..., Any], *inputs: Any, device: Device | None = None, **kwargs: Any) -> Explanation:
    """Explain which backend and plan each convolution in a call would run, in all three passes.

    Examples::

        explain(module, x)  # a module, or a whole model, with an example input
        explain(module, (8, 32, 512, 512))  # the shape of the input is enough
        explain(module, (8, 32, 512, 512), device="cuda")  # as if module and input were on that device
        explain(module, (8, 32, 512, 512), device="v100")  # as if on a GPU of that kind; none is needed
        explain(torch.compile(module, backend="polyconv"), x)  # the layers of its graphs, which are compiled and run
        explain(polyconv.conv2d, x, w, padding=1)  # a call
        explain(polyconv.conv2d, (8, 32, 512, 512), (64, 32, 5, 9), padding=2, device="t4")  # shapes do here, too

    Args:
        target: a module or a function.
        inputs, kwargs: its arguments. A tuple of integers in the place of a module's input stands for a tensor of that
            shape with the dtype and the device of the module's parameters; in the place of a function's first or
            second argument, if it has three integers or more, for a float32 tensor on the CPU.
        device: plan for this device instead of the tensors' own: ``"cuda"``, for a model that is still on the CPU; or a
            GPU that need not be present, by its name in :data:`polyconv.cuda.planner.DEVICES` or its description.
    """
    if hasattr(target, "_torchdynamo_orig_callable") or hasattr(target, "_orig_mod"):
        return Explanation(tuple(_compiled_layers(target, inputs, kwargs)))
    calls = _recorded(target, inputs, kwargs)
    # Outside the fake mode: a backend may query its real device.
    asked = None if device is None else _device(device)
    return Explanation(tuple(_explain_call(call, asked or call.device) for call in calls))


def _compiled_layers(
    target: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[ConvExplanation]:
    """The layers of compiled graphs that run in a call without gradients."""
    from ..inductor.backend import layers_that_run  # lazy import: of Inductor

    with layers_that_run() as layers, torch.no_grad():
        target(*inputs, **kwargs)
    for number, layer in enumerate(layers, 1):
        yield ConvExplanation(f"layer {number} of {len(layers)}", (), str(layer))


def problems_of(target: Callable[..., Any], *inputs: Any, **kwargs: Any) -> tuple[Problem, ...]:
    """The distinct problems of a call, in all passes. Arguments as for :func:`explain`."""
    calls = _recorded(target, inputs, kwargs)
    asked = (
        runs
        for call in calls
        for problem in call.problems
        for runs in lowered(problem, backend_name(call.device), ahead_on(call.device))
    )
    return tuple(dict.fromkeys(asked))


def _recorded(target: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Call]:
    """The convolutions of a call, recorded on fake tensors."""
    module = target if isinstance(target, torch.nn.Module) else None
    state: dict[str, Tensor] = {}
    if module is not None:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mode = mode_of([*state.values(), *inputs, *kwargs.values()])
    recorder = _Recorder()
    with mode, torch.no_grad():
        fake_state = {name: stand_in(value, mode) for name, value in state.items()}
        recorder.weights = {id(fake_state[name]): value for name, value in state.items() if type(value) in _READABLE}
        like = next((value for value in fake_state.values() if value.is_floating_point()), None)
        if module is None:
            likes = (*map(_stands_for, inputs[:2]), *(None for _ in inputs[2:]))
        else:
            likes = tuple(like for _ in inputs)
        args = tuple(stand_in(value, mode, like) for value, like in zip(inputs, likes, strict=True))
        keywords = {name: stand_in(value, mode) for name, value in kwargs.items()}
        with recorder:
            if module is None:
                target(*args, **keywords)
            else:
                with _names(module, recorder):
                    torch.func.functional_call(module, fake_state, args, keywords, strict=False)
    return recorder.calls


def _device(device: Device) -> torch.device | CudaDevice:
    """A torch device, or the description of a GPU to plan for."""
    if not isinstance(device, str):
        return device
    from ..cuda.planner import DEVICES  # lazy import: importing polyconv must not import a planner

    if device in DEVICES:
        return DEVICES[device]
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is neither a device of torch's nor one of {', '.join(DEVICES)}") from error


def _stands_for(value: Any) -> Tensor | None:
    """Tensor whose dtype and device a shape argument of a function gets; None for two integers, perhaps a stride."""
    return torch.empty(0) if isinstance(value, (tuple, list)) and len(value) > 2 else None


@contextmanager
def _names(module: torch.nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tell the recorder which module is running."""
    handles = []
    for name, child in module.named_modules():
        kind = type(child).__name__ + (", frozen" if is_frozen(child) else "")
        label = f"{name} ({kind})" if name else kind

        def enter(_module: Any, _args: Any, label: str = label) -> None:
            recorder.stack.append(label)

        def leave(_module: Any, _args: Any, _result: Any) -> None:
            recorder.stack.pop()

        handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Call:
    """A dispatched convolution and its problems: none if ATen runs it, or nothing runs."""

    name: str
    device: torch.device
    problems: tuple[Problem, ...] = ()
    note: str = ""
    transposed: bool = False
    weight: Tensor | None = None
    """The weight, if it has values."""


class _Recorder(DispatchRecorder):
    """Records each dispatched convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.calls: list[_Call] = []
        self.weights: dict[int, Tensor] = {}
        """``id`` of a fake parameter -> the parameter."""

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        if func is dispatch.fprop:
            call = _call(self._name(args), *args, y=result)
            self.calls.append(replace(call, weight=self.weights.get(id(args[1]))))
        elif func is dispatch.dgrad:
            self.calls.append(_transposed_call(self._name(args, TRANSPOSED), *args, y=result))
        elif func is torch.ops.aten.convolution.default:
            name = self._name(args, TRANSPOSED if args[6] else FORWARD)
            self.calls.append(_overridden_call(name, args[:3], per_axis(args[1], args[3:]), result))

    def _name(self, args: Sequence[Any], ops: Mapping[int, Op] = FORWARD) -> str:
        return self.stack[-1] if self.stack else ops[args[1].dim() - 2].name


def _call(name: str, x: Tensor, w: Tensor, bias: Tensor | None, *args: Any, y: Tensor) -> _Call:
    """The three problems of a forward call, with gradients assumed dense, as the operators allocate them."""
    if x.numel() == 0 or y.numel() == 0:
        return _Call(name, x.device, note="nothing runs: the input or the output is empty")
    geometry, residual, activation = dispatch.split_epilogue(*args)
    problems = (
        dispatch.problem_of(
            kind,
            (x.shape, _dense(x.shape, x.stride()) if kind is Pass.DGRAD else x.stride()),
            (w.shape, _dense(w.shape, w.stride()) if kind is Pass.WGRAD else w.stride()),
            y.stride(),
            dispatch.geometry_of(*geometry),
            x.dtype,
            bias=bias is not None and kind is not Pass.DGRAD,
            residual=residual is not None and kind is Pass.FPROP,
            activation=activation if kind is Pass.FPROP else "none",
        )
        for kind in Pass
    )
    notes = _on_autocast(x)
    applied = Activation(activation)
    if not applied.is_saved_by_output:
        notes.append(f"where a gradient is wanted, {applied} is applied apart: its derivative needs the sums before it")
    return _Call(name, x.device, tuple(problems), "\n".join(notes))


def _transposed_call(
    name: str, x: Tensor, w: Tensor, size: Sequence[int], channels_last: bool, *args: Any, y: Tensor
) -> _Call:
    """The three problems of a transposed convolution: y is the input of the underlying convolution, x its output."""
    if x.numel() == 0 or y.numel() == 0:
        return _Call(name, x.device, note="nothing runs: the input or the output is empty")
    geometry, bias = dispatch.split_bias(*args)
    problems = (
        dispatch.problem_of(
            kind,
            (y.shape, y.stride()),
            (w.shape, _dense(w.shape, w.stride()) if kind is Pass.WGRAD else w.stride()),
            _dense(x.shape, x.stride()) if kind is Pass.FPROP else x.stride(),
            dispatch.geometry_of(*geometry),
            x.dtype,
        )
        for kind in OF_TRANSPOSED
    )
    notes = _on_autocast(x)
    if bias is not None:
        notes.append("where a kernel of polyconv's runs, the bias is added to its output afterwards")
    return _Call(name, x.device, tuple(problems), "\n".join(notes), transposed=True)


def _overridden_call(name: str, tensors: Sequence[Any], arguments: Arguments, y: Tensor) -> _Call:
    """A call of ATen's convolution: polyconv's while :func:`polyconv.enable` is in force."""
    x, w, bias = tensors
    if not is_enabled():
        return _Call(name, x.device, note="PyTorch's own convolution runs: this is not one of polyconv's modules")
    if not takes(x, w, arguments):
        return _Call(name, x.device, note="PyTorch's own convolution runs: polyconv.enable() leaves such tensors to it")
    geometry, layout = settled(x, w, bias, arguments)
    if layout is None:
        call = _call(name, x, w, bias, *geometry, y=y)
    else:
        call = _transposed_call(name, x, w, *layout, *geometry, bias, y=y)
    return replace(call, note="\n".join(filter(None, (call.note, "called by polyconv.enable()"))))


OF_TRANSPOSED = {Pass.DGRAD: "forward", Pass.FPROP: "input gradient", Pass.WGRAD: "weight gradient"}
"""Pass of the underlying convolution -> pass of the transposed one."""


def _on_autocast(x: Tensor) -> list[str]:
    asked = dispatch.overruled_dtype()
    if asked is None or x.dtype == asked:
        return []
    how = f"to follow it: {dispatch.HOW_TO_ALLOW}"
    return [f"torch.autocast's {asked} is not followed: computes in {x.dtype}; {how}"]


def _dense(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Dense strides in the memory format of the given ones, as the operators allocate them."""
    return dense_strides(shape, suggests_channels_last(shape, strides))


def _explain_call(call: _Call, device: torch.device | CudaDevice) -> ConvExplanation:
    asked = tuple(_ask(each, device, call.weight if each.kind is Pass.FPROP else None) for each in call.problems)
    if call.transposed:
        of = "of the transposed convolution, computed as"
        asked = tuple(replace(one, text=f"{OF_TRANSPOSED[one.problem.kind]} {of}\n{one.text}") for one in asked)
    return ConvExplanation(call.name, asked, call.note)


def _ask(problem: Problem, device: torch.device | CudaDevice, w: Tensor | None) -> PassExplanation:
    """The backend's explanation, or why there is none: on a machine without that device, for example."""
    runs, steps = problem, []
    try:
        name, is_ahead = _judge(device)
        while (lowering := lower(runs, name, is_ahead)) is not None:
            steps.append(lowering.in_words())
            if not lowering.problems:
                return PassExplanation(problem, "", "\n  ".join([str(problem), *steps]))
            (runs,) = lowering.problems
        instead = f"{problem}\n  is computed, {' and '.join(steps)}, as\n" if steps else ""
        if w is not None:
            w = w.detach().reshape(problem.as_2d().w_shape) if runs.w_shape == problem.as_2d().w_shape else None
        if not isinstance(device, torch.device):
            from ..cuda.planner.aten import chosen

            plan = chosen(runs, device)
            said = "" if w is None else in_words(runs, plan, w, lambda asked: chosen(asked, device))
            return PassExplanation(problem, "cuda", instead + plan.explain() + said)
        backend = backend_for(device)
        return PassExplanation(problem, backend.name, instead + explain_plans(backend, runs, w))
    except (RuntimeError, ImportError, OSError) as error:
        return PassExplanation(problem, "", f"{problem}\n  the backend for {device} is not available here: {error}")


def _judge(device: torch.device | CudaDevice) -> tuple[str, IsAhead]:
    """Name of a device's backend, and its judgement of lowerings."""
    if isinstance(device, torch.device):
        return backend_name(device), ahead_on(device)
    from ..cuda.planner.volumes import is_ahead

    return "cuda", lambda lowering, other: is_ahead(lowering, other, device)


def explain_plans(backend: Backend[Any], problem: Problem, w: Tensor | None = None) -> str:
    """Explain the plan of training and, where they differ, those of inference without and with a frozen weight.

    With ``w``, also the predicted error of a forward pass for that weight.
    """
    said = preferences.plan(backend, replace(problem, frozen=False))
    text: str = said.explain()
    for words, frozen in _INFERENCE[problem.kind] if backend.caches_weights else ():
        plan = preferences.plan(backend, replace(problem, frozen=frozen), inference=True)
        if (plan.choice, plan.keeps_weights, plan.preference) != (said.choice, said.keeps_weights, said.preference):
            kept = f", {_KEPT[frozen]}" if plan.keeps_weights else ""
            text += f"\n  {words}{kept}: {plan.name}, {plan.reason}"
            said = plan
    if w is not None:
        text += in_words(problem, said, w, lambda asked: backend.plan(asked, inference=True))
    return text


_INFERENCE = {
    Pass.FPROP: (("without gradients", False), ("frozen, without gradients", True)),
    Pass.DGRAD: (("as a transposed convolution without gradients", False),),
    Pass.WGRAD: (),
}
"""Variants of a pass without gradients: description, and whether the weight is frozen."""

_KEPT = {
    False: "with transformed weights kept and the weight read to see a change",
    True: "with transformed weights kept",
}
"""Description of the weight cache, by whether the weight is frozen."""
