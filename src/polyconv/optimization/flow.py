"""Where the outputs of convolutions go: which activations can be computed by the convolution before them.

A convolution can take the activation over if on every call its output is read by one activation module and by nothing
else; and the module can then become an identity only if it is called on nothing else. What reads a tensor is seen by
the dispatcher, whatever Python wrote; what keeps one without reading it is seen when it is still alive at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu"}
"""The modules that a convolution may take over, and what it calls them."""

_IN_PLACE = {torch.ops.aten.relu_.default, torch.ops.aten.silu_.default}


@dataclass(eq=False)
class _Activated:
    """One call of an activation module."""

    module: nn.Module
    input: Tensor | None


@dataclass(eq=False)
class _Output:
    """One output of a convolution."""

    call: _Activated | None = None
    """The activation that reads it."""
    obstacle: str = ""
    """Who else does."""

    @property
    def activation(self) -> nn.Module | None:
        return None if self.call is None else self.call.module


@dataclass
class _Fate:
    """All outputs of one convolution."""

    outputs: list[_Output] = field(default_factory=list)
    obstacle: str = ""


class Flow(TorchDispatchMode):
    """Watches one forward pass of a model. Then :meth:`groups` says what can be fused, :meth:`why_not` why not."""

    def __init__(self, model: nn.Module, convolutions: Iterable[nn.Module]) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._fates = {conv: _Fate(obstacle=_why_alone(conv)) for conv in convolutions}
        self._living = WeakIdKeyDictionary()
        self._inside: _Activated | None = None
        self._calls: dict[nn.Module, int] = {}
        self._handles: list[Any] = []

    # ---- while the model runs

    def __enter__(self) -> Flow:
        for module, name in self._names.items():
            if module in self._fates:
                self._handles.append(module.register_forward_hook(self._produced, prepend=True))
            elif type(module) in ACTIVATIONS and not _hooked(module):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, prepend=True))
            elif _hooked(module):
                self._watch_hooks(module, name)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf in self._living:
                self._read(leaf, func)
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: Tensor, func: Any) -> None:
        output: _Output = self._living[tensor]
        now = self._inside if self._inside is not None and self._inside.input is tensor else None
        if now is None or output.call not in (None, now):
            output.obstacle = output.obstacle or f"its output is read by {func.name()}"
            return
        output.call = now
        if func in _IN_PLACE:
            del self._living[tensor]  # from here on the tensor is the activation's output

    def _produced(self, conv: nn.Module, _: Any, output: Any) -> None:
        fate = self._fates[conv]
        fate.outputs.append(_Output())
        if isinstance(output, Tensor):
            self._living[output] = fate.outputs[-1]
        else:
            fate.outputs[-1].obstacle = "its output is no tensor"

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls[module] = self._calls.get(module, 0) + 1
        self._inside = _Activated(module, args[0] if len(args) == 1 else None)

    def _leave(self, *_: Any) -> None:
        if self._inside is not None:
            self._inside.input = None  # or it would be kept alive
        self._inside = None

    def _watch_hooks(self, module: nn.Module, name: str) -> None:
        """A hook that is handed an output of a convolution, as a container's is, may do anything with it."""

        def seen(*values: Any) -> None:
            for leaf in tree_leaves(values[1:]):
                if isinstance(leaf, Tensor) and leaf in self._living:
                    self._living[leaf].obstacle = f"a hook of {name or 'the model'} sees its output"

        self._handles.append(module.register_forward_pre_hook(seen, prepend=True))
        self._handles.append(module.register_forward_hook(seen, prepend=True))

    def returned(self, outputs: Iterable[Tensor]) -> None:
        """What the model returns is read by its caller."""
        for output in outputs:
            if output in self._living:
                self._living[output].obstacle = "its output is returned by the model"

    def finish(self) -> None:
        """What is alive when nothing of the run should be is kept by someone."""
        for output in self._living.values():
            output.obstacle = output.obstacle or "its output is kept after the call"

    # ---- afterwards

    def why_not(self, conv: nn.Module) -> str:
        """Why the convolution cannot take an activation over; empty if it can, as far as its own outputs go."""
        fate = self._fates[conv]
        obstacles = [fate.obstacle, *(output.obstacle for output in fate.outputs)]
        if any(obstacles):
            return next(filter(None, obstacles))
        kinds = {ACTIVATIONS[type(o.activation)] if o.activation is not None else "" for o in fate.outputs}
        if kinds and "" not in kinds:
            return "" if len(kinds) == 1 else "different activations follow it"
        return "no activation module follows it"

    def groups(self) -> list[tuple[str, tuple[nn.Module, ...], tuple[nn.Module, ...]]]:
        """What can be fused, all or nothing: the activation's name, convolutions, and the modules that they replace."""
        able = {conv for conv in self._fates if not self.why_not(conv)}
        while True:
            fused: dict[nn.Module, int] = {}
            for conv in able:
                for output in self._fates[conv].outputs:
                    assert output.activation is not None
                    fused[output.activation] = fused.get(output.activation, 0) + 1
            spoilt = {activation for activation, count in fused.items() if count != self._calls[activation]}
            if not spoilt:
                return _components({conv: self._activations(conv) for conv in self._fates if conv in able})
            for conv in able & self._fates.keys():
                if self._activations(conv) & spoilt:
                    name = self._names[next(iter(self._activations(conv) & spoilt))]
                    self._fates[conv].obstacle = f"{name} is also called on something else"
            able = {conv for conv in able if not self._fates[conv].obstacle}

    def _activations(self, conv: nn.Module) -> set[nn.Module]:
        return {output.activation for output in self._fates[conv].outputs if output.activation is not None}


def _why_alone(conv: nn.Module) -> str:
    """Why a convolution takes nothing over, whatever becomes of its outputs; empty if it may."""
    if _hooked(conv):
        return "it has hooks"
    return "a transposed convolution computes no activation" if conv.transposed else ""


def _hooked(module: nn.Module) -> bool:
    """Whether someone else sees the calls of a module; some tools do it by putting a function before its forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def _components(
    follows: Mapping[nn.Module, set[nn.Module]],
) -> list[tuple[str, tuple[nn.Module, ...], tuple[nn.Module, ...]]]:
    """Convolutions that share an activation belong together."""
    groups: list[tuple[list[nn.Module], set[nn.Module]]] = []
    for conv, activations in follows.items():
        joined = [group for group in groups if group[1] & activations]
        convs = [other for group in joined for other in group[0]] + [conv]
        reached = set(activations).union(*(group[1] for group in joined))
        groups = [group for group in groups if group not in joined] + [(convs, reached)]
    return [
        (ACTIVATIONS[type(next(iter(activations)))], tuple(convs), tuple(sorted(activations, key=id)))
        for convs, activations in groups
    ]
