"""A module with PyTorch's convolutions against the same with polyconv's: in one layout, on the same numbers, in turn.

PyTorch's runs twice in every round. The two differ by nothing but noise, so their ratio says what a ratio is worth on
this machine at this moment. Each side has weights of its own, also PyTorch's second: two calls in a row that share them
would find them in the caches, and some three percent of their time spared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import choices, settings
from ..measure.timing import Timing, interleaved, threads
from ..ops import racing
from ..replacement import replace
from .cases import Case, Cases, Layout, Mode
from .rows import timings_as_json, timings_from_json

TORCH, AGAIN, OURS = "torch", "torch_again", "ours"
PATIENCE = 20.0
"""Seconds after which a duel ends with the rounds that it has."""
LAYOUTS = {
    (Layout.NCHW, 1): torch.contiguous_format,
    (Layout.NCHW, 2): torch.contiguous_format,
    (Layout.NCHW, 3): torch.contiguous_format,
    (Layout.CHANNELS_LAST, 2): torch.channels_last,
    (Layout.CHANNELS_LAST, 3): torch.channels_last_3d,
}
"""What PyTorch calls a layout of images with so many axes."""
MOST_MEMORY = (1.1, 256 * 2**20)
"""What ours may take at most: so many times PyTorch's peak, and so many bytes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak resident bytes of a process that runs one side alone."""

    torch: int
    ours: int

    @property
    def too_much(self) -> bool:
        times, more = MOST_MEMORY
        return self.ours > times * self.torch + more


@dataclass(frozen=True, slots=True)
class Duel:
    """What was measured. Ratios are PyTorch's time over ours, best of all rounds."""

    name: str
    what: str
    """The module in a few words: the convolution, or the size of the image."""
    kind: str
    """The class of a layer; empty for a network."""
    case: Case
    timings: Mapping[str, Timing]
    difference: float | None
    """Of the outputs: the largest, relative to the root mean square of PyTorch's. In inference only."""
    plans: Mapping[str, int]
    """What ours ran, and how often."""
    uses: int = 1
    """How many convolutions of all networks a layer stands for."""
    memory: Memory | None = None

    @property
    def key(self) -> str:
        return f"{self.name}, {self.case}"

    @property
    def ratio(self) -> float:
        return self.timings[TORCH].best / self.timings[OURS].best

    @property
    def ratio_cpu(self) -> float:
        return self.timings[TORCH].cpu / self.timings[OURS].cpu

    @property
    def noise(self) -> float:
        """PyTorch against itself."""
        return self.timings[TORCH].best / self.timings[AGAIN].best

    @property
    def noise_cpu(self) -> float:
        return self.timings[TORCH].cpu / self.timings[AGAIN].cpu

    @property
    def headline(self) -> float:
        return self.ratio

    @property
    def lost(self) -> float:
        """Processor seconds more than PyTorch's, in all convolutions that it stands for; negative where ours gains."""
        return self.uses * (self.timings[OURS].cpu - self.timings[TORCH].cpu)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "kind": self.kind,
            "mode": str(self.case.mode),
            "layout": str(self.case.layout),
            "batch": self.case.batch,
            "threads": self.case.threads,
            "timings": timings_as_json(self.timings),
            "ratio": self.ratio,
            "ratio_cpu": self.ratio_cpu,
            "noise": self.noise,
            "noise_cpu": self.noise_cpu,
            "difference": self.difference,
            "plans": dict(self.plans),
            "uses": self.uses,
            "torch_bytes": self.memory and self.memory.torch,
            "ours_bytes": self.memory and self.memory.ours,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Duel:
        has_memory = found["torch_bytes"] is not None
        return cls(
            name=found["name"],
            what=found["what"],
            kind=found["kind"],
            case=Case(Mode(found["mode"]), Layout(found["layout"]), found["batch"], found["threads"]),
            timings=timings_from_json(found["timings"]),
            difference=found["difference"],
            plans=found["plans"],
            uses=found["uses"],
            memory=Memory(found["torch_bytes"], found["ours_bytes"]) if has_memory else None,
        )


Prepare = Callable[[nn.Module, Tensor, Mode], Callable[[], object]]
"""Makes the call that is timed of a module and its input."""


def prepared(module: nn.Module, x: Tensor, case: Case) -> tuple[nn.Module, Tensor]:
    """The module in its mode, and both in their layout.

    A single image has no statistics to normalise by: there, batch normalisation uses those that it has, as it does when
    a network is tuned on few images.
    """
    module.train(case.mode is Mode.TRAINING)
    for part in module.modules():
        if isinstance(part, _BatchNorm) and case.batch == 1:
            part.eval()
    layout = LAYOUTS[case.layout, x.dim() - 2]
    return module.to(memory_format=layout), x.contiguous(memory_format=layout)  # type: ignore[call-overload]


def has_layout(axes: int, layout: Layout) -> bool:
    """Whether PyTorch has tensors of so many axes in this layout."""
    return (layout, axes) in LAYOUTS


def block(mode: Mode) -> AbstractContextManager[object]:
    """The state in which a module runs."""
    return torch.inference_mode() if mode is Mode.INFERENCE else torch.enable_grad()


def fight(module: nn.Module, x: Tensor, case: Case, cases: Cases, prepare: Prepare) -> dict[str, Any]:
    """The fields of a :class:`Duel` that are measured. ``prepare`` is asked once for each side."""
    module, x = prepared(module, x, case)
    second, twin = copy.deepcopy(module), copy.deepcopy(module)
    replace(twin)
    with threads(case.threads), block(case.mode):
        theirs, again, ours = (prepare(side, x, case.mode) for side in (module, second, twin))
        if cases.benchmark:
            race(ours)
        with choices.watched(alone=True) as seen:
            result = ours()
        difference = _difference(result, theirs()) if case.mode is Mode.INFERENCE else None
        del result
        timings = interleaved({TORCH: theirs, OURS: ours, AGAIN: again}, cases.repeats, patience=PATIENCE)
    return {"timings": timings, "difference": difference, "plans": _plans(seen)}


def race(call: Callable[[], object]) -> None:
    """Make a call until all races that it leads to are decided: then it is what it will be."""
    with settings.use(benchmark=True):
        before = -1
        while before != racing.turns():
            before = racing.turns()
            call()


def _difference(mine: object, theirs: object) -> float:
    assert isinstance(mine, Tensor)
    assert isinstance(theirs, Tensor)
    unit = theirs.double().square().mean().sqrt().clamp_min(1e-30)
    return float((mine.double() - theirs.double()).abs().max() / unit)


def _plans(seen: Iterable[choices.Decision]) -> dict[str, int]:
    plans: dict[str, int] = {}
    for decision in seen:
        name = f"{decision.problem.kind} {decision.choice}"
        plans[name] = plans.get(name, 0) + 1
    return plans
