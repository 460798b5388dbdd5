"""``polyconv bench``: the time and the error of named workloads, next to PyTorch at its best."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import print_json, print_table, progress
from ..machine import processor_name
from ..measure import workloads
from ..measure.workloads import Workload
from ..version import __version__
from . import _options

if TYPE_CHECKING:
    from ..bench.rows import Row
    from ..bench.run import Options

SUITES = {"quick": "quick", "headline": "headline", "kernelbench": "all12", "models": "models"}
"""Word on the command line -> group of workloads."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""PyTorch puts large tensors on huge pages where this variable is 1 when its first tensor is made."""

HOW = f"""\
how it is measured:

  The three candidates run in turn, each round starting with another one: polyconv's operators on NCHW tensors,
  PyTorch on NCHW tensors, and PyTorch on channels_last tensors whose input, weight and gradient were converted
  beforehand. All use the same threads and huge pages ({HUGE_PAGES}=1, for which the command starts itself
  once more). The forward pass runs in inference mode; of PyTorch's backward pass only the gradient that is asked for
  is computed. Times are the best of all rounds, and so are the ratios; the medians are in the JSON.

  As in a model that serves, the weight is the same tensor in every call, so polyconv transforms it once and keeps the
  result. --fresh-weights gives it a new one each time.

  max error is the largest deviation from float64 in units of sqrt(products per output) * rms(input) * rms(weight)
  of each output map; of large layers a sample is compared. predicted is the plan's, in the same unit.

  x sgemm: multiply-adds of the direct method per second, relative to those of torch.mm on 1024x1024 matrices at the
  same number of threads. A fast algorithm does with fewer multiplications, so it may exceed 100 %.
"""

HEADERS = (
    "workload",
    "pass",
    "threads",
    "batch",
    "NCHW ms",
    "ch.last ms",
    "ours ms",
    "x NCHW",
    "x best",
    "x sgemm",
    "max error",
    "predicted",
    "plan",
)


