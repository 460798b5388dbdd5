"""Report of :func:`polyconv.optimize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...measure.timing import Timing
from ...util.console import TableReport
from ...util.tf32 import in_words

FEW = 3
"""Names per line; more are counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One convolution of the model, on inputs of one shape."""

    layer: str
    shape: str
    calls: int
    """Calls in one run of the model."""
    plan: str
    """Polyconv's plan, whether it runs or not."""
    before: float
    """Time of one call of PyTorch's module [s], including a following normalisation and activation that could be fused
    and, in training, the backward pass."""
    after: float
    """Time of one call of the module that runs now [s]."""
    ours: float
    """Time of one call of polyconv's module [s], whether it runs now or not."""
    error: float
    """Largest deviation from float64 on the model's data, relative to the scale of its output map."""
    torch_error: float
    """PyTorch's error, in the same unit."""
    same_kernel: bool
    """The plan is a passthrough to ATen's convolution: only that was timed."""
    swapped: bool
    why: str


@dataclass(frozen=True, repr=False)
class OptimizationReport(TableReport):
    """Prints as a table; :meth:`undo` reverts the model."""

    _headers = ("layer", "convolution", "plan", "outcome", "PyTorch ms", "ours ms", "faster", "error", "PyTorch's")
    _texts = 4

    mode: str
    """``inference`` or ``training``."""
    device: str
    rows: tuple[Row, ...]
    left_alone: Mapping[str, str]
    """Convolutions that were not measured -> why."""
    not_fused: Mapping[str, str]
    """Convolutions without a fused activation -> why (:mod:`polyconv.tools.optimize.fusion_trace`)."""
    before: Timing
    """Time of the original model [s]."""
    after: Timing
    """Time of the model as it is now [s]; equal to ``before`` if nothing was swapped."""
    spread: float
    """Relative difference between two interleaved timings of the original model: the measurement noise."""
    verdict: str
    """Outcome for the whole model, in words."""
    choices: Mapping[str, str]
    """Problem key -> measured plan in force, as in a tuning file."""
    torch_computes_in: str
    """PyTorch's number format under the user's flags while it was timed: ``TF32`` on newer GPUs unless disabled."""
    too_many_threads: str
    """A sentence if PyTorch ran more threads than affinity, quota or cpuset allow, which distorts all times."""
    _undo: Callable[[], None] = field(repr=False, compare=False)

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the swapped modules."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.swapped))

    @property
    def speedup(self) -> float:
        """Time of the whole model before, divided by that after."""
        return self.before.best / self.after.best

    def undo(self) -> None:
        """Restore the model's classes and activations. A second call has no effect."""
        self._undo()

    def as_json(self) -> dict[str, Any]:
        """All fields for ``json.dumps``."""
        found = asdict(self)
        del found["_undo"]
        return {**found, "rows": list(found["rows"]), "speedup": self.speedup}

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
        if self.too_many_threads:
            notes.append(self.too_many_threads)
        spread = f"timed twice in turn, the model as it was differed by {self.spread:.1%} from itself"
        return [*notes, spread, f"the model: {before:.4g} ms before, {after:.4g} ms now: {self.verdict}"]


def _grouped(what: str, reasons: Mapping[str, str]) -> list[str]:
    """One line per reason, since networks have many layers and few reasons."""
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
