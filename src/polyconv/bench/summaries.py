"""What many duels say together: means with their spread, the noise beside them, and where time is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .cases import Layout, Mode
from .duels import Duel
from .rows import geometric_mean

LEAST = 0.97
"""A ratio below it is a loss."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some ratios: the geometric mean, and the ends."""

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Spread:
        found = list(ratios)
        return cls(geometric_mean(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the duels in one mode and layout at one number of threads."""

    mode: Mode
    layout: Layout
    threads: int
    duels: int
    wall: Spread
    cpu: Spread
    noise_wall: Spread
    """PyTorch against itself in the same rounds."""
    noise_cpu: Spread
    slower: int
    """Duels whose ratio, of processor time, is below :data:`LEAST`."""


def summaries(duels: Iterable[Duel]) -> list[Summary]:
    """One for each mode, layout and number of threads, in the order in which they first appear."""
    grouped = _grouped(duels, lambda duel: (duel.case.mode, duel.case.layout, duel.case.threads))
    return [
        Summary(
            mode=mode,
            layout=layout,
            threads=threads,
            duels=len(group),
            wall=Spread.of(duel.ratio for duel in group),
            cpu=Spread.of(duel.ratio_cpu for duel in group),
            noise_wall=Spread.of(duel.noise for duel in group),
            noise_cpu=Spread.of(duel.noise_cpu for duel in group),
            slower=sum(duel.ratio_cpu < LEAST for duel in group),
        )
        for (mode, layout, threads), group in grouped.items()
    ]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a class of layers costs more than PyTorch's in one mode and layout."""

    kind: str
    mode: Mode
    layout: Layout
    duels: int
    cpu: Spread
    lost: float
    """Processor seconds, counting every convolution of the networks that the layers stand for, gains left out."""
    plan: str
    """What ran most often where time was lost."""
    worst: Duel


def losses(duels: Iterable[Duel]) -> list[Loss]:
    """The classes of layers in which time is lost, the most first."""
    found = []
    for (kind, mode, layout), group in _grouped(duels, lambda d: (d.kind, d.case.mode, d.case.layout)).items():
        losing = [duel for duel in group if duel.lost > 0]
        if losing:
            plans: Counter[str] = Counter()
            for duel in losing:
                plans["; ".join(duel.plans)] += 1
            found.append(
                Loss(
                    kind=kind,
                    mode=mode,
                    layout=layout,
                    duels=len(group),
                    cpu=Spread.of(duel.ratio_cpu for duel in group),
                    lost=sum(duel.lost for duel in losing),
                    plan=plans.most_common(1)[0][0],
                    worst=min(group, key=lambda duel: duel.ratio_cpu),
                )
            )
    return sorted(found, key=lambda loss: -loss.lost)


def _grouped(duels: Iterable[Duel], by: Callable[[Duel], K]) -> dict[K, Sequence[Duel]]:
    groups: dict[K, list[Duel]] = {}
    for duel in duels:
        groups.setdefault(by(duel), []).append(duel)
    return dict(groups)
