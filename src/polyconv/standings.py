"""How a race stands: several ways to do one thing, timed in turn until it is known which is the fastest.

The one idea of measuring that the first calls of a program (:mod:`polyconv.ops.racing`) share with the contests of
``polyconv tune`` and :func:`polyconv.optimize`. Contenders take turns, so whatever else the machine does meets all of
them alike. The best time of each counts, because others only ever add to it; and who is far behind drops out early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

CONTENDERS = 3
"""How many candidates are timed where a measurement decides, from the cost model's first on."""
BEHIND = (2.5, 1.5, 1.2)
"""How many times the leader's time is hopeless: after one timed call, after two, and from the third on."""


class Standings:
    """Who is still in a race, and the times of all.

    Args:
        names: the contenders.
        rounds: timed calls of each that are enough to tell.
        stays: those who do not drop out, because their time is wanted whatever it is.
    """

    def __init__(self, names: Sequence[str], rounds: int, stays: Collection[str] = ()) -> None:
        self.rounds = rounds
        self.running = tuple(names)
        """Those that have not dropped out."""
        self._stays = stays
        self._samples: dict[str, list[float]] = {name: [] for name in names}

    @property
    def samples(self) -> Mapping[str, Sequence[float]]:
        """Seconds of the timed calls, of those that dropped out, too."""
        return self._samples

    @property
    def best(self) -> dict[str, float]:
        """The best time of everyone who has one."""
        return {name: min(times) for name, times in self._samples.items() if times}

    def spread(self, *names: str) -> float:
        """How many times its best time somebody's second best is, at most: what chance may have added."""
        pairs = (sorted(self._samples[name])[:2] for name in names)
        return max((pair[-1] / pair[0] for pair in pairs if pair and pair[0] > 0.0), default=1.0)

    @property
    def decided(self) -> bool:
        """Whether nobody is left to be timed."""
        return len(self.running) == 1 or all(len(self._samples[name]) >= self.rounds for name in self.running)

    @property
    def next(self) -> str:
        """Whose turn it is: of those that are in the race, the one that was timed least."""
        return min(self.running, key=lambda name: len(self._samples[name]))

    def note(self, name: str, seconds: float) -> None:
        """A timed call."""
        self._samples[name].append(seconds)
        leader = min(self.best.values())
        self.running = tuple(other for other in self.running if not self._is_hopeless(other, leader))

    def drop(self, name: str) -> None:
        """Take somebody out of the race, unless nobody else is left."""
        self.running = tuple(other for other in self.running if other != name) or self.running

    def _is_hopeless(self, name: str, leader: float) -> bool:
        times = self._samples[name]
        if not times or name in self._stays:
            return False
        return min(times) > BEHIND[min(len(times), len(BEHIND)) - 1] * leader
