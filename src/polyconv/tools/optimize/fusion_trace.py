"""Proof by observation that a convolution may be fused with the batch normalisation and the activation after it.

Fusing ``activation(conv(x))`` removes the tensor in between, so nothing else may read it. The model runs on its example
with and without gradients, in its current mode, and each output of a convolution becomes a :class:`_Watched` tensor;
in evaluation also the output of a batch normalisation that reads such a tensor.
A fusion is valid if all of this holds for every output in both runs:

- **One reader.** One activation or normalisation module reads it, once. Python calls of PyTorch functions on the
  tensor, in any thread, pass through ``__torch_function__``; the few that do not (:data:`_BYPASSES`) are replaced
  during the run, and calls from C++ pass through the dispatcher. Metadata may be read.
- **One owner.** Its storage has no more owners at that module than when it was computed, no Python attribute was
  set on it, and it does not outlive the run. So no list, attribute, closure, thread, view or array keeps it.
- **No hook.** No module hook, global module hook or saved-tensor hook receives the tensor or its gradient, and Python
  reads no node of the autograd graph.

A module can become an identity only if every call of it is such a reader, and a normalisation only if it is called once
in a run, after one convolution. The proof holds for the mode of the runs, training or evaluation;
:class:`~polyconv.tools.optimize.swapping.Fusion` suspends the fusion in the other. It does not cover code paths that
the example does not take, C++ extensions that read a tensor's memory without the dispatcher, or TorchScript and
``torch.func`` in threads other than the model's.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...activation import Activation
from ...model.example_run import Example, Loss, run_model

_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Activation]] = {
    nn.ReLU: lambda _: Activation.RELU,
    nn.ReLU6: lambda _: Activation("relu6"),
    nn.SiLU: lambda _: Activation.SILU,
    nn.Hardtanh: lambda module: Activation.of("hardtanh", module.min_val, module.max_val),
    nn.LeakyReLU: lambda module: Activation.of("leaky_relu", module.negative_slope),
    nn.Hardswish: lambda _: Activation("hardswish"),
    nn.Hardsigmoid: lambda _: Activation("hardsigmoid"),
    nn.GELU: lambda module: Activation("gelu_tanh" if module.approximate == "tanh" else "gelu"),
    nn.Sigmoid: lambda _: Activation("sigmoid"),
}


def activation_of(module: nn.Module | None) -> Activation | None:
    """The activation that a module computes; None if it cannot be fused. Subclasses may compute something else."""
    known = _ACTIVATIONS.get(type(module))  # type: ignore[arg-type]
    try:
        return None if known is None else known(module)
    except ValueError:  # parameters that kernels do not take
        return None


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that can be folded; their subclasses may compute something else."""

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "itemsize", "nbytes", "names", "is_leaf"),
    *("is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu"),
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "__len__"),
)
_METADATA = frozenset(getattr(Tensor, name) for name in _PROPERTIES if hasattr(Tensor, name))
"""Properties and methods that read no element and keep no reference."""

_RECORD = "_polyconv_record"
_GRAPH_READERS = ("torch.utils.hooks", "torch.utils.checkpoint")
"""PyTorch modules that read ``grad_fn`` in a forward pass, but only of tensors that they created."""

