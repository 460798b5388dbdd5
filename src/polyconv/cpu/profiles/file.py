"""Profile files: JSON with one section per environment and one line per measured problem.

::

    {"format": "polyconv profile", "schema": 2, "sections": [
      {"model": "GenuineIntel 6 85", "measured": "2026-11-16T07:00:00Z",
       "environment": {"device": "cpu", "name": "Intel(R) Xeon(R)", "instruction_set": "avx512", "threads": 1, ...},
       "kernels": [
        [["F(4,3) x F(4,3), channel lanes",0],["F(4,3) x F(4,3), channel lanes",1]], ...],
       "records": [
        ["fprop","nhwc",[8,64,56,56,64,3,3,1,1,1,1,1,1,1,1,1,0],2081,5100000,0,1310,1204,4200000,3900000], ...]}]}

A list of kernels names candidates, and whether the weight was cached; many records share one. A record holds the pass,
the layout, the numbers of :data:`NUMBERS`, ATen's time [us] and estimated cycles, the index of its list of kernels,
their times, and their cycles. The estimates are those of the cost model at that time, so a file of another version of
polyconv is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...problem import Pass, Problem
from ...tuning_key import Environment
from ...util import checked_json
from ...util.atomic_files import Folder, read_file
from ...util.checked_json import DocumentError, Value
from .profile import Kernel, Record, Spent, is_channels_last

KIND = "profile"
SCHEMA = 2
LARGEST = 2**24
"""Largest file size [bytes]."""
NUMBERS = (
    "batch, in_channels, height, width, out_channels, kernel (2), stride (2), padding (4), dilation (2), groups, bias"
)
"""Meaning of the numbers that describe the convolution."""
_COUNT = 17


class ProfileError(ValueError):
    """Not a profile, or one of an unsupported version. The message names the file."""


@dataclass(frozen=True, slots=True)
class Section:
    """Measurements of one environment."""

    model: str
    """Processor model: see :func:`polyconv.util.cpuinfo.processor_model`."""
    environment: Mapping[str, Any]
    records: Sequence[Record]
    measured: str = ""
    """Time of the measurement, in UTC."""

    @classmethod
    def of(cls, model: str, environment: Environment, records: Iterable[Record]) -> Section:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(model, environment.as_json(), tuple(records), now)

    @property
    def instruction_set(self) -> str:
        return str(self.environment.get("instruction_set", ""))

    @property
    def threads(self) -> int:
        return int(self.environment.get("threads", 1))

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.environment.get('name')} ({self.model}), {self.instruction_set}, {threads}"


def parse(data: bytes, name: str) -> tuple[Section, ...]:
    """Parse the contents of a file; ``name`` is for messages."""
    try:
        found = checked_json.parse_versioned(data, name, KIND, SCHEMA)
        return tuple(map(_section, found.member("sections").items()))
    except DocumentError as error:
        raise ProfileError(str(error)) from None


def _section(section: Value) -> Section:
    environment = section.member("environment").object()
    for name, kind in (("instruction_set", str), ("threads", int)):
        if type(environment.get(name)) is not kind:
            raise section.wrong(f"its environment has no {name}")
    kernels = [_kernels(listed) for listed in section.member("kernels").items()]
    return Section(
        section.member("model").text(),
        environment,
        tuple(_record(record, kernels) for record in section.member("records").items()),
        section.member("measured").text(),
    )


def _kernels(listed: Value) -> tuple[Kernel, ...]:
    try:
        return tuple(Kernel(str(name), bool(kept)) for name, kept in listed.found)
    except (TypeError, ValueError) as error:
        raise listed.wrong(f"not a list of kernels ({error})") from None


def _record(record: Value, lists: Sequence[tuple[Kernel, ...]]) -> Record:
    try:
        kind, layout, numbers, torch_time, torch_cycles, index, *values = record.found
        if type(index) is not int or not 0 <= index < len(lists) or len(values) != 2 * len(lists[index]):
            raise ValueError("it does not fit its list of kernels")
        if len(numbers) != _COUNT or any(type(number) is not int or not 0 <= number < 2**31 for number in numbers):
            raise ValueError(f"expected {_COUNT} whole numbers")
        found = Record(
            _problem(Pass(kind), layout, numbers),
            _spent(torch_time, torch_cycles),
            tuple(zip(lists[index], map(_spent, *halves(values)), strict=True)),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise record.wrong(f"not a record ({error})") from None
    return found


def halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Times and cycles of a record's kernels."""
    count = len(values) // 2
    return values[:count], values[count:]


