"""Rows of a run in a file that is written during the run, so that a later run can resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...cpu import native
from ...measure.environment import HUGE_PAGES
from ...util.atomic_files import replace_whole
from ...util.cpuinfo import processor_name
from ...version import __version__
from .runner import Failure, Result

PAUSE = 5.0
"""Minimum interval between two writes [s]."""


class RecordError(ValueError):
    """File that cannot be resumed: not a record, or from another machine, version or suite."""


def setting() -> dict[str, str]:
    """Machine, page size and versions. Figures are comparable only if all of these are equal."""
    ours = native.instruction_set() if native.is_available() else "no native kernels"
    return {
        "processor": processor_name(),
        "instruction set": f"{ours} (PyTorch: {torch.backends.cpu.get_cpu_capability()})",
        "pages": "huge pages" if os.environ.get(HUGE_PAGES) == "1" else "small pages",
        "PyTorch": torch.__version__,
        "polyconv": __version__,
    }


def in_words(setting: Mapping[str, str], threads: Sequence[int]) -> str:
    count = ", ".join(map(str, threads))
    unit = "thread" if count == "1" else "threads"
    named = {"PyTorch", "polyconv"}
    parts = [f"{name} {value}" if name in named else value for name, value in setting.items()]
    return ", ".join([*parts[:2], f"{count} {unit}", *parts[2:]])


class Record:
    """Rows and failures of a run, and the file that they are written to, if any."""

    def __init__(self, path: Path | None, suite: str, rows: Sequence[Result] = ()) -> None:
        self.path = path
        self.suite = suite
        self.rows = list(rows)
        self.failures: list[Failure] = []
        self._written = time.monotonic()

    def add(self, found: Result | Failure) -> None:
        if isinstance(found, Failure):
            self.failures.append(found)
        else:
            self.rows.append(found)
        if time.monotonic() - self._written > PAUSE:
            self.write()

    def as_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "setting": setting(),
            "rows": [row.as_json() for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
        }

    def write(self) -> None:
        if self.path is not None and (self.rows or self.failures):
            text = json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n"
            replace_whole(self.path, text.encode())
        self._written = time.monotonic()


def earlier(path: Path, suite: str) -> list[dict[str, Any]]:
    """Rows written by an earlier run; empty without a file. Raises :class:`RecordError` if it does not match."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, before = list(found["rows"]), {"suite": found["suite"], **found["setting"]}
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"cannot resume from {path}, which is no record of a run: {error}") from None
    now = {"suite": suite, **setting()}
    other = [f"{name} {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value]
    if other:
        raise RecordError(f"cannot resume from {path}, which was measured otherwise: {'; '.join(other)}")
    return rows
