"""What an examination of a GPU is: one idea, its parts, and the answers that they give.

An examination has a process of its own (:mod:`~.examine`), which another one listens to (:mod:`~.examiner`): a kernel
that goes wrong can take its process along, and must not take the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..problem import Word

if TYPE_CHECKING:
    from .subject import Subject


class Verdict(Word):
    OK = "ok"
    WARNING = "warning"
    """Works, but not as well as it should."""
    PROBLEM = "problem"
    """Does not work."""
    NOT_HERE = "not here"
    """Could not be examined on this machine; the words say why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one part."""

    verdict: Verdict
    words: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and texts for who reads the report; JSON can hold them."""


def fine(words: str = "", **figures: Any) -> Answer:
    return Answer(Verdict.OK, words, figures)


def doubtful(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.WARNING, words, figures)


def wrong(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.PROBLEM, words, figures)


def not_here(words: str, **figures: Any) -> Answer:
    return Answer(Verdict.NOT_HERE, words, figures)


Part = Callable[[], Answer]
"""Gives its answer, or raises: that is a problem, in the error's words."""


class Needs(Enum):
    """What there has to be besides the driver."""

    NOTHING = "nothing"
    TENSORS = "tensors"
    """Whose memory a kernel can read."""
    TORCH = "torch"
    """PyTorch's own CUDA: streams, graphs, events, kernels."""


@dataclass(frozen=True, slots=True)
class Examination:
    """One idea. It is examined in parts, in their order; where one goes wrong, a new process goes on after it."""

    name: str
    proves: str
    parts: Callable[[Subject], Mapping[str, Part]]
    """By name. What they need is made when they are called: making the list costs little."""
    needs: Needs = Needs.TORCH
    gpus: int = 1
    quick: bool = False
    """Whether it is among those that ``--quick`` has time for."""
    limit: float = 180.0
    """Seconds after which a part that has given no answer is stopped."""
    blocking: bool = True
    """Whether every launch is waited for, so that an error is that of the launch before; not where time is taken."""

    def why_not(self, subject: Subject) -> str:
        """Why a subject cannot be examined so; empty if it can."""
        if self.gpus > subject.gpus:
            return f"needs {self.gpus} GPUs, and there is one"
        if self.needs is Needs.TENSORS:
            return subject.why_no_tensors
        return subject.why_no_torch if self.needs is Needs.TORCH else ""


@dataclass(frozen=True, slots=True)
class Result:
    """An answer in the report: whose it is, and what it took."""

    examination: str
    part: str
    verdict: Verdict
    words: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    sanitizer: str = ""
    """What NVIDIA's compute-sanitizer said of it, if it was asked."""

    def __str__(self) -> str:
        return f"{self.examination}{f', {self.part}' if self.part else ''}: {self.words}"

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "verdict": str(self.verdict), "seconds": round(self.seconds, 3)}
        return {name: value for name, value in found.items() if value not in ("", {})}