def _spent(microseconds: float, cycles: float) -> Spent:
    if not (microseconds > 0 and cycles > 0):
        raise ValueError("a time is not positive")
    return Spent(microseconds * 1e-6, float(cycles))


def _problem(kind: Pass, layout: str, numbers: Sequence[int]) -> Problem:
    n, c, height, width, k, kernel_h, kernel_w, *rest = numbers
    stride, padding, dilation, groups, bias = rest[:2], rest[2:6], rest[6:8], rest[8], rest[9]
    problem = Problem.make(
        kind,
        (n, c, height, width),
        (k, c // groups, kernel_h, kernel_w),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
        bias=bool(bias),
    )
    return problem if layout == "nchw" else problem.channels_last()


def load(path: Path) -> tuple[Section, ...]:
    """Read a file. Raises :class:`ProfileError` if it is not readable, ``FileNotFoundError`` if it does not exist."""
    try:
        return parse(read_file(path, LARGEST), str(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error}") from None


def text(sections: Iterable[Section]) -> str:
    """Serialise with one line per problem, for readable diffs, and without spaces, for small wheels."""
    listed = ",\n".join(map(_section_text, sections))
    return f'{{"format": "polyconv {KIND}", "schema": {SCHEMA}, "sections": [\n{listed}\n]}}\n'


def _section_text(section: Section) -> str:
    head = {"model": section.model, "measured": section.measured, "environment": dict(section.environment)}
    lists: dict[tuple[Kernel, ...], int] = {}
    for record in section.records:
        lists.setdefault(_kernels_of(record), len(lists))
    kernels = _lines([[kernel.name, int(kernel.kept)] for kernel in listed] for listed in lists)
    records = _lines(_as_json(record, lists[_kernels_of(record)]) for record in section.records)
    return f' {json.dumps(head)[:-1]}, "kernels": [\n{kernels}\n ], "records": [\n{records}\n ]}}'


def _lines(values: Iterable[list[Any]]) -> str:
    return ",\n".join(f"  {json.dumps(value, separators=(',', ':'))}" for value in values)


def _kernels_of(record: Record) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel, _ in record.kernels)


def _as_json(record: Record, index: int) -> list[Any]:
    p = record.problem
    shapes = [*p.x_shape, p.out_channels, *p.kernel]
    spent = [_spent_json(spent) for _, spent in record.kernels]
    return [
        str(p.kind),
        "nhwc" if is_channels_last(p) else "nchw",
        [*shapes, *p.stride, *p.padding, *p.dilation, p.groups, int(p.bias)],
        *_spent_json(record.torch),
        index,
        *(time for time, _ in spent),
        *(cycles for _, cycles in spent),
    ]


def _spent_json(spent: Spent) -> list[float]:
    """Time [us] and estimated cycles in three digits, the precision of a measurement; whole numbers without a point."""
    rounded = (float(f"{number:.3g}") for number in (spent.seconds * 1e6, spent.cycles))
    return [int(number) if number.is_integer() else number for number in rounded]


def check(path: Path) -> None:
    """Raise :class:`ProfileError` if a file exists and is not a profile that can be updated."""
    try:
        load(path)
    except FileNotFoundError:
        pass
    except ProfileError as error:
        raise ProfileError(f"{error}. {_LEFT_ALONE}") from None


def update(path: Path, section: Section) -> tuple[Section, ...]:
    """Add a section to a file, created if necessary; returns all sections. Earlier records of the same environment stay
    unless measured again."""
    path = path.resolve() if path.exists() else path.absolute()
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with Folder(path.parent) as folder, folder.locked() as alone:
        try:
            there = parse(folder.read(path.name, LARGEST), str(path))
        except FileNotFoundError:
            there = ()
        except (ProfileError, OSError) as error:
            raise ProfileError(f"{error}. {_LEFT_ALONE}") from None
        earlier = [s for s in there if (s.model, s.environment) == (section.model, section.environment)]
        measured = {record.problem for record in section.records}
        kept = (record for s in earlier for record in s.records if record.problem not in measured)
        section = replace(section, records=(*kept, *section.records))
        sections = (*(s for s in there if s not in earlier), section)
        folder.replace(path.name, text(sections).encode(), alone=alone)
    return sections


_LEFT_ALONE = "It was not overwritten: move it away, or name another file"
