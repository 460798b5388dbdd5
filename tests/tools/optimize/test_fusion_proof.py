"""Which tensors between a convolution and its activation are proved unobserved, and which are not.

Every way in which code can read or keep such a tensor is a line of :data:`WAYS`. None may be fused, before the
activation or after it, for any activation and mode; code that reads no element (:data:`HARMLESS`) must not prevent a
fusion.
"""

from __future__ import annotations

import copy
import io
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import checkpoint

from nightly import NIGHTLY
from polyconv.tools.optimize import fusion_trace
from polyconv.tools.optimize.recording import record

X = torch.randn(2, 3, 6, 7)
KEPT: list[Any] = []
"""A global variable."""

Way = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Two convolutions with an activation between, and code that touches the tensor before or after it."""

    def __init__(self, kind: type[nn.Module], inplace: bool, way: Way, when: str) -> None:
        super().__init__()
        self.conv, self.act, self.tail = nn.Conv2d(3, 3, 3, padding=1), kind(inplace), nn.Conv2d(3, 2, 1)
        self.way, self.when = way, when
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.when == "before":
            self.way(self, y)
        z = self.act(y)
        if self.when == "after":
            self.way(self, y)
        result: Tensor = self.tail(z)
        return result


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    KEPT.clear()


def fusable(model: nn.Module, x: Any = X) -> tuple[list[str], Callable[[str], str]]:
    """Convolutions that may take over an activation, and reasons why others may not."""
    names = {module: name for name, module in model.named_modules()}
    convolutions = {name: module for module, name in names.items() if type(module) is nn.Conv2d}
    found = record(model, convolutions, x, None).flow
    groups = found.groups()
    return [names[conv] for _, convs, _ in groups for conv in convs], lambda name: found.why_not(convolutions[name])


def bare(y: Tensor) -> Tensor:
    """The tensor itself in a run without gradients: some functions take no tensor that has one."""
    return y.detach() if y.requires_grad else y


def in_a_thread(read: Callable[[Tensor], Any]) -> Way:
    def way(net: Net, y: Tensor) -> None:
        thread = threading.Thread(target=lambda: net.log.append(read(bare(y))))
        thread.start()
        thread.join()

    return way


def lent(y: Tensor) -> Tensor:
    other = torch.empty_like(X)
    other.data = y
    return other


def generated(net: Net, y: Tensor) -> None:
    def readings() -> Iterator[Any]:
        yield y.tolist()

    net.log.append(next(readings()))


def by_queue(net: Net, y: Tensor) -> None:
    waiting: queue.Queue[Tensor] = queue.Queue()
    thread = threading.Thread(target=lambda: net.log.append(waiting.get().tolist()))
    thread.start()
    waiting.put(y)
    thread.join()


def saved(net: Net, y: Tensor) -> None:
    torch.save(y, io.BytesIO())


def swapped(net: Net, y: Tensor) -> None:
    other = torch.zeros(y.shape)
    if not y.requires_grad:
        torch.utils.swap_tensors(y, other)
    net.log.append(other.tolist())


def weakly(net: Net, y: Tensor) -> None:
    reference = weakref.ref(y)
    net.log.append(reference().tolist())  # type: ignore[union-attr]


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.sum()


class Mine(Tensor):
    """A subclass of tensors."""


WAYS: dict[str, Way] = {
    # arithmetic and Python numbers
    "arithmetic": lambda net, y: net.log.append(y + 1),
    "a sum": lambda net, y: net.log.append(float(y.sum())),
    "item": lambda net, y: net.log.append(y[0, 0, 0, 0].item()),
    "tolist": lambda net, y: net.log.append(y.tolist()),
    "a condition on its values": lambda net, y: net.log.append(1) if (y > 0).any() else None,
    "iteration": lambda net, y: list(y),
    "repr": lambda net, y: net.log.append(repr(y)),
    "format": lambda net, y: net.log.append(f"{y}"),
    "a function": lambda net, y: net.log.append(F.relu(y)),
    "an operator by name": lambda net, y: net.log.append(torch.ops.aten.sum(y)),
    "TorchScript": lambda net, y: net.log.append(scripted(y)),
    "a function of autograd": lambda net, y: net.log.append(Identity.apply(y)),
    "an argument out=": lambda net, y: torch.add(X[:1, :1], 1, out=torch.empty(0)).add_(y.detach()[:1, :1]),
    # its memory
    "numpy": lambda net, y: net.log.append(bare(y).numpy()),
    "asarray": lambda net, y: net.log.append(np.asarray(bare(y))),
    "data_ptr": lambda net, y: net.log.append(y.data_ptr()),
    "storage": lambda net, y: net.log.append(y.untyped_storage()),
    "DLPack": lambda net, y: net.log.append(torch.from_dlpack(bare(y))),
    "a capsule": lambda net, y: net.log.append(torch.utils.dlpack.to_dlpack(bare(y))),
    "set_": lambda net, y: net.log.append(torch.empty(0).set_(bare(y)).tolist()),
    "the data of another": lambda net, y: setattr(net.log.append(t := torch.empty_like(X)) or t, "data", y),
    "shared memory": lambda net, y: bare(y).share_memory_(),
    # other tensors of it
    "detach": lambda net, y: net.log.append(y.detach()),
    "data": lambda net, y: net.log.append(y.data),
    "a view": lambda net, y: net.log.append(y.view(-1)),
    "a slice": lambda net, y: net.log.append(y[0]),
    "clone": lambda net, y: net.log.append(y.clone()),
    "torch.tensor": lambda net, y: net.log.append(torch.tensor(bare(y))),
    "torch.as_tensor": lambda net, y: net.log.append(torch.as_tensor(y)),
    "torch.asarray": lambda net, y: net.log.append(torch.asarray(y)),
    "copy": lambda net, y: net.log.append(copy.copy(y)),
    "deepcopy": lambda net, y: net.log.append(copy.deepcopy(bare(y))),
    "pickle": lambda net, y: net.log.append(pickle.dumps(bare(y))),
    "torch.save": saved,
    "a parameter": lambda net, y: net.log.append(nn.Parameter(y)),
    "a buffer": lambda net, y: net.register_buffer("buffer", y.detach(), persistent=False),
    "as_subclass": lambda net, y: net.log.append(y.as_subclass(Mine)),
    "_make_subclass": lambda net, y: net.log.append(Tensor._make_subclass(Mine, y)),
    "as_subclass that does not last": lambda net, y: net.log.append(y.as_subclass(Mine).tolist()),
    "_make_subclass that does not last": lambda net, y: net.log.append(Tensor._make_subclass(Mine, y).tolist()),
    "the data of another that does not last": lambda net, y: net.log.append(lent(y).tolist()),
    "twice in one call": lambda net, y: net.log.append(torch.cat([y, y])),
    "swap_tensors": swapped,
    # other code
    "a weak reference": weakly,
    "an attribute of its own": lambda net, y: setattr(y, "name_of_mine", "y"),
    "a generator": generated,
    "another thread": in_a_thread(Tensor.tolist),
    "as_subclass in another thread": in_a_thread(lambda y: y.as_subclass(Mine).tolist()),
    "set_ in another thread": in_a_thread(lambda y: torch.empty(0).set_(y).tolist()),
    "DLPack in another thread": in_a_thread(lambda y: torch.from_dlpack(y).tolist()),
    "the data of another in another thread": in_a_thread(lambda y: lent(y).tolist()),
    "a queue": by_queue,
    "a gradient of another": lambda net, y: setattr(net.log.append(t := torch.zeros_like(X)) or t, "grad", bare(y)),
    # autograd
    "register_hook": lambda net, y: y.register_hook(net.log.append) if y.requires_grad else None,
    "retain_grad": lambda net, y: y.retain_grad() if y.requires_grad else None,
    "a hook before its node": lambda net, y: (
        y.grad_fn.register_prehook(lambda g: net.log.append(g)) if y.requires_grad else None  # type: ignore[union-attr]
    ),
    "a hook after its node": lambda net, y: (
        y.grad_fn.register_hook(lambda *g: net.log.append(g)) if y.requires_grad else None  # type: ignore[union-attr]
    ),
    "a hook of several gradients": lambda net, y: (
        register_multi_grad_hook([y], net.log.append) if y.requires_grad else None
    ),
    "its edge": lambda net, y: net.log.append(get_gradient_edge(y)) if y.requires_grad else None,
    "a gradient in the forward pass": lambda net, y: (
        net.log.append(torch.autograd.grad(y.sum(), y)) if y.requires_grad else None
    ),
    "requires_grad set": lambda net, y: None if y.requires_grad else setattr(y, "requires_grad", True),
    "requires_grad_": lambda net, y: y.requires_grad_(),
}
"""Code that reads the tensor, keeps it, or sees its gradient."""

REFERENCES: dict[str, Way] = {
    "a list": lambda net, y: net.log.append(y),
    "a dict": lambda net, y: net.log.append({"y": y}),
    "a dict by its identity": lambda net, y: net.__dict__.setdefault("seen", {}).update({y: 1}),
    "an attribute": lambda net, y: net.__dict__.update(last=y),
    "a global variable": lambda net, y: KEPT.append(y),
    "a closure": lambda net, y: net.log.append(lambda: y),
    "a reference cycle": lambda net, y: (cycle := [y], cycle.append(cycle), KEPT.append(cycle)),  # type: ignore[list-item]
}
"""Code that keeps the tensor without reading it. After an in-place activation, it is the activation's output."""

