"""What the planner weighs: one kernel of one engine, with what it would cost and how far it would stray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuCandidate:
    """One way to run a problem. Without a ``refusal`` it has cycles and an error."""

    engine: str
    """The ``NAME`` of the module that offers it."""
    form: str
    """How it computes: by which algorithm."""
    algorithm: int = 0
    """The number that the engine's operators know it by."""
    direct: bool = False
    """Sums the products of the definition: allowed whatever the tolerance."""
    cycles: float = 0.0
    """Estimated, of one core: only the ratio between candidates means anything."""
    weight_cycles: float = 0.0
    """Of these, those that transform the weights: saved where they are kept."""
    error: float = 0.0
    """The largest error of any output to be expected, relative to the output's scale."""
    refusal: str | None = None
    """Why it cannot run this problem."""

    @property
    def name(self) -> str:
        return f"{self.form}, {self.engine}"
