"""A check of a device (:class:`Check`), its parts, and the results that they return.

A check runs in its own process (:mod:`~.worker`), supervised by another (:mod:`~.runner`): a faulty kernel can kill its
process and must not lose the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ...problem import Word

if TYPE_CHECKING:
    from .device_under_test import DeviceUnderTest


class Verdict(Word):
    OK = "ok"
    WARNING = "warning"
    """Works, but not as well as it should."""
    PROBLEM = "problem"
    """Does not work."""
    NOT_HERE = "not here"
    """Cannot be checked on this machine; :attr:`Result.words` gives the reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one part of a check."""

    check: str
    """Name of the check; like :attr:`part` and :attr:`seconds`, it is filled in by worker and runner."""
    part: str
    verdict: Verdict
    words: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable details for the report."""
    seconds: float = 0.0
    sanitizer: str = ""
    """First lines of compute-sanitizer's output, if it was run."""
    row: str = ""
    """Row of the summary below the check's, with all its parts of this name; empty for none."""

    def __str__(self) -> str:
        return f"{self.check}{f', {self.part}' if self.part else ''}: {self.words}"

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "verdict": str(self.verdict), "seconds": round(self.seconds, 3)}
        return {
            "examination": found.pop("check"),
            **{name: each for name, each in found.items() if each not in ("", {})},
        }


def passed(words: str = "", **figures: Any) -> Result:
    return Result("", "", Verdict.OK, words, figures)


def warning(words: str, **figures: Any) -> Result:
    return Result("", "", Verdict.WARNING, words, figures)


def failed(words: str, **figures: Any) -> Result:
    return Result("", "", Verdict.PROBLEM, words, figures)


def not_here(words: str) -> Result:
    return Result("", "", Verdict.NOT_HERE, words)


def judged(error: float, allowed: float, what: str = "error") -> Result:
    """Compare an error with its limit; NaN is a problem."""
    result = passed() if error <= allowed else failed(f"{what} {error:.1e}, allowed {allowed:.0e}")
    return replace(result, figures={"error": error, "allowed": allowed})


Part = Callable[[], Result]
"""Returns its result. An exception counts as a problem, described by its message."""


class Needs(Enum):
    """Requirements besides the driver."""

    NOTHING = "nothing"
    TENSORS = "tensors"
    """Tensors whose memory a kernel can read."""
    TORCH = "torch"
    """A CUDA build of PyTorch: streams, graphs, events, kernels."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check. Its parts run in order; after one that fails, a new process continues with the next."""

    name: str
    parts: Callable[[Any], Mapping[str, Part]]
    """Parts of a device's check by name. Listing them is cheap: each allocates and compiles only when it is called."""
    needs: Needs = Needs.TORCH
    gpus: int = 1
    limit: float = 180.0
    """Time limit of one part [s]."""
    blocking: bool = True
    """Whether launches are synchronous, so that an error is attributed to its launch. False for timing checks."""

    def why_not(self, subject: DeviceUnderTest) -> str:
        """Reason why the check cannot run on a device; empty if it can."""
        if self.gpus > subject.gpus:
            return f"needs {self.gpus} GPUs, and there is one"
        if self.needs is Needs.TENSORS:
            return subject.why_no_tensors
        return subject.why_no_torch if self.needs is Needs.TORCH else ""
