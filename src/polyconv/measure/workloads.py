"""The named convolutions of ``data/workloads.json`` and ``data/issues.json``, and their problems.

A workload has an id (``kb80``, ``resnet50-2b``) and, if it is one of the three headline ones, a short name (``W1``).
:data:`GROUPS` names several at once. Those of ``data/issues.json`` are named by the issue that reports them
(:func:`issues`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..problem import Extents, Pass, Problem, Shape

TRANSPOSED = {Pass.FPROP: Pass.DGRAD, Pass.DGRAD: Pass.FPROP, Pass.WGRAD: Pass.WGRAD}
"""Pass of a transposed convolution -> pass of the convolution whose input gradient it is."""


class WorkloadError(ValueError):
    """Unknown workload. The message lists the names."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A convolution of ``torch.nn`` and the shape of its input."""

    name: str
    """The requested name: id or short name."""
    id: str
    suite: str
    """``kernelbench``, ``models``, ``issues``, or ``layers`` for one of :mod:`~polyconv.measure.layers`."""
    input: Shape
    out_channels: int
    kernel: Extents
    stride: Extents
    padding: Extents
    dilation: Extents
    groups: int
    bias: bool
    transposed: bool = False
    output_padding: Extents = ()
    """Only for a transposed convolution."""
    note: str = ""
    uses: int = 1
    """Of a layer: number of convolutions in all networks that equal it."""
    dtype: str = "float32"
    weight_scale: float = 1.0
    """Factor on ordinary weights; 1e-40 makes them denormal."""
    trained: bool = False
    """Of an issue: such a layer is trained, too."""
    lengths: int = 1
    """Of an issue: number of lengths of the last axis, from that of ``input`` on, each called once."""

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def module(self) -> str:
        return f"Conv{'Transpose' * self.transposed}{self.rank}d"

    def problem(self, kind: Pass | str) -> Problem:
        """The problem of a pass on dense NCHW tensors. The input gradient has no bias. A transposed convolution maps to
        another pass (:data:`TRANSPOSED`) of the convolution whose input gradient it is, also without bias, which is
        added afterwards."""
        kind = Pass(kind)
        batch, channels, *size = self.input
        outputs, sides = self.out_channels, tuple(side for side in self.padding for _ in range(2))
        if self.transposed:
            from ..arguments import normalise_transposed  # lazy, because it imports torch

            numbers = self.stride, self.padding, self.output_padding, self.groups, self.dilation
            geometry, extents = normalise_transposed(size, self.kernel, *numbers, rank=self.rank)
            kind, channels, outputs, size, sides = TRANSPOSED[kind], outputs, channels, [*extents], geometry.padding
        return Problem.make(
            kind,
            (batch, channels, *size),
            (outputs, channels // self.groups, *self.kernel),
            stride=self.stride,
            padding=sides,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias and not self.transposed and kind is not Pass.DGRAD,
            dtype=self.dtype,
        )


QUICK = ("resnet50-3b", "context-d8", "inception-1x7", "mobilenet-dw3")

GROUPS: dict[str, tuple[str, Callable[[Workload], bool]]] = {
    "quick": ("four small layers, one of a kind each", lambda w: w.id in QUICK),
    "headline": ("the three that lead every table", lambda w: w.name.startswith("W")),
    "all12": ("the twelve Conv2d of KernelBench", lambda w: w.suite == "kernelbench" and w.module == "Conv2d"),
    "kernelbench": (
        "those, and its transposed and 1-D ones",
        lambda w: w.suite == "kernelbench" and w.rank < 3,
    ),
    "volumes": ("KernelBench's eleven over three axes", lambda w: w.rank == 3),
    "models": ("layers of networks people run", lambda w: w.suite == "models"),
    "all": ("every Conv2d", lambda w: w.module == "Conv2d"),
}
"""Group -> description and predicate."""


def find(names: str) -> list[Workload]:
    """The workloads of a comma-separated list of ids, short names and groups, each once, in that order."""
    known = catalogue()
    found: dict[str, Workload] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        for one in filter(GROUPS[name][1], known.values()) if name in GROUPS else [_one(name, known)]:
            found.setdefault(one.id, one)
    if not found:
        raise WorkloadError(f"no workload was named; there are {_names(known)}")
    return list(found.values())


def _one(name: str, known: Mapping[str, Workload]) -> Workload:
    for one in known.values():
        if name.lower() == one.name.lower():
            return one
        if name.lower() == one.id.lower():
            return replace(one, name=one.id)
    close = get_close_matches(name, [*(w.name for w in known.values()), *known, *GROUPS], n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}? There" if close else "there"
    raise WorkloadError(f"no workload is called {name!r}; {meant} are {_names(known)}")


def _names(known: Mapping[str, Workload]) -> str:
    singles = [w.name if w.name == w.id else f"{w.name} ({w.id})" for w in known.values()]
    return f"{', '.join(singles)}, and the groups {', '.join(GROUPS)}"


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Workload]:
    """Every workload by id: headline ones first, then in file order."""
    every = [workload(entry, suite) for suite, listed in _entries().items() for entry in listed]
    every.sort(key=lambda w: w.name if w.name != w.id else "~")
    return {one.id: one for one in every}


def entries() -> dict[str, dict[str, Any]]:
    """The raw entries by id, in file order, with a module's arguments as written."""
    return {entry["id"]: entry for listed in _entries().values() for entry in listed}


@lru_cache(maxsize=1)
def issues() -> tuple[Workload, ...]:
    """The layers of ``issues.json``, which issues of public projects report as slow, wrong or growing on the CPU."""
    return tuple(workload(entry, "issues") for listed in _entries("issues.json").values() for entry in listed)


@lru_cache(maxsize=2)
def _entries(file: str = "workloads.json") -> dict[str, list[dict[str, Any]]]:
    text = (files(__package__) / "data" / file).read_text(encoding="utf-8")
    return {suite: entries for suite, entries in json.loads(text).items() if suite != "about"}


def workload(entry: Mapping[str, Any], suite: str) -> Workload:
    """The workload of an entry: the arguments of a module, of which a single number is for every axis."""
    note = entry.get("note", "")
    headline = "headline" in entry.get("tags", ())
    rank, transposed = len(entry["input"]) - 2, "output_padding" in entry
    return Workload(
        name=note.partition(";")[0].strip() if headline else entry["id"],
        id=entry["id"],
        suite=suite,
        input=tuple(entry["input"]),
        out_channels=entry["out_channels"],
        kernel=_per_axis(entry["kernel_size"], rank),
        stride=_per_axis(entry.get("stride", 1), rank),
        padding=_per_axis(entry.get("padding", 0), rank),
        dilation=_per_axis(entry.get("dilation", 1), rank),
        groups=entry.get("groups", 1),
        bias=entry.get("bias", False),
        transposed=transposed,
        output_padding=_per_axis(entry["output_padding"], rank) if transposed else (),
        note=note,
        uses=entry.get("uses", 1),
        **{name: entry[name] for name in ("dtype", "weight_scale", "trained", "lengths") if name in entry},
    )


def _per_axis(value: int | Sequence[int], rank: int) -> Extents:
    return (value,) * rank if isinstance(value, int) else tuple(value)
