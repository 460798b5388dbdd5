"""A check of a GPU (:class:`Examination`), its parts, and the answers that they return.

A check runs in its own process (:mod:`~.worker`), supervised by another (:mod:`~.runner`): a faulty kernel can kill its
process and must not lose the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ...problem import Word

if TYPE_CHECKING:
    from .device_under_test import Subject


class Verdict(Word):
    OK = "ok"
    WARNING = "warning"
    """Works, but not as well as it should."""
    PROBLEM = "problem"
    """Does not work."""
    NOT_HERE = "not here"
    """Cannot be checked on this machine; :attr:`Answer.words` gives the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one part of a check."""

    verdict: Verdict
    words: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable details for the report."""


def fine(words: str = "", **figures: Any) -> Answer:
    return Answer(Verdict.OK, words, figures)


def doubtful(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.WARNING, words, figures)


def wrong(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.PROBLEM, words, figures)


def not_here(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.NOT_HERE, words, figures)


Part = Callable[[], Answer]
"""Returns its answer. An exception counts as a problem, described by its message."""


class Needs(Enum):
    """Requirements besides the driver."""

    NOTHING = "nothing"
    TENSORS = "tensors"
    """Tensors whose memory a kernel can read."""
    TORCH = "torch"
    """A CUDA build of PyTorch: streams, graphs, events, kernels."""


@dataclass(frozen=True, slots=True)
class Examination:
    """A check. Its parts run in order; after one that fails, a new process continues with the next."""

    name: str
    proves: str
    parts: Callable[[Subject], Mapping[str, Part]]
    """Parts by name. Listing them is cheap: each allocates and compiles only when it is called."""
    needs: Needs = Needs.TORCH
    gpus: int = 1
    quick: bool = False
    """Included in ``--quick``."""
    limit: float = 180.0
    """Time limit of one part [s]."""
    blocking: bool = True
    """Whether launches are synchronous, so that an error is attributed to its launch. False for timing checks."""

    def why_not(self, subject: Subject) -> str:
        """Reason why the check cannot run on a subject; empty if it can."""
        if self.gpus > subject.gpus:
            return f"needs {self.gpus} GPUs, and there is one"
        if self.needs is Needs.TENSORS:
            return subject.why_no_tensors
        return subject.why_no_torch if self.needs is Needs.TORCH else ""


@dataclass(frozen=True, slots=True)
class Result:
    """An answer in the report, with its check, part and duration."""

    examination: str
    part: str
    verdict: Verdict
    words: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    sanitizer: str = ""
    """First lines of compute-sanitizer's output, if it was run."""

    def __str__(self) -> str:
        return f"{self.examination}{f', {self.part}' if self.part else ''}: {self.words}"

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "verdict": str(self.verdict), "seconds": round(self.seconds, 3)}
        return {name: value for name, value in found.items() if value not in ("", {})}
