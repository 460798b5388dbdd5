"""Results of one network and case: an entry per contender, and how polyconv compares with the best of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from statistics import median
from typing import Any

from ..cases import Case, Layout, Mode
from .contenders import EAGER, OURS


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured of a contender, or why nothing was. Times are seconds per call."""

    contender: str
    refused: str = ""
    setup_s: float = nan
    """From the module to the first result: export, compilation, autotuning [s]."""
    error: float | None = None
    """Largest deviation from float64, relative to the rms of the result."""
    peak_bytes: int = 0
    """Peak resident size of the contender's process."""
    samples_s: Sequence[float] = field(default_factory=list)
    cpu_s: Sequence[float] = field(default_factory=list)
    """Processor time of all threads, of the same samples."""

    @property
    def best(self) -> float:
        return min(self.samples_s)

    @property
    def noise(self) -> float | None:
        """A/A ratio: best time in the even rounds over that in the odd ones. None after a single round."""
        return min(self.samples_s[::2]) / min(self.samples_s[1::2]) if len(self.samples_s) > 1 else None

    def as_json(self) -> dict[str, Any]:
        if self.refused:
            return {"contender": self.contender, "refused": self.refused}
        derived = {"best_s": self.best, "median_s": median(self.samples_s), "best_cpu_s": min(self.cpu_s)}
        return {**asdict(self), **derived, "noise": self.noise}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Entry:
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Contenders of a network. The layout of the case is that of the input; contenders choose theirs."""

    name: str
    what: str
    """Image size."""
    case: Case
    entries: Sequence[Entry]

    @property
    def key(self) -> str:
        return key(self.name, self.case)

    @property
    def eager(self) -> Entry | None:
        return self._best([EAGER])

    @property
    def ours(self) -> Entry | None:
        """The fastest of polyconv's."""
        return self._best(OURS)

    @property
    def peer(self) -> Entry | None:
        """The fastest of the others, eager PyTorch included."""
        return self._best([entry.contender for entry in self.entries if entry.contender not in OURS])

    @property
    def of_the_best_peer(self) -> float | None:
        """The best peer's time over the best of polyconv's. None if either could not run."""
        return None if self.peer is None or self.ours is None else self.peer.best / self.ours.best

    @property
    def by_rounds(self) -> float | None:
        """Median over the rounds of the best peer's time over that of polyconv's best: both of a round meet the same
        load of the machine."""
        if self.peer is None or self.ours is None:
            return None
        return median(peer / ours for peer, ours in zip(self.peer.samples_s, self.ours.samples_s, strict=False))

    @property
    def headline(self) -> float:
        return nan if self.of_the_best_peer is None else self.of_the_best_peer

    def _best(self, names: Sequence[str]) -> Entry | None:
        ran = [entry for entry in self.entries if entry.contender in names and not entry.refused]
        return min(ran, key=lambda entry: entry.best, default=None)

    def as_json(self) -> dict[str, Any]:
        case = {"mode": self.case.mode, "batch": self.case.batch, "threads": self.case.threads}
        best = {name: getattr(self, name) and getattr(self, name).contender for name in ("peer", "ours")}
        entries = [entry.as_json() for entry in self.entries]
        ratios = {"of_the_best_peer": self.of_the_best_peer, "by_rounds": self.by_rounds}
        return {"name": self.name, "what": self.what, **case, **best, **ratios, "entries": entries}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> PeerRow:
        case = Case(Mode(found["mode"]), Layout.NCHW, found["batch"], found["threads"])
        return cls(found["name"], found["what"], case, [Entry.from_json(entry) for entry in found["entries"]])


def key(network: str, case: Case) -> str:
    """Identifier of a row, without the layout, which is the contenders' choice."""
    return f"{network}, {case.mode}, batch {case.batch}, {case.threads} threads"
