"""A/B comparison of a module with PyTorch's and with polyconv's convolutions: same layout and data, interleaved.

PyTorch's module runs twice in every round, and the ratio of the two (A/A) is the noise of this machine at this moment.
Each side, PyTorch's second included, has its own weights: consecutive calls that shared them would find them in the
caches and take about 3 % less time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...arguments import CHANNELS_LAST
from ...autotune import online, preferences
from ...dispatch.override import enable
from ...measure.timing import Timing, interleaved, threads, timings_as_json, timings_from_json
from ...model.replace import replace
from .cases import Case, Cases, Layout, Mode

TORCH, AGAIN, OURS = "torch", "torch_again", "ours"
PATIENCE = 20.0
"""Time after which a comparison ends with the rounds done so far [s]."""
MOST_MEMORY = (1.1, 256 * 2**20)
"""Memory limit of ours: factor on PyTorch's peak, plus bytes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak resident size of a process that runs one side alone [bytes]."""

    torch: int
    ours: int

    @property
    def too_much(self) -> bool:
        times, more = MOST_MEMORY
        return self.ours > times * self.torch + more


@dataclass(frozen=True, slots=True)
class Duel:
    """Result of a comparison. Ratios are PyTorch's best time over ours."""

    name: str
    what: str
    """Brief description: the convolution, or the image size of a network."""
    kind: str
    """Class of a layer; empty for a network."""
    case: Case
    timings: Mapping[str, Timing]
    difference: float | None
    """Largest difference of the outputs, relative to the rms of PyTorch's. Inference only."""
    plans: Mapping[str, int]
    """Pass and plan that ours ran -> number of problems."""
    uses: int = 1
    """Number of convolutions in all networks that a layer represents."""
    memory: Memory | None = None
    errors: Mapping[str, float] | None = None
    """Largest deviations of PyTorch's and our results from float64, in units of their dtype's rounding
    (:func:`~polyconv.measure.accuracy.rounding`); of a training step, of the gradients. Issues only."""

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
        """A/A ratio: PyTorch against itself."""
        return self.timings[TORCH].best / self.timings[AGAIN].best

    @property
    def noise_cpu(self) -> float:
        return self.timings[TORCH].cpu / self.timings[AGAIN].cpu

    @property
    def headline(self) -> float:
        return self.ratio

    @property
    def lost(self) -> float:
        """CPU time lost to PyTorch over all represented convolutions [s]; negative if ours is faster."""
        return self.uses * (self.timings[OURS].cpu - self.timings[TORCH].cpu)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        case, memory = found.pop("case"), found.pop("memory") or dict.fromkeys(("torch", "ours"))
        derived = {name: getattr(self, name) for name in ("ratio", "ratio_cpu", "noise", "noise_cpu")}
        memory = {f"{side}_bytes": size for side, size in memory.items()}
        return {**found, **case, "timings": timings_as_json(self.timings), **derived, **memory}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Duel:
        has_memory = found["torch_bytes"] is not None
        return cls(
            case=Case(Mode(found["mode"]), Layout(found["layout"]), found["batch"], found["threads"]),
            timings=timings_from_json(found["timings"]),
            memory=Memory(found["torch_bytes"], found["ours_bytes"]) if has_memory else None,
            errors=found.get("errors"),
            **{name: found[name] for name in ("name", "what", "kind", "difference", "plans", "uses")},
        )


Prepare = Callable[[nn.Module, Tensor, Mode], Callable[[], object]]
"""(module, input, mode) -> the call to time."""
Errors = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Results of the calls by side -> their errors."""


def prepared(module: nn.Module, x: Tensor, case: Case) -> tuple[nn.Module, Tensor]:
    """Set the module's mode, and the layout of module and input.

    At batch 1 there are no batch statistics: batch normalisation uses its running ones, as in fine-tuning on few
    images.
    """
    module.train(case.mode is Mode.TRAINING)
    for part in module.modules():
        if isinstance(part, _BatchNorm) and case.batch == 1:
            part.eval()
    layout = torch.contiguous_format if case.layout is Layout.NCHW else CHANNELS_LAST[x.dim()]
    return module.to(memory_format=layout), x.contiguous(memory_format=layout)  # type: ignore[call-overload]


def has_layout(axes: int, layout: Layout) -> bool:
    return layout is Layout.NCHW or axes + 2 in CHANNELS_LAST


def block(mode: Mode) -> AbstractContextManager[object]:
    return torch.inference_mode() if mode is Mode.INFERENCE else torch.enable_grad()


def fight(
    module: nn.Module, x: Tensor, case: Case, cases: Cases, prepare: Prepare, errors: Errors | None = None
) -> dict[str, Any]:
    """Measured fields of a :class:`Duel`. ``prepare`` is called once per side."""
    module, x = prepared(module, x, case)
    second, twin = copy.deepcopy(module), copy.deepcopy(module)
    if not cases.enable:
        replace(twin)
    with threads(case.threads), block(case.mode):
        theirs, again, ours = (prepare(side, x, case.mode) for side in (module, second, twin))
        if cases.enable:
            ours = enabled(ours)
        if cases.benchmark:
            online.autotune(ours)
        with preferences.watched(alone=True) as seen:
            result = ours()
        deviation = difference(result, theirs()) if case.mode is Mode.INFERENCE else None
        found = errors({TORCH: theirs(), OURS: result}) if errors is not None else None
        del result
        timings = interleaved({TORCH: theirs, OURS: ours, AGAIN: again}, cases.repeats, patience=PATIENCE)
    return {"timings": timings, "difference": deviation, "plans": _plans(seen), "errors": found}


def enabled(call: Callable[[], object]) -> Callable[[], object]:
    """The call with polyconv in the place of ATen's convolutions while it runs."""

    def run() -> object:
        with enable():
            return call()

    return run


def difference(mine: object, theirs: object) -> float:
    """Largest difference, relative to the rms of ``theirs``."""
    assert isinstance(mine, Tensor)
    assert isinstance(theirs, Tensor)
    unit = theirs.double().square().mean().sqrt().clamp_min(1e-30)
    return float((mine.double() - theirs.double()).abs().max() / unit)


def _plans(seen: Iterable[preferences.Decision]) -> dict[str, int]:
    plans: dict[str, int] = {}
    for decision in seen:
        name = f"{decision.problem.kind} {decision.choice}"
        plans[name] = plans.get(name, 0) + 1
    return plans
