"""Report of :func:`polyconv.audit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from torch import nn

from ...problem import Pass, tolerance_text
from ...util.console import TableReport
from .figures import Figures
from .passes import Limits, Remedy

NAMES = {Pass.FPROP: "forward", Pass.DGRAD: "input gradient", Pass.WGRAD: "weight gradient"}


@dataclass(frozen=True, slots=True)
class Row:
    """One pass of one convolution of the model; the worst of several calls."""

    layer: str
    """Name in the model; empty for the model itself and for a call outside of its modules."""
    kind: str
    """``forward``, ``input gradient`` or ``weight gradient``; the last includes the bias's."""
    shape: str
    calls: int
    plan: str
    """The plan's name as in :func:`polyconv.explain`; for a torch module, the plan after a replacement."""
    tolerance: float
    predicted: float
    """Predicted largest error for even data and weights, relative to the scale of the output map."""
    concentration: float
    """Predicted error for the actual weights divided by that for even ones: above 1 if their energy is in taps for
    which the algorithm rounds more; 1 for direct summation and without weights."""
    error: float
    """Largest deviation of any element from float64, relative to the scale of its output map."""
    local_error: float
    """Largest deviation of any element, relative to its neighbourhood, sqrt(sum (x w)^2) of its terms."""
    torch_error: float
    """``error`` of PyTorch's float32 convolution."""
    torch_local_error: float
    """``local_error`` of PyTorch's float32 convolution."""
    remedy: Remedy | None
    """The tolerance that would keep the limits; None if they are kept."""

    @property
    def figures(self) -> Figures:
        return Figures(self.error, self.local_error)


@dataclass(frozen=True, repr=False)
class Audit(TableReport):
    """Prints as a table, with the lines of code that set the tolerances; :meth:`apply` executes them."""

    _headers = (
        *("layer", "pass", "plan", "tolerance", "predicted", "taps", "error", "PyTorch's", "local error"),
        "PyTorch's",
    )
    _texts = 4

    mode: str
    """``inference``, ``training`` (forward only), or ``forward and backward``."""
    device: str
    limits: Limits
    rows: tuple[Row, ...]
    left_alone: Mapping[str, str]
    """Convolutions that were not audited -> why."""
    _modules: Mapping[str, nn.Module] = field(repr=False, compare=False)

    @property
    def worst(self) -> Row:
        """The row with the largest ``error``."""
        return max(self.rows, key=lambda row: row.error)

    @property
    def worst_local(self) -> Row:
        """The row with the largest ``local_error``."""
        return max(self.rows, key=lambda row: row.local_error)

    @property
    def tolerances(self) -> dict[str, float]:
        """Layers that exceed a limit -> the smallest tolerance of their remedies, where there is one."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.remedy is not None and row.remedy.tolerance is not None:
                found[row.layer] = min(found.get(row.layer, row.remedy.tolerance), row.remedy.tolerance)
        return found

    def ok(self, limit: float | None = None, local_limit: float | None = None) -> bool:
        """Whether every row keeps the limits given here or, without any, those of the audit."""
        limits = Limits(limit, local_limit)
        limits = limits if limits.named else self.limits
        if not limits.named:
            raise ValueError("ok() needs a limit: report.ok(1e-5), or polyconv.audit(model, inputs, limit=1e-5)")
        return all(limits.kept(row.figures) for row in self.rows)

    def apply(self) -> dict[str, float]:
        """Set :attr:`tolerances` on the modules; returns those that were set, by name.

        A tolerance on a torch module has no effect before :func:`polyconv.replace`.
        """
        applied = {name: value for name, value in self.tolerances.items() if name in self._modules}
        for name, value in applied.items():
            self._modules[name].tolerance = value  # type: ignore[assignment]
        return applied

    def code(self) -> str:
        """The Python statements that :meth:`apply` executes."""
        return "\n".join(
            f"model.get_submodule({name!r}).tolerance = {value!r}"
            for name, value in self.tolerances.items()
            if name in self._modules
        )

    def as_json(self) -> dict[str, Any]:
        """All fields for ``json.dumps``; infinite errors become None."""
        return {
            "mode": self.mode,
            "device": self.device,
            "limit": self.limits.error,
            "local_limit": self.limits.local_error,
            "rows": [_finite(asdict(row)) for row in self.rows],
            "left_alone": dict(self.left_alone),
            "tolerances": self.tolerances,
        }

    def _title(self) -> str:
        layers = len({row.layer for row in self.rows})
        return (
            f"{self.mode} on {self.device}: {layers} convolutions, largest error {self.worst.error:.1e} of an "
            f"output map's scale, {self.worst_local.local_error:.1e} of an element's neighbourhood"
        )

    def _lines(self) -> list[tuple[Sequence[str], str]]:
        return [(_cells(row), "" if row.remedy is None else "bold") for row in self.rows]

    def _notes(self) -> list[str]:
        notes = [f"left alone: {_label(name)}: {why}" for name, why in self.left_alone.items()]
        beyond = [row for row in self.rows if row.remedy is not None]
        notes += [f"{_label(r.layer)}, {r.kind}: {r.remedy}" for r in beyond if r.remedy and r.remedy.tolerance is None]
        if self.limits.named and not beyond:
            notes.append("every pass keeps the limit")
        code = self.code()
        return [*notes, "report.apply() does:", code] if code else notes


def _label(name: str) -> str:
    return name or "(the model itself)"


def _cells(row: Row) -> list[str]:
    wanted = ""
    if row.remedy is not None:
        wanted = " -> " + ("none" if row.remedy.tolerance is None else tolerance_text(row.remedy.tolerance))
    return [
        _label(row.layer),
        row.kind if row.calls == 1 else f"{row.kind}, {row.calls} calls",
        row.plan,
        tolerance_text(row.tolerance) + wanted,
        f"{row.predicted:.1e}",
        f"x {row.concentration:.1f}",
        f"{row.error:.1e}",
        f"{row.torch_error:.1e}",
        f"{row.local_error:.1e}",
        f"{row.torch_local_error:.1e}",
    ]


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
