"""Rows as text tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from ...measure.operands import CHANNELS_LAST, NCHW, OURS, OURS_CHANNELS_LAST
from ...util.console import print_table
from .ab_compare import MOST_MEMORY, TORCH, Duel
from .ab_compare import OURS as OUR_MODULE
from .results import LEAST, Row, Spread, grouped, losses

SAMPLED = "~"
"""Marks an error measured on a sample of the result."""
TOO_MUCH = "!"
WORST = 20
"""Maximum rows of the tables of layer classes and of slowest layers."""

PASSES = ("workload", "pass", "threads", "batch", "torch ms", "ch.last", "ours ms", "ch.last")
PASS_RATIOS = ("x NCHW", "x ch.last", "x best", "x sgemm", "max error", "predicted", "plan")
DUEL_TIMES = ("torch ms", "ours ms", "x wall", "x cpu", "A/A wall", "A/A cpu")


def print_passes(rows: Sequence[Row], where: str) -> None:
    title, table = f"Time of one call, best of all rounds. {where}", [_pass_cells(row) for row in rows]
    print_table(title, (*PASSES, *PASS_RATIOS), table, left=2, grouped=True)
    averages = []
    for (kind, threads), group in grouped(rows, lambda row: (row.kind, row.threads)).items():
        ratios = zip(*((row.ratio_nchw, row.ratio_channels_last, row.ratio_best) for row in group), strict=True)
        averages.append([str(kind), str(threads), str(len(group)), *_two_digits(*map(geometric_mean, ratios))])
    print_table("Geometric means", ("pass", "threads", "workloads", *PASS_RATIOS[:3]), averages, left=1)
    for reason in dict.fromkeys(row.batch.reason for row in rows if row.batch.reason):
        names = dict.fromkeys(row.workload for row in rows if row.batch.reason == reason)
        print(f"batch cut, {reason}: {', '.join(names)}")
    if any(row.compared < 1 for row in rows):
        print(f"{SAMPLED} measured on a sample of the result")


def _pass_cells(row: Row) -> list[str]:
    return [
        row.workload,
        str(row.kind),
        str(row.threads),
        str(row.batch),
        *(f"{row.timings[name].best * 1e3:.4g}" for name in (NCHW, CHANNELS_LAST, OURS, OURS_CHANNELS_LAST)),
        *_two_digits(row.ratio_nchw, row.ratio_channels_last, row.ratio_best),
        f"{row.of_sgemm:.0%}",
        f"{row.max_error:.1e}{SAMPLED if row.compared < 1 else ''}",
        f"{row.predicted_error:.1e}",
        row.plan,
    ]


def print_networks(duels: Sequence[Duel], where: str) -> None:
    table = [[duel.name, *_case_cells(duel), duel.what, *_time_cells(duel), *_memory_cells(duel)] for duel in duels]
    headers = ("network", "mode", "layout", "batch", "threads", "image", *DUEL_TIMES, "torch MB", "ours MB")
    print_table(f"One call or step of training, best of all rounds. {where}", headers, table, left=3, grouped=True)
    _print_summaries(duels, "networks")
    over = [duel.key for duel in duels if duel.memory is not None and duel.memory.too_much]
    if over:
        times, more = MOST_MEMORY
        print(f"{TOO_MUCH} more than {times:g} times PyTorch's memory and {more // 2**20} MiB: {'; '.join(over)}")


def print_issues(duels: Sequence[Duel], where: str) -> None:
    table = [
        [
            duel.name,
            duel.what,
            "; ".join(duel.plans),
            *_case_cells(duel),
            *_time_cells(duel),
            *_memory_cells(duel),
            *([f"{duel.errors[side]:.3g}" for side in (TORCH, OUR_MODULE)] if duel.errors else ["", ""]),
        ]
        for duel in duels
    ]
    columns = ("issue", "layer", "plan", "mode", "layout", "batch", "threads", *DUEL_TIMES, "torch MB", "ours MB")
    title = f"One call, or forward pass and gradients, best of all rounds. {where}"
    print_table(title, (*columns, "torch error", "ours error"), table, left=5)
    _print_summaries(duels, "layers")
    print("error: largest deviation from float64, in units of the dtype's rounding at the scale of the output map")


def print_layers(duels: Sequence[Duel], where: str) -> None:
    """Print the means, the classes that lose most, and the slowest layers; the JSON has all rows."""
    print(f"One call, or forward pass and gradients, of single layers, best of all rounds. {where}")
    _print_summaries(duels, "layers")
    lost = [
        [
            loss.kind,
            str(loss.mode),
            str(loss.layout),
            loss.plan,
            loss.worst.what,
            str(len(loss.duels)),
            *_two_digits(geometric_mean(duel.ratio_cpu for duel in loss.duels), loss.worst.ratio_cpu),
            f"{loss.lost * 1e3:.1f}",
        ]
        for loss in losses(duels)[:WORST]
    ]
    headers = ("class", "mode", "layout", "plan, mostly", "slowest", "layers", "x cpu", "lowest", "lost ms")
    print_table("Where time is lost: processor time, all convolutions of the networks together", headers, lost, left=5)
    slowest = [
        [duel.name, duel.what, "; ".join(duel.plans), *_case_cells(duel), *_time_cells(duel)]
        for duel in sorted(duels, key=lambda duel: duel.ratio_cpu)[:WORST]
    ]
    columns = ("layer", "what", "plan", "mode", "layout", "batch", "threads", *DUEL_TIMES)
    print_table("The slowest layers", columns, slowest, left=5)


def _print_summaries(duels: Sequence[Duel], things: str) -> None:
    table: list[list[str]] = []
    groups = grouped(duels, lambda duel: (duel.case.mode, duel.case.layout, duel.case.threads))
    for case, group in groups.items():
        ours, itself = ((duel.ratio, duel.ratio_cpu) for duel in group), ((d.noise, d.noise_cpu) for d in group)
        slower = sum(duel.ratio_cpu < LEAST for duel in group)
        for side, ratios, count in (("polyconv", ours, str(slower)), ("torch itself (A/A)", itself, "")):
            spreads = [str(Spread.of(column)) for column in zip(*ratios, strict=True)]
            table.append([*map(str, case), side, str(len(group)), *spreads, count])
    headers = ("mode", "layout", "threads", "side", things, "x wall", "x cpu", f"below {LEAST}")
    print_table("Geometric means against PyTorch in the same layout, lowest and highest", headers, table, left=4)


def _case_cells(duel: Duel) -> list[str]:
    case = duel.case
    return [str(case.mode), str(case.layout), str(case.batch), str(case.threads)]


def _time_cells(duel: Duel) -> list[str]:
    times = [f"{duel.timings[name].best * 1e3:.4g}" for name in (TORCH, OUR_MODULE)]
    return [*times, *_two_digits(duel.ratio, duel.ratio_cpu, duel.noise, duel.noise_cpu)]


def _memory_cells(duel: Duel) -> list[str]:
    memory = duel.memory
    if memory is None:
        return ["", ""]
    return [f"{memory.torch / 1e6:.0f}", f"{memory.ours / 1e6:.0f}{TOO_MUCH if memory.too_much else ''}"]


def _two_digits(*ratios: float) -> list[str]:
    return [f"{ratio:.2f}" for ratio in ratios]
