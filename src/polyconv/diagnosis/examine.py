"""The process in which a GPU is examined: ``python -m polyconv.diagnosis.examine "every kernel"``.

Each answer is one line of JSON on standard output, where nothing else goes. It is announced before it is sought, so
that who listens knows what a process was at when it died. The first part that goes wrong is the last: what went wrong
may have left anything behind, and what comes after it deserves a new process.
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

from .examination import Answer, Examination, Part, Verdict, wrong
from .subject import Subject

MOST_TRACE = 3000
"""Characters of a traceback that are kept: its end."""


def main(
    arguments: Sequence[str] | None = None,
    subject: Callable[[int, bool], Subject] = Subject,
    examinations: Mapping[str, Examination] | None = None,
) -> int:
    """Examine as the command line says.

    Args:
        arguments: the command line; that of the process if absent.
        subject: gives what is examined: a GPU by its index, quickly or not.
        examinations: by name; those of this package if absent.
    """
    if examinations is None:
        from .examinations import EXAMINATIONS

        examinations = EXAMINATIONS
    parser = argparse.ArgumentParser(prog="python -m polyconv.diagnosis.examine")
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
    except Exception as error:  # whatever the driver, the compiler or a kernel did: the report says it
        return wrong(f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-MOST_TRACE:])


def _take_standard_output() -> TextIO:
    """Standard output for the answers alone: what any library prints there goes to standard error from now on."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
