"""A session: all checks or the quick ones, from the start or from where an earlier session was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...cuda import CudaError, driver
from ...cuda.jit.compile import compiler_id
from ...util.atomic_files import replace_whole
from ...version import __version__
from .check import Examination, Result, Verdict
from .device_under_test import Subject
from .environment import findings
from .journal import Record
from .runner import Examiner
from .summary import screen

Step = Callable[[str], None]


def about(subject: Subject, quick: bool) -> dict[str, str]:
    """Device, versions and kind of session. Results are resumed only if all of these match."""
    number = int(driver.call("cuDriverGetVersion"))
    try:
        compiler = compiler_id()
    except CudaError:
        compiler = "none"
    device = subject.description
    return {
        "GPU": f"{device.name} ({device.arch}, {device.sms} multiprocessors)",
        "polyconv": __version__,
        "PyTorch": str(torch.__version__),
        "NVRTC": compiler,
        "driver": f"for CUDA {number // 1000}.{number % 1000 // 10}",
        "round": "quick" if quick else "full",
    }


def begin(path: Path, subject: Subject, *, quick: bool, again: bool = False) -> tuple[Record, str]:
    """Open a record, resuming from the file unless ``again``. Also returns a message about an existing file."""
    record = Record(path, about(subject, quick))
    said = ""
    if not again:
        refused = record.go_on()
        if refused:
            said = f"{refused}; it is made anew"
        elif record.results:
            said = f"going on with {path}, which has {len(record.results)} answers; --again begins anew"
    record.findings = [finding.as_json() for finding in findings()]
    driver.release_devices()  # the workers use them from here on
    return record, said


def go_round(
    record: Record, subject: Subject, examiner: Examiner, examinations: Mapping[str, Examination], step: Step
) -> None:
    """Run the checks that a record lacks; ``step`` is called after each answer."""
    for name, examination in examinations.items():
        if name in record.complete or (examiner.quick and not examination.quick):
            continue
        if why_not := examination.why_not(subject):
            record.note(Result(name, "", Verdict.NOT_HERE, why_not))
        else:
            for result in examiner.examine(examination, record.of(name)):
                record.note(result)
                step(f"{name}{f': {result.part}' if result.part else ''}")
        record.close(name)


def write_screen(record: Record) -> Path:
    path = record.path.with_suffix(".txt")
    replace_whole(path, (screen(record, str(path)) + "\n").encode())
    return path
