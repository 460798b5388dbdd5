"""What a benchmark says: one row per workload, pass and number of threads, and means over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from typing import Any

from ..measure.limits import Batch
from ..measure.operands import CHANNELS_LAST, NCHW, OURS
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
    timings: dict[str, Timing]
    """By contestant."""
    max_error: float
    """Measured, relative to the scale of the output map."""
    compared: float
    """Share of the result that it was measured on."""
    predicted_error: float
    """The plan's, in the same unit."""
    plan: str
    of_sgemm: float
    """Multiply-adds of the direct method per second of ours, relative to those of ``torch.mm``."""

    @property
    def ratio_nchw(self) -> float:
        return self.timings[NCHW].best / self.timings[OURS].best

    @property
    def ratio_best(self) -> float:
        """Against the layout in which PyTorch is faster."""
        return min(self.timings[NCHW].best, self.timings[CHANNELS_LAST].best) / self.timings[OURS].best

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        notes = [f"batch {self.batch}: {self.batch.reason}"] if self.batch.reason else []
        if self.compared < 1:
            notes.append(f"error measured on {self.compared:.2%} of the result")
        return notes

    def as_json(self) -> dict[str, Any]:
        times = {f"{name}_ms": timing.best * 1e3 for name, timing in self.timings.items()}
        medians = {f"{name}_median_ms": timing.median * 1e3 for name, timing in self.timings.items()}
        return {
            "workload": self.workload,
            "shape": self.shape,
            "pass": str(self.kind),
            "threads": self.threads,
            "batch": self.batch.images,
            "whole_batch": self.batch.whole,
            **times,
            **medians,
            "ratio_nchw": self.ratio_nchw,
            "ratio_best": self.ratio_best,
            "max_error": self.max_error,
            "predicted_error": self.predicted_error,
            "plan": self.plan,
            "of_sgemm": self.of_sgemm,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric means over the rows of one pass at one number of threads."""

    kind: Pass
    threads: int
    rows: int
    ratio_nchw: float
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
            ratio_best=geometric_mean(row.ratio_best for row in group),
        )
        for (kind, threads), group in groups.items()
    ]


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean for ratios: twice as fast and half as fast cancel."""
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))