_storage_owners = getattr(torch._C, "_storage_Use_Count", None)
_top_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""From PyTorch 2.8 on."""


@dataclass(eq=False)
class _Reading:
    """One call of an activation or normalisation module."""

    module: nn.Module
    input: Tensor | None
    reads: bool = False
    """It has read a watched tensor."""


@dataclass(eq=False)
class _Output:
    """One output of a convolution, or of a normalisation after it."""

    flow: Flow
    run: int = 0
    dims: int = 0
    owners: int = 0
    """Owners of its storage when it was computed."""
    watched: bool = True
    """The tensor is alive and still of class :class:`_Watched`."""
    call: _Reading | None = None
    """The call of a module that reads it."""
    obstacle: str = ""
    """The first reason against fusion."""

    @property
    def reader(self) -> nn.Module | None:
        return None if self.call is None else self.call.module

    def check(self, tensor: Tensor) -> None:
        """Record new owners of the storage and attributes on the tensor, which no PyTorch call reveals."""
        if _owners(tensor) > self.owners:
            self.obstacle = self.obstacle or "another tensor or array shares the memory of its output"
        if tensor.__dict__.keys() - {_RECORD}:
            self.obstacle = self.obstacle or "its output has attributes of its own"


@dataclass
class _Fate:
    """Outputs of one convolution, or of one normalisation after a convolution."""

    outputs: list[_Output] = field(default_factory=list)
    obstacle: str = ""

    def why_not(self) -> str:
        return next(filter(None, [self.obstacle, *(output.obstacle for output in self.outputs)]), "")

    def readers(self) -> set[nn.Module | None]:
        return {output.reader for output in self.outputs}


class _Watched(Tensor):
    """A plain tensor whose ``__class__`` was reassigned: same object, storage and autograd graph.

    The class has no state, so assigning ``__class__`` starts and ends the observation. It ends at the first obstacle.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        watched = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is _Watched}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA or (getattr(func, "__name__", "") == "__get__" and func.__self__ in _METADATA):
                return func(*args, **(kwargs or {}))
            with ExitStack() as stack:
                for tensor in watched.values():
                    stack.enter_context(_record_of(tensor).flow.reading(tensor, func))
                return func(*args, **(kwargs or {}))

    def __del__(self) -> None:
        if _RECORD in self.__dict__:
            output = _record_of(self)
            output.watched = False
            output.check(self)


def _record_of(tensor: Tensor) -> _Output:
    record: _Output = tensor.__dict__[_RECORD]
    return record


def _refuse(tensor: Tensor, why: str) -> None:
    output = _record_of(tensor)
    output.obstacle = output.obstacle or why
    _unwatch(tensor)


def _unwatch(tensor: Tensor) -> None:
    _record_of(tensor).watched = False
    tensor.__class__ = Tensor
    del tensor.__dict__[_RECORD]


