"""Results of benchmarks: rows per workload, pass and number of threads; their spread, and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import geometric_mean
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
        derived = {name: getattr(self, name) for name in ("ratio_nchw", "ratio_channels_last", "ratio_best", "notes")}
        found = asdict(self)
        kind = found.pop("kind")
        return {**found, "pass": kind, "timings": timings_as_json(self.timings), **derived}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Row:
        read: dict[str, Any] = {"kind": Pass(found["pass"]), "batch": Batch(**found["batch"])}
        read["timings"] = timings_from_json(found["timings"])
        return cls(**{field.name: found[field.name] for field in fields(cls) if field.name not in read}, **read)


def key(workload: str, kind: Pass, threads: int) -> str:
    return f"{workload}, {kind}, {threads} threads"


LEAST = 0.97
"""Ratios below this count as losses."""

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


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
class Loss:
    """Comparisons of a class of layers in one mode and layout, some of which lose CPU time to PyTorch."""

    kind: str
    mode: Mode
    layout: Layout
    duels: Sequence[Duel]

    @property
    def lost(self) -> float:
        """CPU time over all convolutions that the layers represent, without gains [s]."""
        return sum(max(0.0, duel.lost) for duel in self.duels)

    @property
    def plan(self) -> str:
        """Most frequent plans among the losing layers."""
        return Counter("; ".join(duel.plans) for duel in self.duels if duel.lost > 0).most_common(1)[0][0]

    @property
    def worst(self) -> Duel:
        return min(self.duels, key=lambda duel: duel.ratio_cpu)


def losses(duels: Iterable[Duel]) -> list[Loss]:
    """Layer classes that lose time, largest loss first."""
    groups = grouped(duels, lambda duel: (duel.kind, duel.case.mode, duel.case.layout))
    found = [Loss(*what, group) for what, group in groups.items()]
    return sorted((loss for loss in found if loss.lost), key=lambda loss: -loss.lost)


def grouped(rows: Iterable[R], by: Callable[[R], K]) -> dict[K, list[R]]:
    """Rows by a key, in order of first appearance."""
    groups: dict[K, list[R]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return groups
