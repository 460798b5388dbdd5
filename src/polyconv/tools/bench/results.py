"""Results of benchmarks: rows per workload, pass and number of threads; means and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any, TypeVar

from ...measure.batch_limits import Batch
from ...measure.operands import CHANNELS_LAST, NCHW, OURS, OURS_CHANNELS_LAST
from ...measure.timing import Timing, timings_as_json, timings_from_json
from ...problem import Pass
from .ab_compare import Duel
from .cases import Layout, Mode


@dataclass(frozen=True, slots=True)
class Row:
    """One contest. Ratios are speed-ups over PyTorch, from the best times."""

    workload: str
    shape: str
    kind: Pass
    threads: int
    batch: Batch
    timings: Mapping[str, Timing]
    max_error: float
    """Error in NCHW, relative to the scale of the output map."""
    compared: float
    """Fraction of the result on which the error was measured."""
    predicted_error: float
    """Error predicted by the plan, in the same unit."""
    plan: str
    of_sgemm: float
    """Multiply-adds of direct convolution per second of ours in NCHW, relative to those of ``torch.mm``."""

    @property
    def key(self) -> str:
        return key(self.workload, self.kind, self.threads)

    @property
    def ratio_nchw(self) -> float:
        return self.timings[NCHW].best / self.timings[OURS].best

    @property
    def ratio_channels_last(self) -> float:
        return self.timings[CHANNELS_LAST].best / self.timings[OURS_CHANNELS_LAST].best

    @property
    def ratio_best(self) -> float:
        """Each side in its faster layout."""
        theirs = min(self.timings[NCHW].best, self.timings[CHANNELS_LAST].best)
        return theirs / min(self.timings[OURS].best, self.timings[OURS_CHANNELS_LAST].best)

    @property
    def headline(self) -> float:
        return self.ratio_best

    @property
    def notes(self) -> list[str]:
        notes = [f"batch {self.batch}: {self.batch.reason}"] if self.batch.reason else []
        if self.compared < 1:
            notes.append(f"error measured on {self.compared:.2%} of the result")
        return notes

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "shape": self.shape,
            "pass": str(self.kind),
            "threads": self.threads,
            "batch": asdict(self.batch),
            "timings": timings_as_json(self.timings),
            "ratio_nchw": self.ratio_nchw,
            "ratio_channels_last": self.ratio_channels_last,
            "ratio_best": self.ratio_best,
            "max_error": self.max_error,
            "compared": self.compared,
            "predicted_error": self.predicted_error,
            "plan": self.plan,
            "of_sgemm": self.of_sgemm,
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Row:
        return cls(
            workload=found["workload"],
            shape=found["shape"],
            kind=Pass(found["pass"]),
            threads=found["threads"],
            batch=Batch(**found["batch"]),
            timings=timings_from_json(found["timings"]),
            max_error=found["max_error"],
            compared=found["compared"],
            predicted_error=found["predicted_error"],
            plan=found["plan"],
            of_sgemm=found["of_sgemm"],
        )


def key(workload: str, kind: Pass, threads: int) -> str:
    return f"{workload}, {kind}, {threads} threads"


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric means over the rows of one pass and number of threads."""

    kind: Pass
    threads: int
    rows: int
    ratio_nchw: float
    ratio_channels_last: float
    ratio_best: float


def means(rows: Iterable[Row]) -> list[Mean]:
    """Means per pass and number of threads, in order of first appearance."""
    groups: dict[tuple[Pass, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.threads), []).append(row)
    return [
        Mean(
            kind=kind,
            threads=threads,
            rows=len(group),
            ratio_nchw=geometric_mean(row.ratio_nchw for row in group),
            ratio_channels_last=geometric_mean(row.ratio_channels_last for row in group),
            ratio_best=geometric_mean(row.ratio_best for row in group),
        )
        for (kind, threads), group in groups.items()
    ]


def geometric_mean(ratios: Iterable[float]) -> float:
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))


LEAST = 0.97
"""Ratios below this count as losses."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """Geometric mean, minimum and maximum of ratios."""

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
    """Statistics of the comparisons of one mode, layout and number of threads."""

    mode: Mode
    layout: Layout
    threads: int
    duels: int
    wall: Spread
    cpu: Spread
    noise_wall: Spread
    """A/A ratio: PyTorch against itself in the same rounds."""
    noise_cpu: Spread
    slower: int
    """Comparisons whose CPU time ratio is below :data:`LEAST`."""


def summaries(duels: Iterable[Duel]) -> list[Summary]:
    """Summaries per mode, layout and number of threads, in order of first appearance."""
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
    """CPU time that a class of layers loses to PyTorch in one mode and layout."""

    kind: str
    mode: Mode
    layout: Layout
    duels: int
    cpu: Spread
    lost: float
    """CPU time over all convolutions that the layers represent, without gains [s]."""
    plan: str
    """Most frequent plans among the losing layers."""
    worst: Duel


def losses(duels: Iterable[Duel]) -> list[Loss]:
    """Layer classes that lose time, largest loss first."""
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