HARMLESS: dict[str, Way] = {
    "nothing": lambda net, y: None,
    "shape": lambda net, y: net.log.append(y.shape),
    "size": lambda net, y: net.log.append((y.size(), y.size(1), y.dim(), y.ndim, y.numel(), len(y))),
    "a condition on its shape": lambda net, y: net.log.append(1) if y.shape[0] > 1 else None,
    "dtype and device": lambda net, y: net.log.append((y.dtype, y.device, y.is_cuda, y.is_floating_point())),
    "strides": lambda net, y: net.log.append((y.stride(), y.is_contiguous())),
    "its class": lambda net, y: net.log.append(isinstance(y, Tensor)),
    "its identity": lambda net, y: net.log.append((id(y), hash(y), y is None)),
    "a list that is emptied": lambda net, y: (net.log.append(y), net.log.clear()),
    "a weak reference that is not followed": lambda net, y: net.log.append(weakref.ref(y)),
    "a dict that does not last": lambda net, y: {y: 1},
}


COMBINATIONS = [(nn.ReLU, False), (nn.SiLU, True), *([(nn.ReLU, True), (nn.SiLU, False)] if NIGHTLY else [])]
"""Activations and modes: half of them, except nightly."""
combined = pytest.mark.parametrize(("kind", "training"), COMBINATIONS)


