"""Tables and charts of networks beside the graph compilers."""

from __future__ import annotations

from collections.abc import Sequence

from ....util.console import print_table
from ..charts import Bar, Panel
from ..results import Spread, grouped
from .rows import Entry, PeerRow

OF_THE_BEST, BY_ROUNDS = "of the best peer", "by rounds"
TITLE = "polyconv against its best peer"
LEGEND = "bars: the best peer's time over polyconv's     ◇ eager PyTorch's over polyconv's     shaded: A/A of all"
CASE = ("network", "mode", "batch", "threads")


def print_peers(peers: str, rows: Sequence[PeerRow], where: str) -> None:
    """Print the speed-ups over eager PyTorch, then what else was measured of each contender. ``peers`` has versions."""
    contenders = list(dict.fromkeys(entry.contender for row in rows for entry in row.entries))
    table = []
    for row in rows:
        by_name = {entry.contender: entry for entry in row.entries}
        ratios = [_ratio(row, by_name.get(name)) for name in contenders]
        shares = ["–" if share is None else f"{share:.2f}" for share in (row.of_the_best_peer, row.by_rounds)]
        table.append([*_case(row), f"{row.eager.best * 1e3:.4g}" if row.eager else "–", *ratios, *shares])
    headers = (*CASE, "eager ms", *contenders, OF_THE_BEST, BY_ROUNDS)
    print_table(f"Speed-ups over eager PyTorch, best of all rounds. {where}, {peers}", headers, table, left=2)
    details = [[*_case(row), entry.contender, *_details(entry), entry.refused] for row in rows for entry in row.entries]
    headers = (*CASE, "contender", "ms", "cpu ms", "A/A", "error", "setup s", "MB", "refused")
    print_table("Each contender in a process of its own", headers, details, left=5, grouped=True)
    for name, found in (
        (OF_THE_BEST, [row.of_the_best_peer for row in rows]),
        (BY_ROUNDS, [row.by_rounds for row in rows]),
    ):
        if measured := [share for share in found if share is not None]:
            print(f"{name}, geometric mean, lowest and highest: {Spread.of(measured)}")


def _case(row: PeerRow) -> list[str]:
    return [row.name, str(row.case.mode), str(row.case.batch), str(row.case.threads)]


def _ratio(row: PeerRow, entry: Entry | None) -> str:
    if entry is None or row.eager is None:
        return "–"
    return entry.refused.partition(":")[0] or f"{row.eager.best / entry.best:.2f}"


def _details(entry: Entry) -> list[str]:
    if entry.refused:
        return [""] * 6
    times = [f"{seconds * 1e3:.4g}" for seconds in (entry.best, min(entry.cpu_s))]
    noise, error = (
        f"{value:{form}}" if value is not None else "" for value, form in ((entry.noise, ".2f"), (entry.error, ".1e"))
    )
    return [*times, noise, error, f"{entry.setup_s:.1f}", f"{entry.peak_bytes / 1e6:.0f}"]


def panels(rows: Sequence[PeerRow]) -> list[list[Panel]]:
    """A column per mode, a row per batch and number of threads; a bar per network."""
    return [
        [_panel(str(mode).capitalize(), f"batch {batch}, {threads} threads", group) for mode, group in modes.items()]
        for (batch, threads), here in grouped(rows, lambda row: (row.case.batch, row.case.threads)).items()
        for modes in [grouped(here, lambda row: row.case.mode)]
    ]


def _panel(title: str, below: str, rows: Sequence[PeerRow]) -> Panel:
    noise = [entry.noise for row in rows for entry in row.entries if entry.noise is not None]
    bars = [
        Bar(row.name, f"against {row.peer.contender}", row.peer.best / row.ours.best, row.eager.best / row.ours.best)
        for row in rows
        if row.peer and row.ours and row.eager
    ]
    return Panel(title, below, bars, (min(noise), max(noise)) if noise else None)
