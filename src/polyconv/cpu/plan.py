"""A candidate of the CPU planner: one kernel of one engine, with its estimated cost and predicted error."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy


class CpuCandidate:
    """One way to run a problem. Unless it has a ``refusal``, it has cycles and an error. The error may be a function,
    evaluated at most once and only if the candidate is about to be chosen or explained: cost rules out most of twenty
    candidates."""

    __slots__ = (
        *("_error", "algorithm", "copy_cycles", "cycles", "direct", "engine", "form", "profiled", "refusal"),
        "weight_cycles",
    )

    def __init__(
        self,
        engine: str,
        form: str,
        algorithm: int = 0,
        direct: bool = False,
        cycles: float = 0.0,
        weight_cycles: float = 0.0,
        error: float | Callable[[], float] = 0.0,
        refusal: str | None = None,
        profiled: bool = True,
    ) -> None:
        self.engine = engine
        """``NAME`` of the engine's module."""
        self.form = form
        """Name of the algorithm."""
        self.algorithm = algorithm
        """The algorithm's number in the engine's operators."""
        self.direct = direct
        """Direct summation: allowed at any tolerance."""
        self.cycles = cycles
        """Estimated cycles of one core, weight transform included. Only ratios between candidates are meaningful."""
        self.weight_cycles = weight_cycles
        """The part of ``cycles`` that transforms the weight; saved by the weight cache."""
        self._error = error
        self.refusal = refusal
        """Why it cannot run this problem, or None."""
        self.profiled = profiled
        """True if profiles may have measured it, and correct ``cycles``."""
        self.copy_cycles = 0.0
        """Estimated cycles, beside ``cycles``, of conversions between half precision and float32."""

    @classmethod
    def single(
        cls,
        engine: str,
        why_not: str | None,
        cycles: Callable[[], float],
        error: Callable[[], float],
        form: str = "direct",
    ) -> CpuCandidate:
        """The candidate of an engine that has one, by direct summation. Refused if ``why_not`` is given; then nothing
        is estimated."""
        if why_not is not None:
            return cls(engine, form, direct=True, refusal=why_not)
        return cls(engine, form, direct=True, cycles=cycles(), error=error)

    def on_copies(self, cycles: float) -> CpuCandidate:
        """This candidate on float32 copies of half-precision tensors, which cost ``cycles``."""
        found = copy(self)
        found.copy_cycles = cycles
        return found

    @property
    def widened(self) -> bool:
        """True if it runs in float32 on copies of half-precision tensors."""
        return self.copy_cycles > 0

    @property
    def error(self) -> float:
        """Largest expected error of any output, relative to the output's scale."""
        if not isinstance(self._error, float):
            self._error = float(self._error())
        return self._error

    @property
    def name(self) -> str:
        return f"{self.form}{' in float32' if self.widened else ''}, {self.engine}"

    def _key(self) -> tuple[object, ...]:
        costs = self.cycles, self.weight_cycles, self.copy_cycles
        return self.engine, self.form, self.algorithm, self.direct, *costs, self.refusal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuCandidate) and self._key() == other._key() and self.error == other.error

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, cycles={self.cycles}, refusal={self.refusal!r})"