def refused(model: Net) -> str:
    found, why_not = fusable(model)
    assert found == []
    assert "as_subclass" not in vars(Tensor)
    assert "data" not in vars(Tensor)
    assert not any(type(entry).__module__ == fusion_trace.__name__ for entry in (*model.log, *KEPT)), (
        "a watched tensor is left"
    )
    return why_not("conv")


@combined
@pytest.mark.parametrize(
    ("when", "inplace"), [("before", False), ("after", False), ("before", True)], ids=["before", "after", "inplace"]
)
@pytest.mark.parametrize("way", WAYS)
def test_what_reads_the_tensor_is_not_fused(
    way: str, kind: type[nn.Module], when: str, inplace: bool, training: bool
) -> None:
    assert refused(Net(kind, inplace, WAYS[way], when).train(training))


@combined
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", REFERENCES)
def test_what_keeps_the_tensor_is_not_fused(way: str, kind: type[nn.Module], when: str, training: bool) -> None:
    assert refused(Net(kind, False, REFERENCES[way], when).train(training)) == "its output is kept after the call"


@combined
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", HARMLESS)
def test_what_reads_no_element_is_fused(
    way: str, kind: type[nn.Module], when: str, inplace: bool, training: bool
) -> None:
    found, why_not = fusable(Net(kind, inplace, HARMLESS[way], when).train(training))
    assert (found, why_not("conv")) == (["conv"], "")


