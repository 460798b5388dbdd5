"""What a benchmark of passes says: one row per workload, pass and number of threads, and means over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

from ..measure.limits import Batch
from ..measure.operands import CHANNELS_LAST, NCHW, OURS, OURS_CHANNELS_LAST
from ..measure.timing import Timing
from ..problem import Pass


@dataclass(frozen=True, slots=True)
class Row:
    """One contest. Ratios are of the best times: how many times faster than PyTorch ours is."""

    workload: str
    shape: str
    """The convolution in a few words."""
    kind: Pass
    threads: int
    batch: Batch
    timings: Mapping[str, Timing]
    """By contestant."""
    max_error: float
    """Measured in NCHW, relative to the scale of the output map."""
    compared: float
    """Share of the result that it was measured on."""
    predicted_error: float
    """The plan's, in the same unit."""
    plan: str
    of_sgemm: float
    """Multiply-adds of the direct method per second of ours in NCHW, relative to those of ``torch.mm``."""

    @property
    def key(self) -> str:
        return key(self.workload, self.kind, self.threads)

    @property
    def ratio_nchw(self) -> float:
        """Both in NCHW."""
        return self.timings[NCHW].best / self.timings[OURS].best

    @property
    def ratio_channels_last(self) -> float:
        """Both in channels_last."""
        return self.timings[CHANNELS_LAST].best / self.timings[OURS_CHANNELS_LAST].best

    @property
    def ratio_best(self) -> float:
        """Each in the layout in which it is faster."""
        theirs = min(self.timings[NCHW].best, self.timings[CHANNELS_LAST].best)
        return theirs / min(self.timings[OURS].best, self.timings[OURS_CHANNELS_LAST].best)

    @property
    def headline(self) -> float:
        return self.ratio_best

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
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
    """Which contest it is."""
    return f"{workload}, {kind}, {threads} threads"


def timings_as_json(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """In milliseconds, as people read them."""
    return {
        name: {"best_ms": timing.best * 1e3, "median_ms": timing.median * 1e3, "cpu_ms": timing.cpu * 1e3}
        for name, timing in timings.items()
    }


def timings_from_json(found: Mapping[str, Mapping[str, float]]) -> dict[str, Timing]:
    return {
        name: Timing(one["best_ms"] / 1e3, one["median_ms"] / 1e3, one["cpu_ms"] / 1e3) for name, one in found.items()
    }


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric means over the rows of one pass at one number of threads."""

    kind: Pass
    threads: int
    rows: int
    ratio_nchw: float
    ratio_channels_last: float
    ratio_best: float


def means(rows: Iterable[Row]) -> list[Mean]:
    """A mean for each pass and number of threads, in the order in which they first appear."""
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
    """The mean for ratios: twice as fast and half as fast cancel."""
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))
