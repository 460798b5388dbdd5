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

from .check import Check, Part, Result, Verdict, failed
from .checks import CHECKS
from .device_under_test import DeviceUnderTest, under_test

MOST_TRACE = 3000
"""Characters kept from the end of a traceback."""


def main(
    arguments: Sequence[str] | None = None,
    subject: Callable[[str, bool], DeviceUnderTest] = under_test,
    checks: Mapping[str, Check] = CHECKS,
) -> int:
    """Entry point of the worker.

    Args:
        arguments: command line; ``sys.argv`` if None.
        subject: factory of the device under test, from its name and the quick flag.
        checks: checks by name.
    """
    parser = argparse.ArgumentParser(prog="python -m polyconv.tools.doctor.worker")
    parser.add_argument("check", choices=list(checks))
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:0, ...")
    parser.add_argument("--quick", action="store_true", help="fewer parts")
    parser.add_argument("--after", help="begin after this part")
    parser.add_argument("--only", help="this part, and no other")
    args = parser.parse_args(arguments)
    messages = _take_standard_output()
    parts = checks[args.check].parts(subject(args.device, args.quick))
    chosen = _chosen(list(parts), args.after, args.only)
    _say(messages, {"parts": len(chosen)})
    for name in chosen:
        _say(messages, {"begins": name})
        began = time.monotonic()
        result = run_part(parts[name])
        _say(messages, {**asdict(result), "part": name, "seconds": time.monotonic() - began})
        if result.verdict is Verdict.PROBLEM and name != chosen[-1]:
            return 0
    _say(messages, {"complete": True})
    return 0


def _chosen(names: list[str], after: str | None, only: str | None) -> list[str]:
    if only is not None:
        return [name for name in names if name == only]
    return names[names.index(after) + 1 :] if after in names else names


def run_part(part: Part) -> Result:
    try:
        return part()
    except Exception as error:  # raised by the driver, the compiler or a kernel: goes into the report
        return failed(f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-MOST_TRACE:])


def _take_standard_output() -> TextIO:
    """Reserve standard output for messages: file descriptor 1 is redirected to standard error."""
    sys.stdout.flush()
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages


def _say(messages: TextIO, message: Mapping[str, Any]) -> None:
    messages.write(json.dumps(message) + "\n")
    messages.flush()


if __name__ == "__main__":
    sys.exit(main())