class Normalised(Net):
    """A normalisation in the place of the activation, and an activation after it."""

    def __init__(self, way: Way, when: str) -> None:
        super().__init__(nn.ReLU, False, way, when)
        self.act, self.then = nn.BatchNorm2d(3), nn.ReLU()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.when == "before":
            self.way(self, y)
        z = self.act(y)
        if self.when != "before":
            self.way(self, y if self.when == "after" else z)
        result: Tensor = self.tail(self.then(z))
        return result


def folded(model: Normalised) -> tuple[bool, list[str], str]:
    """Whether the normalisation can be folded; fused convolutions; the reason against."""
    flow = record(model, {"conv": model.conv}, X, None).flow
    found = [model.conv is conv for _, convs, _ in flow.groups() for conv in convs]
    return flow.norm(model.conv) is model.act, ["conv"] * len(found), flow.why_not(model.conv)


@pytest.mark.parametrize("when", ["before", "after", "normalised"])
@pytest.mark.parametrize("way", WAYS | REFERENCES)
def test_what_reads_the_tensor_before_a_normalisation_is_not_folded(way: str, when: str) -> None:
    """What reads the normalised tensor prevents fusing the activation only, unless it sees all of the graph."""
    folds, fused, why = folded(Normalised((WAYS | REFERENCES)[way], when))
    assert why
    assert (folds, fused) == (when == "normalised" and "grad_fn" not in why, [])


@pytest.mark.parametrize("when", ["before", "after", "normalised"])
@pytest.mark.parametrize("way", HARMLESS)
def test_what_reads_no_element_is_folded(way: str, when: str) -> None:
    assert folded(Normalised(HARMLESS[way], when)) == (True, ["conv"], "")


