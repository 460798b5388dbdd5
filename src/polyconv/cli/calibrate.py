"""``polyconv calibrate``: measure a profile of this processor for the cost model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import exp
from pathlib import Path
from statistics import geometric_mean, pstdev
from typing import TYPE_CHECKING

from ..measure import environment
from ..util.console import print_json, print_table, progress
from . import INTERRUPTED, _options

if TYPE_CHECKING:
    from ..cpu.profiles import Record, Section

ABOUT = """\
What runs is chosen by a cost model, corrected by what was measured: by a profile of the processor. Some are shipped;
on a processor that has none, polyconv's kernels run only where their advantage is large. This measures one: layers of
real networks in both layouts and all passes, kernels of every engine in turn with PyTorch's convolution, with as many
threads as torch uses. The machine should have nothing else to do meanwhile.

Without -o the result goes to profile.json in the cache's folder, where every process finds it; with POLYCONV_PROFILE
another file is read. Problems that the file has already stay there, unless they are measured again. What was measured
with another version of polyconv or torch is not used.
"""
SECONDS = 50
HEADERS = ("pass", "layout", "problems", "ours ahead", "by (geometric mean)", "estimates scatter by")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", metavar="N", type=_options.positive, default=SECONDS, help=f"to measure (default: {SECONDS})"
    )
    parser.add_argument(
        "--most", metavar="N", type=float, default=2e8, help="multiply-adds of a layer, at most (default: 2e8)"
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        type=_options.list_of(str),
        default=(),
        help="measure layers of these kinds: depthwise,stem,transposed; family: over one axis, or transposed; "
        "pixels: dilated, asymmetric and long kernels; photographs: large images, with --most 1.4e10",
    )
    _options.add_isa_argument(parser)
    _options.add_output_argument(parser, "the profile to add to (default: profile.json in the cache's folder)")
    _options.add_json_argument(parser, "what was measured")
    _options.add_examples(
        parser,
        "polyconv calibrate",
        "polyconv calibrate --only depthwise",
        "polyconv calibrate --only family --most 5e8 --seconds 300",
        "polyconv calibrate --seconds 600 -o profile.json",
        "polyconv calibrate --isa avx2",
        about=ABOUT,
    )


def run(args: argparse.Namespace) -> int:
    _options.set_up("calibrate", environment.limits(args.isa), args.isa)
    from ..cpu import native
    from ..cpu.profiles import own_file

    if reason := native.why_absent():
        print(f"polyconv calibrate: there is nothing to measure: {reason}", file=sys.stderr)
        return 1
    _options.check_writable(args.output)
    path = args.output or own_file()
    _options.check_folder(path.parent, "name a file with -o")
    return _calibrate(path, args)


def _calibrate(path: Path, args: argparse.Namespace) -> int:
    import torch

    from ..backend import backend_for
    from ..cpu.profiles import Section, check, update
    from ..measure.calibration import cases, measured
    from ..util.cpuinfo import processor_model

    check(path)
    records: list[Record] = []
    status = 0
    with progress() as shown, torch.no_grad():
        shown.expect(round(args.seconds))
        try:
            for gone, layer in measured(args.seconds, cases(args.most, args.only)):
                records += layer
                while shown.done < min(gone, args.seconds):
                    shown.step(f"{layer[0].problem}")
        except KeyboardInterrupt:  # keep the records so far
            status = INTERRUPTED
    if not records:
        if not status:
            words = f" and {' or '.join(args.only)} in what it is called" if args.only else ""
            print(f"polyconv calibrate: no layer has at most {args.most:g} multiply-adds{words}", file=sys.stderr)
        return status or 1
    section = Section.of(processor_model(), backend_for(torch.device("cpu")).environment(), records)
    update(path, section)
    _report(section, path, as_json=args.json)
    return status


def _report(section: Section, path: Path, *, as_json: bool) -> None:
    rooms: dict[tuple[str, str], list[Record]] = {}
    for record in section.records:
        rooms.setdefault((str(record.problem.kind), _layout(record)), []).append(record)
    if as_json:
        print_json(
            {
                "profile": str(path),
                "processor": str(section),
                "rooms": [dict(zip(("pass", "layout"), room, strict=True)) | _figures(r) for room, r in rooms.items()],
            }
        )
        return
    table = []
    for room, records in rooms.items():
        found = _figures(records)
        ahead = f"{found['ahead']} ({100 * found['ahead'] / found['problems']:.0f} %)"
        table.append([*room, str(found["problems"]), ahead, f"{found['by']:.2f}", f"{found['scatter']:.2f}"])
    print_table(f"{section}", HEADERS, table, left=2)
    print(f"{path}: {len(section.records)} problems")


def _layout(record: Record) -> str:
    from ..cpu.profiles.profile import is_channels_last

    return "channels_last" if is_channels_last(record.problem) else "NCHW"


def _figures(records: Sequence[Record]) -> dict[str, float]:
    """Problems on which polyconv's best kernel beats PyTorch's, by which factor, and the estimates' scatter."""
    ratios = [r.torch.seconds / min(s.seconds for _, s in r.kernels) for r in records if r.kernels]
    errors = [error for record in records for _, error in record.errors()]
    gains = [ratio for ratio in ratios if ratio > 1.0]
    return {
        "problems": len(records),
        "ahead": len(gains),
        "by": geometric_mean(gains) if gains else 1.0,
        "scatter": exp(pstdev(errors)) if errors else 1.0,
    }
