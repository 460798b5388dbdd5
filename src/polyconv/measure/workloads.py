"""The named convolutions of ``workloads.json``, and the problems that they ask for.

A workload goes by its id (``kb80``, ``resnet50-2b``) or, for the three that lead every table, by a short name (``W1``).
A few words name several at once: see :data:`GROUPS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..problem import Pair, Pass, Problem


class WorkloadError(ValueError):
    """No workload of that name, or one that is not a 2-D convolution. The message lists the names."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One ``torch.nn.Conv2d`` and the shape of its input."""

    name: str
    """What it was asked for as: the id or the short name."""
    id: str
    suite: str
    """``kernelbench``, ``models``, or ``layers`` for one of :mod:`~polyconv.measure.layers`."""
    input: tuple[int, int, int, int]
    out_channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    bias: bool
    note: str = ""
    uses: int = 1
    """Of a layer: how many convolutions of all networks are this one."""

    def problem(self, kind: Pass | str) -> Problem:
        """One pass of it, on dense NCHW tensors. The input gradient knows no bias."""
        kind = Pass(kind)
        high, wide = self.padding
        return Problem.make(
            kind,
            self.input,
            (self.out_channels, self.input[1] // self.groups, *self.kernel),
            stride=self.stride,
            padding=(high, high, wide, wide),
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias and kind is not Pass.DGRAD,
        )


QUICK = ("resnet50-3b", "context-d8", "inception-1x7", "mobilenet-dw3")

GROUPS: dict[str, tuple[str, Callable[[Workload], bool]]] = {
    "quick": ("four small layers, one of a kind each", lambda w: w.id in QUICK),
    "headline": ("the three that lead every table", lambda w: w.name.startswith("W")),
    "all12": ("the twelve 2-D convolutions of KernelBench", lambda w: w.suite == "kernelbench"),
    "models": ("layers of networks people run", lambda w: w.suite == "models"),
    "all": ("every 2-D convolution", lambda w: True),
}
"""Word -> what it stands for, and which workloads these are."""


def find(names: str) -> list[Workload]:
    """The workloads that a comma-separated list of ids, short names and groups asks for, each once, in that order."""
    known = catalogue()
    found: dict[str, Workload] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        for workload in filter(GROUPS[name][1], known.values()) if name in GROUPS else [_one(name, known)]:
            found.setdefault(workload.id, workload)
    if not found:
        raise WorkloadError(f"no workload was named; there are {_names(known)}")
    return list(found.values())


def _one(name: str, known: Mapping[str, Workload]) -> Workload:
    for workload in known.values():
        if name.lower() == workload.name.lower():
            return workload
        if name.lower() == workload.id.lower():
            return replace(workload, name=workload.id)
    for suite, entries in _entries().items():
        for entry in entries:
            if entry["id"].lower() == name.lower():
                raise WorkloadError(f"{entry['id']} ({suite}) is a {entry['module']}; only Conv2d can be planned")
    close = get_close_matches(name, [*(w.name for w in known.values()), *known, *GROUPS], n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}? There" if close else "there"
    raise WorkloadError(f"no workload is called {name!r}; {meant} are {_names(known)}")


def _names(known: Mapping[str, Workload]) -> str:
    singles = [w.name if w.name == w.id else f"{w.name} ({w.id})" for w in known.values()]
    return f"{', '.join(singles)}, and the groups {', '.join(GROUPS)}"


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Workload]:
    """Every 2-D convolution by id: the headline workloads first, then in the order of the file."""
    every = [_read(entry, suite) for suite, entry in _conv2d()]
    every.sort(key=lambda w: w.name if w.name != w.id else "~")
    return {workload.id: workload for workload in every}


def entries() -> dict[str, dict[str, Any]]:
    """The same by id, in the file's order and as the file has them: ``nn.Conv2d``'s arguments as they are written."""
    return {entry["id"]: entry for _, entry in _conv2d()}


def _conv2d() -> list[tuple[str, dict[str, Any]]]:
    return [(suite, entry) for suite, listed in _entries().items() for entry in listed if entry["module"] == "Conv2d"]


@lru_cache(maxsize=1)
def _entries() -> dict[str, list[dict[str, Any]]]:
    text = files(__package__).joinpath("workloads.json").read_text(encoding="utf-8")
    return {suite: entries for suite, entries in json.loads(text).items() if suite != "about"}


def _read(entry: Mapping[str, Any], suite: str) -> Workload:
    note = entry.get("note", "")
    headline = "headline" in entry.get("tags", ())
    n, c, h, w = entry["input"]
    return Workload(
        name=note.partition(";")[0].strip() if headline else entry["id"],
        id=entry["id"],
        suite=suite,
        input=(n, c, h, w),
        out_channels=entry["out_channels"],
        kernel=_pair(entry["kernel_size"]),
        stride=_pair(entry["stride"]),
        padding=_pair(entry["padding"]),
        dilation=_pair(entry["dilation"]),
        groups=entry["groups"],
        bias=entry["bias"],
        note=note,
    )


def _pair(value: int | list[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
