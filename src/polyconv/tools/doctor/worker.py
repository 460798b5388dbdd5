"""Worker process that runs one check: ``python -m polyconv.tools.doctor.worker "every kernel"``.

Each message is one line of JSON on standard output, which carries nothing else. A part is announced before it runs, so
that the parent knows what a dead process was doing. The process ends after the first failed part, because the failure
may have left it in an undefined state.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from .check import Answer, Examination, Part, Verdict, wrong
from .device_under_test import Subject

MOST_TRACE = 3000
"""Characters kept from the end of a traceback."""


def main(
    arguments: Sequence[str] | None = None,
    subject: Callable[[int, bool], Subject] = Subject,
    examinations: Mapping[str, Examination] | None = None,
) -> int:
    """Entry point of the worker.

    Args:
        arguments: command line; ``sys.argv`` if None.
        subject: factory of the device under test, from its index and the quick flag.
        examinations: checks by name; those of this package if None.
    """
    if examinations is None:
        from .checks import EXAMINATIONS

        examinations = EXAMINATIONS
    parser = argparse.ArgumentParser(prog="python -m polyconv.tools.doctor.worker")
    parser.add_argument("examination", choices=list(examinations))
    parser.add_argument("--gpu", type=int, default=0, help="its index")
    parser.add_argument("--quick", action="store_true", help="fewer parts")
    parser.add_argument("--after", help="begin after this part")
    parser.add_argument("--only", help="this part, and no other")
    args = parser.parse_args(arguments)
    answers = _take_standard_output()
    parts = examinations[args.examination].parts(subject(args.gpu, args.quick))
    chosen = _chosen(list(parts), args.after, args.only)
    _say(answers, {"parts": len(chosen)})
    for name in chosen:
        _say(answers, {"begins": name})
        began = time.monotonic()
        answer = _answer(parts[name])
        seconds = time.monotonic() - began
        _say(answers, {**asdict(answer), "part": name, "verdict": str(answer.verdict), "seconds": seconds})
        if answer.verdict is Verdict.PROBLEM and name != chosen[-1]:
            return 0
    _say(answers, {"complete": True})
    return 0


def _chosen(names: list[str], after: str | None, only: str | None) -> list[str]:
    if only is not None:
        return [name for name in names if name == only]
    return names[names.index(after) + 1 :] if after in names else names


def _answer(part: Part) -> Answer:
    try:
        return part()
    except Exception as error:  # raised by the driver, the compiler or a kernel: goes into the report
        return wrong(f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-MOST_TRACE:])


def _take_standard_output() -> TextIO:
    """Reserve standard output for messages: file descriptor 1 is redirected to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
