"""What the pictures show: the rows of a suite as panels of bars, and the line that says what is what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..problem import Pass
from .cases import Case, Layout, Mode
from .duels import Duel
from .plot import Bar, Panel
from .rows import Row, geometric_mean, means
from .summaries import Spread

PASSES_LEGEND = "bars: each in its faster layout     ◇ both in NCHW"
NETWORKS_LEGEND = "bars: processor time     ◇ wall time     shaded: PyTorch against itself"
LAYERS_LEGEND = (
    "bars: classes of layers, processor time     ◇ the slowest of a class     shaded: PyTorch against itself"
)

_TITLES = {Pass.FPROP: "Forward", Pass.DGRAD: "Input gradient", Pass.WGRAD: "Weight gradient"}
_MODES = {Mode.INFERENCE: "Inference", Mode.TRAINING: "Training"}
_LAYOUTS = {Layout.NCHW: "NCHW", Layout.CHANNELS_LAST: "channels_last"}


def of_passes(rows: Sequence[Row]) -> list[list[Panel]]:
    """A column per pass, a row per number of threads."""
    found = []
    for count in dict.fromkeys(row.threads for row in rows):
        here = [row for row in rows if row.threads == count]
        found.append(
            [
                Panel(
                    _TITLES[mean.kind],
                    f"{_threads(count)}, mean {mean.ratio_best:.2f}×",
                    [Bar(r.workload, r.shape, r.ratio_best, r.ratio_nchw) for r in here if r.kind is mean.kind],
                )
                for mean in means(here)
            ]
        )
    return found


def of_networks(duels: Sequence[Duel]) -> list[list[Panel]]:
    """A column per mode and layout, a row per batch and number of threads, a bar per network."""
    return _of_duels(duels, lambda group: [Bar(d.name, d.what, d.ratio_cpu, d.ratio) for d in group])


def of_layers(duels: Sequence[Duel]) -> list[list[Panel]]:
    """The same, with a bar per class of layers."""
    return _of_duels(duels, _classes)


def _classes(duels: Sequence[Duel]) -> list[Bar]:
    bars = []
    for kind in dict.fromkeys(duel.kind for duel in duels):
        spread = Spread.of(duel.ratio_cpu for duel in duels if duel.kind == kind)
        count = sum(duel.kind == kind for duel in duels)
        bars.append(Bar(kind, "1 layer" if count == 1 else f"{count} layers", spread.mean, spread.lowest))
    return bars


def _of_duels(duels: Sequence[Duel], bars: Callable[[Sequence[Duel]], list[Bar]]) -> list[list[Panel]]:
    columns = list(dict.fromkeys((duel.case.mode, duel.case.layout) for duel in duels))
    lines = list(dict.fromkeys((duel.case.batch, duel.case.threads) for duel in duels))
    return [[_panel(duels, *column, *line, bars) for column in columns] for line in lines]


def _panel(
    duels: Sequence[Duel],
    mode: Mode,
    layout: Layout,
    batch: int,
    threads: int,
    bars: Callable[[Sequence[Duel]], list[Bar]],
) -> Panel:
    title, below = f"{_MODES[mode]}, {_LAYOUTS[layout]}", f"batch {batch}, {_threads(threads)}"
    group = [duel for duel in duels if duel.case == Case(mode, layout, batch, threads)]
    if not group:
        return Panel(title, below, [])
    mean, noise = geometric_mean(duel.ratio_cpu for duel in group), Spread.of(duel.noise_cpu for duel in group)
    itself = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (noise.lowest, noise.highest)))
    below = f"{below}, mean {mean:.2f}×, A/A {itself}×"
    return Panel(title, below, bars(group), (noise.lowest, noise.highest))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
