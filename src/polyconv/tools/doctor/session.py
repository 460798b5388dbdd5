"""A session: a selection of checks, from the start or from where an earlier session was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...util.atomic_files import replace_whole
from ...version import __version__
from .check import Check, Result, Verdict
from .device_under_test import DeviceUnderTest
from .journal import Journal
from .runner import Runner
from .summary import summary


def about(subject: DeviceUnderTest, selection: str) -> dict[str, str]:
    """Device, versions and selection of checks. Results are resumed only if all of these match."""
    versions = {"polyconv": __version__, "PyTorch": str(torch.__version__)}
    return {**subject.about(), **versions, "checks": selection}


def resume(journal: Journal) -> str:
    """Load what an earlier session left in the journal's file. Returns a message if there is such a file."""
    if refused := journal.resume():
        return f"{refused}; it is replaced"
    done = len(journal.results)
    return f"resuming {journal.path}, which has {done} results; --again starts over" if done else ""


def run_checks(
    journal: Journal,
    subject: DeviceUnderTest,
    runner: Runner,
    checks: Mapping[str, Check],
    step: Callable[[str], None] = lambda what: None,
) -> None:
    """Run the checks that a journal lacks; ``step`` is called after each result."""
    for name, check in checks.items():
        if name in journal.complete:
            continue
        if why_not := check.why_not(subject):
            journal.results.append(Result(name, "", Verdict.NOT_HERE, why_not))
        else:
            for result in runner.run(check, journal.of(name)):
                journal.add(result)
                step(f"{name}{f': {result.part}' if result.part else ''}")
        journal.close(name)


def write_summary(journal: Journal) -> Path:
    """Write the summary beside the journal."""
    path = journal.path.with_suffix(".txt")
    replace_whole(path, (summary(journal, str(path)) + "\n").encode())
    return path
