"""Lazy reader of shipped profiles, as the first call of a process waits for it.

A file has thousands of problems, of which a few dozen are near a given layer. So the geometry of each line is parsed
pass by pass, and its times only if it is near. Iterating over the records parses the whole file as :mod:`.file` does;
tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log
from typing import overload

from ...problem import Pass
from .file import ProfileError, Section, halves, parse
from .profile import Errors, Formula, Place, Record, Room, formula_of, place_at

_RECORDS = '"records": ['


def parse_lines(read: Callable[[], bytes], name: str) -> Section:
    """The single section of a file, with its records unread; ``name`` is for messages."""
    head, _, body = read().decode().partition(_RECORDS)
    try:
        (section,) = json.loads(f"{head}{_RECORDS}]}}]}}")["sections"]
        formulas = [tuple(formula_of(kernel, bool(kept)) for kernel, kept in listed) for listed in section["kernels"]]
        records = Lines(body, formulas, partial(_all_of, read, name))
        return Section(section["model"], section["environment"], records, section["measured"])
    except (ValueError, LookupError, TypeError) as error:
        raise ProfileError(f"{name} is not a profile of one section ({error})") from None


def _all_of(read: Callable[[], bytes], name: str) -> Sequence[Record]:
    (section,) = parse(read(), name)
    return section.records


class Lines(Sequence[Record]):
    def __init__(
        self, body: str, formulas: Sequence[tuple[Formula, ...]], read_all: Callable[[], Sequence[Record]]
    ) -> None:
        self._lines = [line for line in body.splitlines() if line.startswith("  [")]
        self._formulas = formulas
        """By a line's index of its list of kernels."""
        self._places: dict[str, tuple[Place, tuple[bool, bool]]] = {}
        """By the numbers of a line, which all passes and layouts of a layer share."""
        self._read_all = read_all
        self._records: Sequence[Record] | None = None

    def of_pass(self, kind: Pass) -> Iterator[tuple[Room, Place, Callable[[], Errors]]]:
        """Room and place of each problem of a pass, with a callable for :meth:`.profile.Record.errors`."""
        before, after = f'  ["{kind}","', len(f'  ["{kind}","nchw",[')
        places = self._places
        for line in self._lines:
            if line.startswith(before):
                convolution, _, times = line[after:].partition("],")
                numbers = convolution[:-2]  # without the bias
                found = places.get(numbers)
                if found is None:
                    found = places[numbers] = _place(numbers)
                yield (kind, found[1][line[after - 6] == "h"]), found[0], _Errors(times, self._formulas)

    @property
    def _all(self) -> Sequence[Record]:
        if self._records is None:
            self._records = self._read_all()
        return self._records

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._all[index]


def _place(numbers: str) -> tuple[Place, tuple[bool, bool]]:
    """Place of a problem and, for nchw and nhwc, :func:`.profile.is_channels_last`; from the numbers of a line
    (:data:`.file.NUMBERS`) without the bias."""
    n, c, h, w, k, r, s, down, across, top, bottom, left, right, d_h, d_w, groups = map(int, numbers.split(","))
    out = (h + top + bottom - d_h * (r - 1) - 1) // down + 1, (w + left + right - d_w * (s - 1) - 1) // across + 1
    place = place_at((c // groups, k // groups), groups, n, out, (r, s), down * across, d_h * d_w)
    if c > 1:
        return place, (h * w == 1, True)
    return place, (k > 1 and out[0] * out[1] == 1, k > 1)


class _Errors:
    """Errors of one line, parsed at the first call."""

    __slots__ = ("_formulas", "_found", "_times")

    def __init__(self, times: str, formulas: Sequence[tuple[Formula, ...]]) -> None:
        self._times = times
        self._formulas = formulas
        self._found: Errors | None = None

    def __call__(self) -> Errors:
        if self._found is None:
            theirs, estimate, index, *values = json.loads(f"[{self._times.rstrip(',')}")
            theirs *= 1e-6
            self._found = tuple(
                (formula, log(time * 1e-6 / theirs) - log(cycles / estimate))
                for formula, time, cycles in zip(self._formulas[index], *halves(values), strict=True)
            )
        return self._found
