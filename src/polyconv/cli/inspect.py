"""``polyconv inspect``: registers, spills, occupancy and emulated cost of kernels. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from ..cuda.jit.cache import KernelCache
from ..cuda.planner import all_kernels
from ..measure import workloads
from ..tools.inspect import EmulatorError, Row, emulator, inspect_kernels, inspect_workloads
from ..tools.inspect.emulated_cost import COUNTED
from ..util.console import print_json, print_table, progress
from . import _options

NO_EMULATOR = "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator"
_HEADERS = ("workload", "pass", "kernel", "registers", "spilled B", "shared B", "blocks/SM", "bound by", "FP32", "ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_workloads_argument(
        parser, "workloads or groups of them, separated by commas (default: headline, W1,W2,W3)"
    )
    _options.add_arch_argument(parser, default="sm_70")
    _options.add_pass_argument(parser)
    parser.add_argument("--all-kernels", action="store_true", help="every kernel that a plan can name, on its own")
    _options.add_json_argument(parser, "a list of rows")
    _options.add_examples(
        parser,
        "polyconv inspect W1 --arch sm_70 --pass fprop",
        "polyconv inspect --all-kernels --arch sm_80,sm_90 --json",
        about=(
            "bound by, FP32, ms: counted for a V100 (sm_70) or an A100 (sm_80) by executing a sample of each\n"
            "launch's blocks in an emulator. They are the least time that the launch's busiest resource needs,\n"
            "and the share of it that the multiply-adds of the definition would take: above 100 %, a fast algorithm\n"
            "does fewer. Latencies are not in them: a GPU takes longer. x26: the launch runs 26 times, in slabs; its\n"
            "ms are those of all.\n\n"
            "groups of workloads:\n" + "\n".join(f"  {name:<10}{what}" for name, (what, _) in workloads.GROUPS.items())
        ),
    )


def run(args: argparse.Namespace) -> int:
    rows = _rows(args)
    if args.json:
        print_json([row.to_dict() for row in rows])
    else:
        for arch, of_arch in groupby(rows, key=lambda row: row.arch):
            _print(arch, list(of_arch))
    return 0


def _rows(args: argparse.Namespace) -> list[Row]:
    archs = args.archs
    names = args.workloads or ("" if args.all_kernels else "headline")
    asked = workloads.find(names) if names else []
    gpu = emulator() if asked and not COUNTED.keys().isdisjoint(archs) else None
    if gpu is None and asked and not COUNTED.keys().isdisjoint(archs):
        print(f"polyconv inspect: {NO_EMULATOR}", file=sys.stderr)
    cache = KernelCache()
    rows: list[Row] = []
    with progress() as shown:
        for arch in archs:
            if args.all_kernels:
                rows += inspect_kernels(all_kernels(arch), arch, cache, shown)
            if asked:
                inspected = partial(inspect_workloads, asked, args.passes, arch, cache, shown)
                try:
                    rows += inspected(gpu)
                except EmulatorError as error:
                    print(f"polyconv inspect: no counted figures: {error}", file=sys.stderr)
                    rows += inspected()
    return rows


def _print(arch: str, rows: Sequence[Row]) -> None:
    counted = any(row.bound_ms is not None for row in rows)
    title = arch
    if counted:
        gpu = COUNTED[arch]
        title = f"{arch}, counted for the {gpu.name}: {gpu.sms} SMs, {gpu.clock_mhz:g} MHz, {gpu.dram_gbs:g} GB/s"
    # Without workloads the columns of a launch are empty.
    launched = any(row.workload for row in rows)
    keep = range(len(_HEADERS)) if counted else range(7) if launched else range(2, 7)
    lines = [[line[i] for i in keep] if line else [] for line in _lines(rows)]
    print_table(title, [_HEADERS[i] for i in keep], lines, left=3 if launched else 1)
    if launched:
        print("* the launch that multiplies")


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for _, group in groupby(rows, key=lambda row: (row.workload, row.kind)):
        launches = list(group)
        for row in launches:
            times = row.times or 1
            yield [
                row.workload or "",
                row.kind or "",
                row.kernel + " *" * row.main + (f" x{times}" if times > 1 else ""),
                str(row.registers),
                str(row.spill_bytes),
                str(row.shared_bytes),
                "?" if row.blocks_per_sm is None else str(row.blocks_per_sm),
                row.binding or "",
                f"{100 * row.fp32_share:.1f} %" if row.main and row.fp32_share is not None else "",
                "" if row.bound_ms is None else f"{times * row.bound_ms:.3f}",
            ]
        total = launches[0].pass_bound_ms
        if total is not None and len(launches) > 1:
            yield [launches[0].workload or "", launches[0].kind or "", "together", *[""] * 6, f"{total:.3f}"]
        if launches[0].workload:
            yield []