SAMPLED = "~"
"""Marks an error that was measured on a part of the result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    _options.add_workloads_argument(what, "workloads or groups, separated by commas: W1,resnet50-3b")
    what.add_argument(
        "--suite",
        choices=list(SUITES),
        default="quick",
        help="quick: four small layers, a minute or so; the others take from minutes to hours (default: quick)",
    )
    _options.add_device_argument(parser, ["cpu"], "cpu", "where to run")
    _options.add_pass_argument(parser)
    parser.add_argument(
        "--threads",
        metavar="N",
        type=_counts,
        help="a number of threads, or several: 1,2 (default: as many as PyTorch takes)",
    )
    parser.add_argument(
        "--repeats", metavar="N", type=_options.positive, default=7, help="rounds of the three candidates (default: 7)"
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=_options.positive,
        help="images, at most (default: as many as stay below 40e9 multiply-adds per call and fit into memory)",
    )
    parser.add_argument("--fresh-weights", action="store_true", help="a new weight tensor in every call of ours")
    _options.add_json_argument(parser, "the rows, with medians and notes,")
    _options.add_output_argument(parser, "write the same JSON to a file")
    picture = parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the ratios (.png, .svg or .pdf)")
    _options.completes(picture, _options.FILES)
    _options.add_examples(
        parser,
        "polyconv bench",
        "polyconv bench W1 --batch 1 --pass fprop",
        "polyconv bench --suite models --threads 1,2 -o bench.json --plot bench.png",
        about=HOW,
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from ..bench import plot
    from ..bench.run import Options
    from ..cpu import native

    chosen = workloads.find(args.workloads if args.workloads is not None else SUITES[args.suite])
    _options.check_writable(args.output, args.plot)
    if args.plot:
        try:
            plot.require(args.plot)
        except plot.PlotError as error:
            raise _options.UsageError(str(error)) from error
    _ensure_huge_pages()
    if not native.is_available():
        print("polyconv bench: no native kernels in this installation, PyTorch's run for ours, too", file=sys.stderr)
    threads = args.threads or (torch.get_num_threads(),)
    options = Options(args.passes, threads, args.repeats, args.batch, args.fresh_weights)
    _announce(chosen, options)
    rows, complete = _measure(chosen, options)
    found = [row.as_json() for row in rows]
    if args.json:
        print_json(found)
    elif rows:
        _print(rows)
    if rows and args.output:
        args.output.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if rows and args.plot:
        plot.draw(rows, args.plot, _setting(threads))
    return 0 if complete else 130


def contests(chosen: Sequence[Workload], options: Options) -> Iterator[Row]:
    """The rows, as they are measured."""
    from ..bench.run import run as measured

    return measured(chosen, options)


def _measure(chosen: Sequence[Workload], options: Options) -> tuple[list[Row], bool]:
    """The rows, and whether all could be measured: an impatient Ctrl-C keeps those that are there."""
    rows: list[Row] = []
    with progress() as shown:
        shown.expect(len(chosen) * len(options.passes) * len(options.threads))
        try:
            for row in contests(chosen, options):
                rows.append(row)
                shown.step(f"{row.workload} {row.kind}: {row.ratio_best:.2f}x")
        except KeyboardInterrupt:
            return rows, False
    return rows, True


# ---- what is checked before a long run


def _ensure_huge_pages() -> None:
    """Start this command anew with the variable set: PyTorch reads it before any argument is."""
    if HUGE_PAGES in os.environ:
        return
    if sys.argv[1:2] == ["bench"]:  # and not a call of main() from another program
        os.execve(sys.executable, sys.orig_argv, {**os.environ, HUGE_PAGES: "1"})


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_options.positive(part.strip()) for part in text.split(",")))


# ---- what is printed


def _announce(chosen: Sequence[Workload], options: Options) -> None:
    """What will be done. How long it takes is known, and shown, once the first of it is done."""
    names = ", ".join(w.name for w in chosen[:4]) + (f" and {len(chosen) - 4} more" if chosen[4:] else "")
    passes = ", ".join(map(str, options.passes))
    threads = " and ".join(map(str, options.threads))
    print(
        f"polyconv bench: {names}; {passes}; {threads} {'thread' if threads == '1' else 'threads'}. Ctrl-C ends it and "
        "keeps what was measured",
        file=sys.stderr,
        flush=True,
    )


def _print(rows: Sequence[Row]) -> None:
    from ..bench.rows import means

    table: list[list[str]] = []
    for place, row in enumerate(rows):
        if place and row.workload != rows[place - 1].workload:
            table.append([])
        table.append(_cells(row))
    threads = tuple(dict.fromkeys(row.threads for row in rows))
    print_table(f"Time of one call, best of all rounds. {_setting(threads)}", HEADERS, table, left=2)
    averages = [
        [str(m.kind), str(m.threads), str(m.rows), f"{m.ratio_nchw:.2f}", f"{m.ratio_best:.2f}"] for m in means(rows)
    ]
    print_table("Geometric means", ("pass", "threads", "workloads", "x NCHW", "x best"), averages, left=1)
    for reason in dict.fromkeys(row.batch.reason for row in rows if row.batch.reason):
        names = dict.fromkeys(row.workload for row in rows if row.batch.reason == reason)
        print(f"batch cut, {reason}: {', '.join(names)}")
    if any(row.compared < 1 for row in rows):
        print(f"{SAMPLED} measured on a sample of the result")


def _cells(row: Row) -> list[str]:
    return [
        row.workload,
        str(row.kind),
        str(row.threads),
        str(row.batch),
        *(f"{row.timings[name].best * 1e3:.4g}" for name in ("torch_nchw", "torch_channels_last", "ours")),
        f"{row.ratio_nchw:.2f}",
        f"{row.ratio_best:.2f}",
        f"{row.of_sgemm:.0%}",
        f"{row.max_error:.1e}{SAMPLED if row.compared < 1 else ''}",
        f"{row.predicted_error:.1e}",
        row.plan,
    ]


def _setting(threads: Sequence[int]) -> str:
    """Where and how it was measured, in one line."""
    import torch

    pages = "huge pages" if os.environ.get(HUGE_PAGES) == "1" else "small pages"
    count = ", ".join(map(str, threads))
    unit = "thread" if count == "1" else "threads"
    return f"{processor_name()}, {count} {unit}, {pages}, PyTorch {torch.__version__}, polyconv {__version__}"