# ---- hooks that are registered elsewhere


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "register",
    [
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
def test_hooks_of_all_modules(register: str, training: bool) -> None:
    model = Net(nn.ReLU, False, HARMLESS["nothing"], "before").train(training)
    handle = getattr(all_modules, register)(lambda *_: None)
    try:
        assert refused(model) == "a hook of all modules sees its output or its gradient"
    finally:
        handle.remove()
    assert fusable(model)[0] == ["conv"]


@pytest.mark.parametrize("where", ["conv", "act"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_a_module(register: str, where: str) -> None:
    model = Net(nn.SiLU, False, HARMLESS["nothing"], "before").train()
    getattr(model.get_submodule(where), register)(lambda *_: None)
    assert refused(model)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_modules_that_do_not_meet_the_tensor(register: str) -> None:
    model = nn.Sequential(Net(nn.SiLU, False, HARMLESS["nothing"], "before"), nn.BatchNorm2d(2)).train()
    getattr(model[1], register)(lambda *_: None)
    assert fusable(model)[0] == ["0.conv"]


class Saving(Net):
    """Runs under saved-tensor hooks, which see what the activation saves."""

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: (self.log.append(tensor.sum()), tensor)[1], lambda tensor: tensor):
            return super().forward(x)


@pytest.mark.parametrize("version", ["this one", "before 2.8"])
@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_hooks_of_saved_tensors(
    kind: type[nn.Module], training: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version == "before 2.8":
        monkeypatch.setattr(fusion_trace, "_top_saved_hooks", None)
    assert "saved tensors" in refused(Saving(kind, False, HARMLESS["nothing"], "before").train(training))
    assert fusable(Net(kind, False, HARMLESS["nothing"], "before").train(training))[0] == ["conv"]


class Walking(Net):
    """Reaches the convolution's node from a later tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.grad_fn is not None:
            y.grad_fn.next_functions[0][0].register_prehook(self.log.append)  # type: ignore[union-attr]
        return y


def test_a_walk_through_the_autograd_graph() -> None:
    assert "grad_fn" in refused(Walking(nn.ReLU, False, HARMLESS["nothing"], "before"))


# ---- what is fused


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Block(nn.Module):
    """A residual block with normalisation, in the style of common networks."""

    def __init__(self, kind: type[nn.Module], inplace: bool) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(3, 3, 3, padding=1), kind(inplace)
        self.conv2, self.bn2, self.act2 = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), kind(inplace)
        self.conv3 = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        out = self.conv1(x)
        out = self.act1(out)
        out = self.act2(self.bn2(self.conv2(out)))
        result: Tensor = self.conv3(out) + shortcut
        return result


class Names(nn.Module):
    """A name for every tensor, so that all live to the end."""

    def __init__(self, kind: type[nn.Module], inplace: bool) -> None:
        super().__init__()
        self.conv, self.act, self.tail = nn.Conv2d(3, 3, 3), kind(inplace), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv(x)
        second = self.act(first)
        third: Tensor = self.tail(second)
        return third


class Checkpointed(nn.Module):
    def __init__(self, kind: type[nn.Module], inplace: bool, reentrant: bool) -> None:
        super().__init__()
        self.body, self.tail = nn.Sequential(nn.Conv2d(3, 3, 3), kind(inplace)), nn.Conv2d(3, 2, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.tail(checkpoint(self.body, x, use_reentrant=self.reentrant))
        return result


PATTERNS: dict[str, tuple[Callable[[type[nn.Module], bool], nn.Module], list[str]]] = {
    "Sequential": (lambda kind, inplace: nn.Sequential(nn.Conv2d(3, 3, 3), kind(inplace), nn.Conv2d(3, 3, 1)), ["0"]),
    "one line": (lambda kind, inplace: Net(kind, inplace, HARMLESS["nothing"], "before"), ["conv"]),
    "a block": (Block, ["conv1"]),
    "blocks": (lambda kind, inplace: nn.Sequential(Block(kind, inplace), Block(kind, inplace)), ["0.conv1", "1.conv1"]),
    "names": (Names, ["conv"]),
    "checkpoint": (lambda kind, inplace: Checkpointed(kind, inplace, False), ["body.0"]),
    "reentrant checkpoint": (lambda kind, inplace: Checkpointed(kind, inplace, True), ["body.0"]),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_usual_patterns_are_fused(pattern: str, kind: type[nn.Module], inplace: bool, training: bool) -> None:
    make, expected = PATTERNS[pattern]
    x = X.clone().requires_grad_() if training else X
    found, why_not = fusable(make(kind, inplace).train(training), x)
    if not training:  # the normalisations in front of further activations are folded
        expected = [each for name in expected for each in dict.fromkeys((name, name.replace("conv1", "conv2")))]
    assert found == expected, [why_not(name) for name in expected]


def test_a_function_is_no_module_that_could_become_an_identity() -> None:
    """As before: no change of the model avoids the call."""
    found, why_not = fusable(Functional().eval())
    assert (found, why_not("conv")) == ([], "its output is read by aten::relu")


# ---- models that fail


class Failing(nn.Module):
    """Raises with gradients, or for tensor subclasses."""

    def __init__(self, fails: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.conv, self.act, self.fails = nn.Conv2d(3, 3, 3), nn.ReLU(), fails

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.fails(y):
            raise ValueError("not this one")
        result: Tensor = self.act(y) + 1
        return result


def test_a_model_that_cannot_run_with_gradients_is_proved_without() -> None:
    assert fusable(Failing(lambda y: torch.is_grad_enabled()).eval())[0] == ["conv"]


def test_a_model_that_fails_under_observation_is_not_fused() -> None:
    found, why_not = fusable(Failing(lambda y: type(y) is not Tensor).eval())
    assert found == []
    assert why_not("conv") == "the model fails while its tensors are watched: ValueError: not this one"


def test_a_model_that_fails_fails() -> None:
    with pytest.raises(ValueError, match="not this one"):
        fusable(Failing(lambda y: True).eval())
