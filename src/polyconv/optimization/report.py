"""What :func:`polyconv.optimize` did to a model, and what it gained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..console import TableReport
from ..measure.timing import Timing
from ..tf32 import in_words

FEW = 3
"""Names in a line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One convolution of the model, on inputs of one shape."""

    layer: str
    shape: str
    calls: int
    """In one run of the model."""
    plan: str
    """What polyconv runs, or would run."""
    before: float
    """Seconds of one call of PyTorch's module, with the activation after it where that could be fused; in training
    with the backward pass."""
    after: float
    """The same of what runs now."""
    ours: float
    """The same of polyconv's module, whether it runs now or not."""
    error: float
    """The largest deviation from float64 on the model's data, relative to the scale of its output map."""
    torch_error: float
    """PyTorch's, in the same unit."""
    same_kernel: bool
    """The plan is PyTorch's own convolution: one time, no gain and no loss."""
    swapped: bool
    why: str
    """Why it was swapped or not."""


@dataclass(frozen=True, repr=False)
class OptimizationReport(TableReport):
    """Prints as a table; :meth:`undo` takes everything back."""

    _headers = ("layer", "convolution", "plan", "outcome", "PyTorch ms", "ours ms", "faster", "error", "PyTorch's")
    _texts = 4

    mode: str
    """``inference`` or ``training``."""
    device: str
    rows: tuple[Row, ...]
    left_alone: Mapping[str, str]
    """Convolutions that were not measured -> why."""
    not_fused: Mapping[str, str]
    """Convolutions that compute no activation -> why (:mod:`polyconv.optimization.flow`)."""
    before: Timing
    """The whole model, in seconds, as it was."""
    after: Timing
    """The whole model as it is now: the same as before where nothing was gained."""
    spread: float
    """By what share the model as it was differed from itself, timed twice in turn: what a difference is worth."""
    verdict: str
    """What the whole model's time decided, in words."""
    choices: Mapping[str, str]
    """Problems whose measured plan is in force -> the plan, as in a tuning file."""
    torch_computes_in: str
    """PyTorch's format while it was timed, under the user's own flags: ``TF32`` on newer GPUs, unless it is off."""
    _undo: Callable[[], None] = field(repr=False, compare=False)

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the modules that are polyconv's now."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.swapped))

    @property
    def speedup(self) -> float:
        """How many times as fast the whole model is."""
        return self.before.best / self.after.best

    def undo(self) -> None:
        """Make the model what it was: every class, every activation. Doing so twice changes nothing more."""
        self._undo()

    def as_json(self) -> dict[str, Any]:
        """Everything but :meth:`undo`, for ``json.dumps``."""
        return {
            "mode": self.mode,
            "device": self.device,
            "rows": [asdict(row) for row in self.rows],
            "left_alone": dict(self.left_alone),
            "not_fused": dict(self.not_fused),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "speedup": self.speedup,
            "spread": self.spread,
            "verdict": self.verdict,
            "choices": dict(self.choices),
            "torch_computes_in": self.torch_computes_in,
        }

    def _title(self) -> str:
        return f"{self.mode} on {self.device}: {len(self.swapped)} of {len(self._layers())} convolutions swapped"

    def _layers(self) -> set[str]:
        return {row.layer for row in self.rows} | set(self.left_alone)

    def _lines(self) -> list[tuple[Sequence[str], str]]:
        return [(_cells(row), "" if row.swapped else "dim") for row in self.rows]

    def _notes(self) -> list[str]:
        notes = [f"left alone: {name or '(the model itself)'}: {why}" for name, why in self.left_alone.items()]
        notes += _grouped("not fused", self.not_fused)
        before, after = self.before.best * 1e3, self.after.best * 1e3
        if self.torch_computes_in != "float32":
            notes.append(in_words(self.torch_computes_in))
        spread = f"timed twice in turn, the model as it was differed by {self.spread:.1%} from itself"
        return [*notes, spread, f"the model: {before:.4g} ms before, {after:.4g} ms now: {self.verdict}"]


def _grouped(what: str, reasons: Mapping[str, str]) -> list[str]:
    """One line per reason: networks have many layers and few reasons."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name or "(the model itself)")
    return [
        f"{what}: {', '.join(found) if len(found) <= FEW else f'{len(found)} convolutions'}: {why}"
        for why, found in names.items()
    ]


def _cells(row: Row) -> list[str]:
    ratio = f"{row.before / row.ours:.2f}x" if row.ours else ""
    return [
        row.layer,
        row.shape if row.calls == 1 else f"{row.shape}, {row.calls} calls",
        row.plan,
        ("swapped: " if row.swapped else "left: ") + row.why,
        f"{row.before * 1e3:.4g}",
        "" if row.same_kernel else f"{row.ours * 1e3:.4g}",
        "same kernel" if row.same_kernel else ratio,
        f"{row.error:.1e}",
        f"{row.torch_error:.1e}",
    ]
