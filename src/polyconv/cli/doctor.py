"""``polyconv doctor``: report on the installation with advice, self-test, and checks of a GPU."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..util.console import Progress, print_json, print_table, progress
from ._options import UsageError, add_examples, add_json_argument, add_output_argument, check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ..tools.doctor.check import Examination
    from ..tools.doctor.device_under_test import Subject
    from ..tools.doctor.environment import Gpu
    from ..tools.doctor.quick.correctness import Trial
    from ..tools.doctor.runner import Examiner
    from ..tools.doctor.summary import Report

REPORT = Path("polyconv-report.json")
ROUND = Path("polyconv-doctor.json")
WORKLOADS = "W1,W2,W3"
IMAGES_ON_CPU = 1
"""Batch of a workload on the CPU, so that the self-test takes about a minute."""
ABOUT = f"""\
The self-test takes about a minute, longer the first time on a GPU, whose kernels are compiled then. It runs every
family of kernels on small problems, all three passes, and compares each element with float64 on the CPU; then it times
W1, W2 and W3 next to PyTorch's own convolution in float32. It runs where there is a GPU that PyTorch can use, and
elsewhere, on the CPU, if it is asked for. Its figures go to {REPORT} (or -o FILE), which can be attached
to a bug report: it holds versions, devices, settings and figures, and no user or host name.

--full examines a GPU from all sides, each in a process of its own, so that what crashes or hangs is an answer like any
other: every kernel by name, between fences and on poisoned memory; layouts, streams, threads, CUDA graphs, training,
tensors past 2**31 elements; times next to PyTorch's and the cost model's. Interrupted, it goes on where it was when it
is started again. --quick is a choice that is meant to take a minute. Both write {ROUND} and, for people,
{ROUND.with_suffix(".txt")}: attach these to an issue.