_BYPASSES: tuple[tuple[Any, str], ...] = (
    *((Tensor, name) for name in ("as_subclass", "_make_subclass", "set_")),
    *((torch, name) for name in ("tensor", "as_tensor", "asarray")),
    *((torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack")),
)
"""Functions that ignore ``__torch_function__``. The dispatcher sees only some of them, in the model's thread."""

_watching = threading.Lock()
"""Held while the bypasses are replaced."""


@contextmanager
def _bypasses_seen() -> Iterator[None]:
    """Patch the bypasses, and assignment to ``data``, to record an obstacle when given a watched tensor."""

    def seeing(function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if type(value) is _Watched:
                    _refuse(value, f"its output is read by {_name_of(function)}")
            return function(*args, **kwargs)

        return seen

    with _watching, ExitStack() as stack:
        data: Any = Tensor.data
        stack.enter_context(_replaced(Tensor, "data", property(data.__get__, seeing(data.__set__))))
        for owner, name in _BYPASSES:
            stack.enter_context(_replaced(owner, name, seeing(getattr(owner, name))))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class _Here(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.inside: _Reading | None = None
        """The running call of an activation or normalisation."""
        self.unnamed: _Output | None = None
        """Output read by a running function; the first operator dispatched gives the obstacle its name."""


class Flow(TorchDispatchMode):
    """Observes forward passes of a model; :meth:`groups` then gives the fusions, :meth:`why_not` the obstacles."""

    def __init__(self, model: nn.Module, convolutions: Iterable[nn.Module]) -> None:
        super().__init__()
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._fates = {conv: _Fate(obstacle="it has hooks" if _hooked(conv) else "") for conv in convolutions}
        self._convolutions = tuple(self._fates)
        self._norms = set() if model.training else {norm for norm in self._names if isinstance(norm, _BatchNorm)}
        """Normalisations that may be folded: none in training."""
        self._uses = Counter(id(tensor) for module in self._names for tensor in _tensors(module))
        self._fates.update((norm, _Fate()) for norm in self._norms)
        self._run = 0
        self._here = _Here()
        self._calls: dict[nn.Module, int] = {}
        self._saving = _Saving()

    # ---- running the model

    def watch(self, example: Example, loss: Loss | None, *, graded: bool, required: bool) -> None:
        """Run the model once under observation; with ``graded``, gradients are recorded.

        If the model fails only under observation, nothing is fused. If it also fails without, it does not support this
        gradient mode: the exception is raised if the mode is ``required``, and the run is ignored otherwise.
        """
        mode = torch.enable_grad if graded else torch.no_grad
        saving = self._saving.hooks(training=self._model.training) if graded else nullcontext()
        outputs = {conv: len(fate.outputs) for conv, fate in self._fates.items()}
        calls = dict(self._calls)
        self._run += 1
        failure = ""
        try:
            with mode(), saving, _bypasses_seen(), self._hooks(), self:
                output = run_model(self._model, example)
                self._returned(output)
                if graded and self._model.training and loss is not None:
                    loss(output)
                del output
        except Exception as error:
            failure = f"the model fails while its tensors are watched: {type(error).__name__}: {error}"
        finally:
            self._finish()
        if not failure:
            return
        try:
            with mode():
                run_model(self._model, example)
            self.refuse(failure)
        except Exception:
            if required:
                raise
            for conv, count in outputs.items():
                del self._fates[conv].outputs[count:]
            self._calls = calls

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        if any(getattr(all_modules, f"_global_{kind}_hooks") for kind in _HOOKS):
            self.refuse("a hook of all modules sees its output or its gradient")
        with ExitStack() as stack:
            for module, name in self._names.items():
                if module in self._convolutions:
                    handles = [module.register_forward_hook(self._produced, prepend=True)]
                elif (activation_of(module) or module in self._norms) and not _hooked(module):
                    leave = self._normalised if module in self._norms else self._leave
                    enter = module.register_forward_pre_hook(self._enter)
                    handles = [enter, module.register_forward_hook(leave, prepend=True)]
                elif _hooked(module):
                    handles = self._watch_hooks(module, name)
                else:
                    continue
                for handle in handles:
                    stack.callback(handle.remove)
            if torch.is_grad_enabled():
                stack.enter_context(_GraphReads(self))
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._here.unnamed is not None:
            self._here.unnamed.obstacle = f"its output is read by {func.name()}"
            self._here.unnamed = None
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is _Watched and not self._activates(leaf):  # read from C++, bypassing __torch_function__
                _refuse(leaf, f"its output is read by {func.name()}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def reading(self, tensor: Tensor, func: Any) -> Iterator[None]:
        """Context in which a PyTorch function reads an output."""
        output, now = _record_of(tensor), self._here.inside
        if self._activates(tensor) and output.call is None:
            assert now is not None
            output.call, now.reads = now, True
            output.check(tensor)
            if self._saving.is_foreign():
                output.obstacle = output.obstacle or "a hook of saved tensors sees its output or the activation's"
            yield
            if getattr(now.module, "inplace", False) and type(tensor) is _Watched:
                _unwatch(tensor)  # it holds the activation's output now
            return
        _refuse(tensor, f"its output is read by {_name_of(func)}")
        self._here.unnamed = output
        try:
            yield
        finally:
            self._here.unnamed = None

    def _activates(self, tensor: Tensor) -> bool:
        return self._here.inside is not None and self._here.inside.input is tensor

    def refuse(self, why: str) -> None:
        """Record an obstacle for all fusions."""
        for fate in self._fates.values():
            fate.obstacle = fate.obstacle or why

    def _produced(self, module: nn.Module, _: Any, output: Any) -> None:
        record = _Output(self, self._run)
        self._fates[module].outputs.append(record)
        if type(output) is not Tensor:
            record.watched, record.obstacle = False, f"its output is no plain tensor but a {type(output).__name__}"
            return
        record.owners, record.dims = _owners(output), output.dim()
        output.__dict__[_RECORD] = record
        output.__class__ = _Watched

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls[module] = self._calls.get(module, 0) + 1
        self._here.inside = _Reading(module, args[0] if len(args) == 1 else None)

    def _leave(self, *_: Any) -> None:
        if self._here.inside is not None:
            self._here.inside.input = None  # `_Output.call` would keep it alive
        self._here.inside = None

    def _normalised(self, norm: nn.Module, _: Any, output: Any) -> None:
        call = self._here.inside
        self._leave()
        if call is not None and call.reads:
            self._produced(norm, _, output)

    def _watch_hooks(self, module: nn.Module, name: str) -> list[Any]:
        """Record an obstacle for convolution outputs passed to a module's hooks, which may do anything with them."""

        def seen(*values: Any) -> None:
            for leaf in tree_leaves(values[1:]):
                if type(leaf) is _Watched:
                    _refuse(leaf, f"a hook of {name or 'the model'} sees its output")

        return [
            module.register_forward_pre_hook(seen, prepend=True),
            module.register_forward_hook(seen, prepend=True),
        ]

    def _returned(self, output: Any) -> None:
        for leaf in tree_leaves(output):
            if type(leaf) is _Watched:
                _refuse(leaf, "its output is returned by the model")

    def _finish(self) -> None:
        """Record an obstacle for outputs that are still alive after the run."""
        self._leave()
        if not self._is_watching():
            return
        gc.collect()
        if not self._is_watching():
            return
        for tensor in gc.get_objects():
            if type(tensor) is _Watched and _record_of(tensor).flow is self:
                _refuse(tensor, "its output is kept after the call")

    def _is_watching(self) -> bool:
        return any(output.watched for fate in self._fates.values() for output in fate.outputs)

    # ---- results

    def why_not(self, conv: nn.Module) -> str:
        """Obstacle to fusing a convolution with an activation; empty if its own outputs allow fusion."""
        last = self.norm(conv) or conv
        if why := self._fates[last].why_not() or (last is conv and self._why_not_folded(conv)):
            return why
        if conv.transposed:
            return "a transposed convolution computes no activation"
        kinds = {activation_of(reader) for reader in self._fates[last].readers()}
        if kinds and None not in kinds:
            return "" if len(kinds) == 1 else "different activations follow it"
        return "no activation module follows it"

    def norm(self, conv: nn.Module) -> nn.Module | None:
        """The batch normalisation that can be folded into a convolution; None if there is none."""
        fate = self._fates[conv]
        if fate.why_not() or self._why_not_folded(conv):
            return None
        return next((reader for reader in fate.readers() if reader in self._norms), None)

    def _why_not_folded(self, conv: Any) -> str:
        """Obstacle to folding the normalisation that reads a convolution's outputs; empty if none reads them."""
        outputs, readers = self._fates[conv].outputs, self._fates[conv].readers()
        norm = next((reader for reader in readers if reader in self._norms), None)
        if norm is None:
            return ""
        name = self.name(norm)
        if len(readers) > 1:
            return f"not only {name} follows it"
        if len({output.run for output in outputs}) < len(outputs):
            return f"it is called more than once, and {name} follows it"
        if self._calls[norm] != len(outputs):
            return f"{name} is also called on something else"
        if any(output.dims != conv.weight.dim() for output in outputs):
            return f"{name} normalises an output without a batch"
        if any(self._uses[id(tensor)] > 1 for tensor in (*_tensors(conv), *_tensors(norm))):
            return f"it or {name} shares a parameter or buffer with another module"
        return _why_not_norm(conv, norm, name)

    def name(self, module: nn.Module) -> str:
        """Class and name of a module."""
        return f"{type(module).__name__} {self._names[module]}".strip()

    def groups(self) -> list[tuple[str, tuple[nn.Module, ...], tuple[nn.Module, ...]]]:
        """Fusions, each to be made as a whole: activation name, convolutions, and the activation modules replaced."""
        able = {conv for conv in self._convolutions if not self.why_not(conv)}
        while True:
            fused = Counter(output.reader for conv in able for output in self._last(conv).outputs)
            spoilt = {one for one, count in fused.items() if one is not None and count != self._calls[one]}
            if not spoilt:
                return _components({conv: self._activations(conv) for conv in self._convolutions if conv in able})
            for conv in able:
                if found := self._activations(conv) & spoilt:
                    self._last(conv).obstacle = f"{self._names[found.pop()]} is also called on something else"
            able = {conv for conv in able if not self._last(conv).obstacle}

    def _last(self, conv: nn.Module) -> _Fate:
        return self._fates[self.norm(conv) or conv]

    def _activations(self, conv: nn.Module) -> set[nn.Module]:
        return {reader for reader in self._last(conv).readers() if reader is not None}


def prove(model: nn.Module, convolutions: Iterable[nn.Module], example: Example, loss: Loss | None) -> Flow:
    """Observe the model with and without gradients, since its code may branch on that."""
    flow = Flow(model, convolutions)
    for graded in (False, True):
        flow.watch(example, loss, graded=graded, required=graded == model.training)
    return flow


class _GraphReads(TorchFunctionMode):
    """Prevents all fusions if Python reads a node of the autograd graph, from which all others are reachable."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reader = sys._getframe(1).f_globals.get("__name__")
        if getattr(func, "__self__", None) is Tensor.grad_fn and reader not in _GRAPH_READERS:
            self._flow.refuse("the model reads grad_fn, from which hooks reach every node of the autograd graph")
        return func(*args, **(kwargs or {}))


class _Saving:
    """Detects saved-tensor hooks other than those of the observation itself."""

    def __init__(self) -> None:
        self._packed = 0

    def hooks(self, *, training: bool) -> AbstractContextManager[object]:
        """Discard saved tensors in evaluation, where the example may be too large for a backward pass.

        Also in training before PyTorch 2.8, where foreign hooks are only detectable by these not being called.
        """
        return nullcontext() if training and _top_saved_hooks is not None else saved_tensors_hooks(self._pack, _unpack)

    def is_foreign(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        if _top_saved_hooks is not None:
            pack = (_top_saved_hooks(True) or (None,))[0]
            return pack is not None and pack != self._pack and pack.__module__ != "torch.utils.checkpoint"
        before = self._packed
        torch.ones((), requires_grad=True).exp()  # saves its result
        return self._packed == before

    def _pack(self, _: Tensor) -> None:
        self._packed += 1


def _unpack(_: None) -> Tensor:
    raise RuntimeError("the model computes gradients in its forward pass, for which nothing was kept")


def _name_of(func: Any) -> str:
    """Qualified name of a function, or of a method or property of tensors."""
    owner = getattr(func, "__self__", None)
    name = str(getattr(owner if hasattr(owner, "__objclass__") else func, "__qualname__", func))
    return name.replace("_VariableFunctionsClass", "torch").replace("TensorBase", "Tensor")


def _owners(tensor: Tensor) -> int:
    """Number of owners of a tensor's storage: tensors, arrays, capsules."""
    if _storage_owners is None:
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        count: Callable[[int], int] = _storage_owners
        return count(tensor.untyped_storage()._cdata)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module itself."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _why_not_norm(conv: nn.Module, norm: nn.Module, name: str) -> str:
    """Obstacle to folding that does not depend on the outputs; empty if there is none."""
    if type(norm) not in _NORMS:
        return f"{name}, which follows it, is of a class of its own or parametrised"
    if norm.training:
        return f"{name}, which follows it, is in training mode"
    if norm.running_mean is None or norm.running_var is None:
        return f"{name}, which follows it, has no running statistics"
    weight = conv.weight
    if any(t.is_floating_point() and (t.dtype, t.device) != (weight.dtype, weight.device) for t in _tensors(norm)):
        return f"{name}, which follows it, has another dtype or device"
    return ""


_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def _hooked(module: nn.Module) -> bool:
    """Whether a module's calls are observed, by hooks or, as some tools do, by a ``forward`` set on the instance."""
    return any(getattr(module, f"_{kind}_hooks") for kind in _HOOKS) or "forward" in vars(module)


def _components(
    follows: Mapping[nn.Module, set[nn.Module]],
) -> list[tuple[str, tuple[nn.Module, ...], tuple[nn.Module, ...]]]:
    """Connected components: convolutions that share an activation module form one group."""
    groups: list[tuple[list[nn.Module], set[nn.Module]]] = []
    for conv, activations in follows.items():
        joined = [group for group in groups if group[1] & activations]
        convs = [other for group in joined for other in group[0]] + [conv]
        reached = set(activations).union(*(group[1] for group in joined))
        groups = [group for group in groups if group not in joined] + [(convs, reached)]
    return [
        (str(activation_of(next(iter(activations)))), tuple(convs), tuple(sorted(activations, key=id)))
        for convs, activations in groups
    ]
