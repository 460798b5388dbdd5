"""Successive elimination of candidates by interleaved trials.

Shared by online autotuning (:mod:`polyconv.autotune.online`), ``polyconv tune`` and :func:`polyconv.optimize`.
Candidates take turns, so that other load affects all of them alike. The best time of each counts, since interference
only adds to it, and slow candidates are dropped early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

MIN_SPEEDUP = 1.02
"""Required speed-up over ATen, which is called without dispatch overhead. The gain must also exceed that overhead, as
estimated by the backend."""

BEHIND = (2.5, 1.5, 1.2)
"""Ratio to the fastest time above which a candidate is dropped: after one trial, after two, and from the third on."""


class Elimination:
    """Trials of all candidates, and the candidates still in the session: each gets ``rounds`` trials unless it is
    dropped, and those in ``stays`` are never dropped for their time."""

    def __init__(self, names: Sequence[str], rounds: int, stays: Collection[str] = ()) -> None:
        self.rounds = rounds
        self.running = tuple(names)
        """Candidates that have not been dropped."""
        self._stays = stays
        self._samples: dict[str, list[float]] = {name: [] for name in names}

    @property
    def samples(self) -> Mapping[str, Sequence[float]]:
        """Trials of all candidates, dropped ones included [s]."""
        return self._samples

    @property
    def best(self) -> dict[str, float]:
        """Best time of each candidate with a trial [s]."""
        return {name: min(times) for name, times in self._samples.items() if times}

    def spread(self, *names: str) -> float:
        """Largest ratio of second-best to best time among ``names``: an estimate of the noise."""
        pairs = (sorted(self._samples[name])[:2] for name in names)
        return max((pair[-1] / pair[0] for pair in pairs if pair and pair[0] > 0.0), default=1.0)

    @property
    def decided(self) -> bool:
        """True if no further trial is needed."""
        return len(self.running) == 1 or all(len(self._samples[name]) >= self.rounds for name in self.running)

    @property
    def next(self) -> str:
        """Remaining candidate with the fewest trials."""
        return min(self.running, key=lambda name: len(self._samples[name]))

    def note(self, name: str, seconds: float) -> None:
        """Record a trial and drop slow candidates."""
        self._samples[name].append(seconds)
        leader = min(self.best.values())
        self.running = tuple(other for other in self.running if not self._is_hopeless(other, leader))

    def drop(self, name: str) -> None:
        """Drop a candidate, unless it is the last one."""
        self.running = tuple(other for other in self.running if other != name) or self.running

    def winner(self, usual: str, aten: str | None, overhead: float) -> str | None:
        """The fastest candidate; in a tie, ATen or the cost model's choice ``usual``. None without a trial.

        ``overhead``: dispatch overhead of polyconv's kernels that the trials do not include [s].
        """
        best = self.best
        fastest = min((name for name in self.running if name in best), key=best.__getitem__, default=None)
        if fastest is None:
            return None
        if aten is not None and best.get(aten, inf) <= max(MIN_SPEEDUP * best[fastest], best[fastest] + overhead):
            return aten
        within_noise = best.get(usual, inf) <= self.spread(fastest, usual) * best[fastest]
        return usual if within_noise else fastest

    def _is_hopeless(self, name: str, leader: float) -> bool:
        times = self._samples[name]
        if not times or name in self._stays:
            return False
        return min(times) > BEHIND[min(len(times), len(BEHIND)) - 1] * leader
