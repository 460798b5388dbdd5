"""What the planner weighs: one kernel of one engine, with what it would cost and how far it would stray."""

from __future__ import annotations

from collections.abc import Callable


class CpuCandidate:
    """One way to run a problem. Without a ``refusal`` it has cycles and an error.

    The error may be given as a function: it is asked once, and only of a candidate that is about to be chosen or
    explained. Of twenty candidates most are ruled out by their cost.
    """

    __slots__ = ("_error", "algorithm", "cycles", "direct", "engine", "form", "refusal", "weight_cycles")

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
    ) -> None:
        self.engine = engine
        """The ``NAME`` of the module that offers it."""
        self.form = form
        """How it computes: by which algorithm."""
        self.algorithm = algorithm
        """The number that the engine's operators know it by."""
        self.direct = direct
        """Sums the products of the definition: allowed whatever the tolerance."""
        self.cycles = cycles
        """Estimated, of one core: only the ratio between candidates means anything."""
        self.weight_cycles = weight_cycles
        """Of these, those that transform the weights: saved where they are kept."""
        self._error = error
        self.refusal = refusal
        """Why it cannot run this problem."""

    @property
    def error(self) -> float:
        """The largest error of any output to be expected, relative to the output's scale."""
        if not isinstance(self._error, float):
            self._error = float(self._error())
        return self._error

    @property
    def name(self) -> str:
        return f"{self.form}, {self.engine}"

    def _key(self) -> tuple[object, ...]:
        return self.engine, self.form, self.algorithm, self.direct, self.cycles, self.weight_cycles, self.refusal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuCandidate) and self._key() == other._key() and self.error == other.error

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, cycles={self.cycles}, refusal={self.refusal!r})"
