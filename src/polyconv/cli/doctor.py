"""``polyconv doctor``: report on the installation with advice, and checks of its kernels."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..util.console import print_json, progress
from ._options import UsageError, add_examples, add_json_argument, add_output_argument, check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..tools.doctor.check import Check
    from ..tools.doctor.device_under_test import DeviceUnderTest
    from ..tools.doctor.journal import Journal
    from ..tools.doctor.runner import Runner

FILES = {"self-test": Path("polyconv-report.json"), **dict.fromkeys(("quick", "full"), Path("polyconv-doctor.json"))}
"""Default output file of each selection of checks."""
TIMED = ("timing", "workloads")
"""Checks that ``--no-timing`` leaves out."""
ABOUT = f"""\
The self-test takes about a minute, longer the first time on a GPU, whose kernels are compiled then. It runs every
family of kernels on small problems, all three passes, and compares each element with float64 on the CPU; then it times
W1, W2 and W3 next to PyTorch's own convolution in float32. It runs where there is a GPU that PyTorch can use, and
elsewhere, on the CPU, with --self-test. It writes {FILES["self-test"]} (or -o FILE).

--full checks a GPU thoroughly: beside the self-test, every kernel by name, between red zones and on poisoned memory;
layouts, streams, threads, CUDA graphs, training, tensors past 2**31 elements; times next to PyTorch's and the cost
model's. --quick is a selection that is meant to take a minute. After an interruption the same command resumes. Both
write {FILES["full"]}.

Each check runs in its own process, so that a crash or a hang is a result like any other. A summary is written beside
the file, with the suffix .txt. Both can be attached to an issue: they hold versions, devices, settings and results, and
no user or host name.

Exit status: 0 if nothing is broken, 1 if something is. A warning or a slow kernel is not broken.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--self-test",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="test the kernels (default: if there is a GPU)",
    )
    parser.add_argument("--timing", action=argparse.BooleanOptionalAction, default=True, help="time them, too")
    selections = parser.add_mutually_exclusive_group()
    selections.add_argument("--full", action="store_true", help="check a GPU thoroughly")
    selections.add_argument("--quick", action="store_true", help="check it within a minute")
    parser.add_argument("--again", action="store_true", help="start over instead of resuming")
    add_output_argument(parser, f"output file (default: {FILES['self-test']}; with --full or --quick {FILES['full']})")
    add_json_argument(parser, "the report")
    add_examples(
        parser,
        "polyconv doctor",
        "polyconv doctor --self-test -o report.json",
        "polyconv doctor --quick",
        "polyconv doctor --full",
        about=ABOUT,
    )


def run(args: argparse.Namespace) -> int:
    selection = "full" if args.full else "quick" if args.quick else "self-test"
    path = args.output or FILES[selection]
    check_writable(args.output)
    from ..tools.doctor import environment
    from ..tools.doctor.checks import CHECKS, SELECTIONS
    from ..tools.doctor.device_under_test import DeviceUnderTest, GpuUnderTest
    from ..tools.doctor.journal import Journal
    from ..tools.doctor.runner import Runner
    from ..tools.doctor.session import about
    from ..tools.doctor.summary import findings_text

    gpus = environment.usable_gpus() if selection == "self-test" else environment.gpus()
    if not gpus and selection != "self-test":
        raise UsageError("there is no GPU to check: polyconv doctor --self-test tests the CPU's kernels")
    subject = GpuUnderTest(f"cuda:{gpus[0].index}", not args.full) if gpus else DeviceUnderTest(quick=True)
    journal = Journal(path, about(subject, selection), environment.findings())
    if not args.json:
        print(findings_text(journal.findings, max(60, shutil.get_terminal_size((120, 24)).columns)))
    if selection != "self-test" or (bool(gpus) if args.self_test is None else args.self_test):
        check_writable(path)
        runner = Runner(subject.name, subject.quick, sanitizer=None if gpus else "")
        checks = {name: CHECKS[name] for name in SELECTIONS[selection] if args.timing or name not in TIMED}
        return run_session(journal, subject, runner, checks, again=args.again, json=args.json)
    if args.output:
        journal.write()
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print_json(journal.as_json())
    return 0 if journal.ok else 1


def run_session(
    journal: Journal,
    subject: DeviceUnderTest,
    runner: Runner,
    checks: Mapping[str, Check],
    *,
    again: bool = False,
    json: bool = False,
) -> int:
    """Run checks on any device, with any runner. Returns the exit status."""
    from ..cuda import driver
    from ..tools.doctor.journal import CONTENTS, SELF_TEST
    from ..tools.doctor.session import resume, run_checks, write_summary

    resumable = journal.about["checks"] != SELF_TEST
    if resumable and not again and (said := resume(journal)):
        print(said, file=sys.stderr)
    driver.release_devices()  # the workers use them from here on
    try:
        with progress() as shown:
            run_checks(journal, subject, replace(runner, expects=shown.expect), checks, shown.step)
    except KeyboardInterrupt:
        if resumable:
            print(f"{journal.path} has {len(journal.results)} results; the same command resumes", file=sys.stderr)
        raise
    written = write_summary(journal)
    if json:
        print_json(journal.as_json())
    else:
        print("", written.read_text(encoding="utf-8"), sep="\n", end="")
    print(f"wrote {written} and {journal.path}: {CONTENTS}", file=sys.stderr)
    return 0 if journal.ok else 1
