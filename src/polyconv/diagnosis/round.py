"""A round of examinations: all, or those that take a minute; from the beginning, or from where one was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..cuda import CudaError, driver
from ..cuda.compile import compiler_id
from ..files import replace_whole
from ..version import __version__
from .examination import Examination, Result, Verdict
from .examiner import Examiner
from .findings import findings
from .record import Record
from .screen import screen
from .subject import Subject

Step = Callable[[str], None]


def about(subject: Subject, quick: bool) -> dict[str, str]:
    """What is examined, with what: the answers of anything else are no answers of this."""
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
    """A record to go on with, and what is to be said of the file that was there."""
    record = Record(path, about(subject, quick))
    said = ""
    if not again:
        refused = record.go_on()
        if refused:
            said = f"{refused}; it is made anew"
        elif record.results:
            said = f"going on with {path}, which has {len(record.results)} answers; --again begins anew"
    record.findings = [finding.as_json() for finding in findings()]
    driver.release_devices()  # from here on others examine them
    return record, said


def go_round(
    record: Record, subject: Subject, examiner: Examiner, examinations: Mapping[str, Examination], step: Step
) -> None:
    """Examine what is missing in a record; ``step`` is told of each answer."""
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
    """The report for people, beside the record."""
    path = record.path.with_suffix(".txt")
    replace_whole(path, (screen(record, str(path)) + "\n").encode())
    return path