Exit status: 0 if nothing is broken, 1 if something is. A warning or a slow kernel is not broken.
"""
MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--self-test",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="test the kernels (default: if there is a GPU)",
    )
    parser.add_argument("--timing", action=argparse.BooleanOptionalAction, default=True, help="time them, too")
    rounds = parser.add_mutually_exclusive_group()
    rounds.add_argument("--full", action="store_true", help="examine a GPU from all sides")
    rounds.add_argument("--quick", action="store_true", help="examine it within a minute")
    parser.add_argument("--again", action="store_true", help="begin anew, whatever was examined before")
    add_output_argument(parser, f"where the report goes (default: {REPORT}, if the self-test runs; {ROUND} of a round)")
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
    check_writable(args.output)
    if args.full or args.quick:
        return examine(args.output or ROUND, quick=args.quick, again=args.again, json=args.json)
    from ..tools.doctor.environment import findings, usable_gpus
    from ..tools.doctor.summary import Report

    report = Report(findings())
    if not args.json:
        _print_findings(report)
    found = usable_gpus()
    tested = bool(found) if args.self_test is None else args.self_test
    if tested:
        with progress() as shown:
            self_test(report, found[0] if found else None, shown, timing=args.timing)
        if not args.json:
            _print_self_test(report)
    path = args.output or (REPORT if tested else None)
    if path is not None:
        report.write(path)
        print(f"wrote {path}: {_contents()}", file=sys.stderr)
    if args.json:
        print_json(report.as_json())
    return 0 if report.ok else 1


def examine(path: Path, *, quick: bool, again: bool, json: bool) -> int:
    """Run the checks on the first GPU."""
    check_writable(path)
    from ..tools.doctor.environment import gpus

    found = gpus()
    if not found:
        raise UsageError("there is no GPU to examine: polyconv doctor --self-test tests the CPU's kernels")
    from ..tools.doctor.checks import EXAMINATIONS
    from ..tools.doctor.device_under_test import Subject
    from ..tools.doctor.runner import Examiner

    gpu = found[0].index
    return examine_with(path, Subject(gpu, quick), Examiner(gpu, quick), EXAMINATIONS, again=again, json=json)


def examine_with(
    path: Path,
    subject: Subject,
    examiner: Examiner,
    examinations: Mapping[str, Examination],
    *,
    again: bool = False,
    json: bool = False,
) -> int:
    """Run checks on any subject, with any runner. Returns the exit status."""
    from ..tools.doctor.session import begin, go_round, write_screen

    record, said = begin(path, subject, quick=examiner.quick, again=again)
    if said:
        print(said, file=sys.stderr)
    try:
        with progress() as shown:
            go_round(record, subject, replace(examiner, expects=shown.expect), examinations, shown.step)
    except KeyboardInterrupt:
        print(f"{path} has {len(record.results)} answers; the same command goes on from there", file=sys.stderr)
        raise
    written = write_screen(record)
    if json:
        print_json(record.as_json())
    else:
        print(written.read_text(encoding="utf-8"), end="")
    print(f"wrote {written} and {path}", file=sys.stderr)
    return 0 if record.ok else 1


def self_test(report: Report, gpu: Gpu | None, shown: Progress, *, timing: bool = True) -> None:
    """Run the self-test on a GPU, or on the CPU if None, and add its results to the report."""
    from ..measure import workloads
    from ..tools.doctor.quick import correctness, speed

    device, trials = cpu_subject() if gpu is None else gpu_subject(gpu)
    report.device = "cpu" if gpu is None else gpu.description.name
    raced = workloads.find(WORKLOADS) if timing else []
    shown.expect(len(trials) + 3 * len(raced))
    if gpu is not None:
        _compile(trials, gpu.description.arch, shown)
    report.outcomes = correctness.run(trials, device, shown.step)
    for contest in speed.contests(raced, device, images=None if gpu else IMAGES_ON_CPU):
        report.contests.append(contest)
        shown.step(f"timed {contest.workload} {contest.kind}")


def cpu_subject() -> tuple[torch.device, list[Trial]]:
    """Device and trials of the self-test on the CPU."""
    import torch

    from ..tools.doctor.quick import correctness

    return torch.device("cpu"), list(correctness.cpu_trials())


def gpu_subject(gpu: Gpu) -> tuple[torch.device, list[Trial]]:
    """Device and trials of the self-test on a GPU."""
    import torch

    from ..cuda.backend import CudaBackend
    from ..tools.doctor.quick import correctness

    trials = correctness.cuda_trials(gpu.description, lambda planner: CudaBackend(gpu.index, planner=planner))
    return torch.device("cuda", gpu.index), list(trials)


def _compile(trials: list[Trial], arch: str, shown: Progress) -> None:
    """Compile missing kernels on all cores, instead of one by one in the trials."""
    from ..cuda import CudaError
    from ..cuda.jit.cache import KernelCache
    from ..cuda.jit.compile import in_threads
    from ..cuda.planner import KernelSpec

    kernels = list(dict.fromkeys(kernel for trial in trials for kernel in trial.kernels))
    cache = KernelCache()
    shown.expect(len(kernels))

    def compile_one(kernel: KernelSpec) -> None:
        with contextlib.suppress(CudaError):  # reported by the trials that need it
            cache.get(kernel, arch)
        shown.step(f"compiled {kernel.symbol}")

    in_threads(compile_one, kernels)


# ---- output


def _print_findings(report: Report) -> None:
    width = max(len(finding.name) for finding in report.findings)
    columns = max(60, shutil.get_terminal_size((120, 24)).columns)
    for finding in report.findings:
        head = f"{MARKS[str(finding.state)]:<8}{finding.name:<{width}}  "
        body = finding.text + (f" -> {finding.advice}" if finding.advice else "")
        lines = textwrap.wrap(body, columns - len(head), break_long_words=False, break_on_hyphens=False) or [""]
        print(head + f"\n{' ' * len(head)}".join(lines))


def _print_self_test(report: Report) -> None:
    families: dict[str, list[float]] = {}
    for outcome in report.outcomes:
        families.setdefault(outcome.family, []).append(outcome.error)
    passed = {family: sum(o.ok for o in report.outcomes if o.family == family) for family in families}
    print_table(
        f"Kernels on {report.device}, against float64",
        ("kernels", "right", "of", "largest error"),
        [[name, str(passed[name]), str(len(all_)), f"{max(all_):.1e}"] for name, all_ in families.items()],
        left=1,
    )
    if report.contests:
        rows = [
            [
                contest.workload,
                contest.kind,
                f"{contest.batch} of {contest.whole_batch}",
                "" if contest.torch_ms is None else f"{contest.torch_ms:.2f}",
                "" if contest.ours_ms is None else f"{contest.ours_ms:.2f}",
                "" if contest.ratio is None else f"{contest.ratio:.2f}",
            ]
            for contest in report.contests
        ]
        formats = " and ".join(sorted({contest.torch_computes_in for contest in report.contests}))
        title = f"Time of one call on {report.device}, ours in float32, PyTorch in {formats}, best of a few"
        print_table(title, ("workload", "pass", "images", "PyTorch ms", "ours ms", "x PyTorch"), rows, left=2)
    for failure in report.failures:
        print(f"PROBLEM {failure}")


def _contents() -> str:
    from ..tools.doctor.summary import QUICK_CONTENTS

    return QUICK_CONTENTS
