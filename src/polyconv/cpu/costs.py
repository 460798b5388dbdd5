"""Costs of candidates on the CPU: the cost model's estimates, corrected by the profile of the processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ..problem import Pass, Problem
from .device import CpuDevice
from .engines import aten, depthwise, depthwise_volumes, signals, volumes
from .engines.in_torch import fourier, frames, patches
from .plan import CpuCandidate
from .profiles import Correction, Formula

CALL_CYCLES = 2000.0
"""Cost of any call, so that an empty problem is not free."""

OWN_CALL_CYCLES, RECORDED_CYCLES = 100e3, 250e3
"""Dispatch overhead of a native kernel compared to passthrough: in inference, and per pass where gradients are
recorded. The latter is larger because ATen computes both gradients in one call, so replacing one saves less than its
own time. Measured inside a network, whose other layers evict Python's objects from the caches; in a loop it is a
quarter."""

CHECK_CYCLES, CHECK_BYTES = 8e3, 8.0
"""Cost of checking that a cached weight is unchanged: cycles per call, and bytes hashed per cycle."""

MOST_FOR_THE_CHECK = 0.02
"""Largest share of a call's cost for that check. Above it the weight is transformed in every call."""

UNPROFILED = tuple(engine.NAME for engine in (volumes, depthwise_volumes, signals, patches, fourier, frames))
"""Engines whose estimates no profile corrects: sums of slices, whose parts are corrected, and engines whose time is
that of memory traffic, a matrix product or FFTs."""

_WITHOUT = frozenset((aten.NAME, *UNPROFILED))
"""Engines without a correction."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of candidates [cycles of one core]."""

    problem: Problem
    device: CpuDevice
    inference: bool
    call: float = OWN_CALL_CYCLES
    """Overhead of a native kernel beside its computation."""
    _check: float = field(init=False, compare=False, repr=False)
    """Cost of checking that a cached weight is unchanged."""
    _corrections: dict[Formula, Correction] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache: few formulas serve many candidates."""

    def __post_init__(self) -> None:
        problem = self.problem
        check = 0.0 if problem.frozen else CHECK_CYCLES + 4.0 * prod(problem.w_shape) / CHECK_BYTES
        object.__setattr__(self, "_check", check)

    def keeps(self, candidate: CpuCandidate) -> bool:
        """True if the candidate would use the weight cache."""
        if not self.inference or candidate.weight_cycles <= 0.0:
            return False
        if candidate.engine == frames.NAME:
            return self._check <= frames.MOST_FOR_THE_CHECK * candidate.weight_cycles
        if self.problem.kind is not Pass.FPROP:
            return False
        return self._check <= MOST_FOR_THE_CHECK * (candidate.cycles - candidate.weight_cycles)

    def counted(self, candidate: CpuCandidate) -> float:
        """The cost model's estimate."""
        return self._kernel(candidate, self.keeps(candidate)) + candidate.copy_cycles

    def _kernel(self, candidate: CpuCandidate, kept: bool) -> float:
        """The estimate without conversions, which profiles do not have."""
        return CALL_CYCLES + candidate.cycles - (candidate.weight_cycles - self._check if kept else 0.0)

    def correction(self, candidate: CpuCandidate) -> Correction | None:
        """Measured correction of an estimate. None without a profile, for ATen, the reference of all ratios, and for
        :data:`UNPROFILED` engines."""
        return self._correction(candidate, self.keeps(candidate))

    def _correction(self, candidate: CpuCandidate, kept: bool) -> Correction | None:
        if self.device.profile is None or candidate.engine in _WITHOUT or not candidate.profiled:
            return None
        formula = candidate.engine, candidate.form == "direct", kept
        if candidate.engine == depthwise.NAME:  # no profile has the fast algorithm; most of the error is that of ATen
            formula = depthwise.NAME, True, False
        found = self._corrections.get(formula)
        if found is None:
            found = self._corrections[formula] = self.device.profile.corrected(self.problem, formula)
        return found

    def cautious(self, candidate: CpuCandidate) -> float:
        """The compared cost: a native kernel must be ahead of ATen by more than the uncertainty of its estimate."""
        kept = self.keeps(candidate)
        kernel = self._kernel(candidate, kept)
        if self.device.profile is None:
            return kernel + candidate.copy_cycles
        if candidate.engine == aten.NAME:  # on copies it is called as native kernels are
            return kernel + candidate.copy_cycles + (self.call if candidate.widened else 0.0)
        correction = self._correction(candidate, kept)
        factor = 1.0 if correction is None else correction.factor
        return self.call + kernel * factor + candidate.copy_cycles
