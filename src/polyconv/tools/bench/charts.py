"""Bar charts of a suite's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import log
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ...problem import Pass
from .ab_compare import Duel
from .cases import Case, Layout, Mode
from .results import Row, Spread, grouped

PASSES_LEGEND = "bars: each in its faster layout     ◇ both in NCHW"
NETWORKS_LEGEND = "bars: processor time     ◇ wall time     shaded: PyTorch against itself"
LAYERS_LEGEND = (
    "bars: classes of layers, processor time     ◇ the slowest of a class     shaded: PyTorch against itself"
)

_TITLES = {Pass.FPROP: "Forward", Pass.DGRAD: "Input gradient", Pass.WGRAD: "Weight gradient"}
_MODES = {Mode.INFERENCE: "Inference", Mode.TRAINING: "Training"}
_LAYOUTS = {Layout.NCHW: "NCHW", Layout.CHANNELS_LAST: "channels_last"}


def of_passes(rows: Sequence[Row]) -> list[list[Panel]]:
    """Panels: a column per pass, a row per number of threads."""
    return [
        [
            Panel(
                _TITLES[kind],
                f"{_threads(count)}, mean {geometric_mean(row.ratio_best for row in group):.2f}×",
                [Bar(row.workload, row.shape, row.ratio_best, row.ratio_nchw) for row in group],
            )
            for kind, group in grouped(here, lambda row: row.kind).items()
        ]
        for count, here in grouped(rows, lambda row: row.threads).items()
    ]


def of_networks(duels: Sequence[Duel]) -> list[list[Panel]]:
    """Panels: a column per mode and layout, a row per batch and number of threads; a bar per network."""
    return _of_duels(duels, lambda group: [Bar(d.name, d.what, d.ratio_cpu, d.ratio) for d in group])


def of_issues(duels: Sequence[Duel]) -> list[list[Panel]]:
    """Panels as for networks, but layers of all batches in one."""
    return of_networks([replace(duel, case=replace(duel.case, batch=0)) for duel in duels])


def of_layers(duels: Sequence[Duel]) -> list[list[Panel]]:
    """Panels as for networks, with a bar per class of layers."""
    return _of_duels(duels, _classes)


def _classes(duels: Sequence[Duel]) -> list[Bar]:
    bars = []
    for kind, group in grouped(duels, lambda duel: duel.kind).items():
        spread = Spread.of(duel.ratio_cpu for duel in group)
        bars.append(Bar(kind, "1 layer" if len(group) == 1 else f"{len(group)} layers", spread.mean, spread.lowest))
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
    title, below = f"{_MODES[mode]}, {_LAYOUTS[layout]}", f"batch {batch}, " * bool(batch) + _threads(threads)
    group = [duel for duel in duels if duel.case == Case(mode, layout, batch, threads)]
    if not group:
        return Panel(title, below, [])
    mean, noise = geometric_mean(duel.ratio_cpu for duel in group), Spread.of(duel.noise_cpu for duel in group)
    itself = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (noise.lowest, noise.highest)))
    below = f"{below}, mean {mean:.2f}×, A/A {itself}×"
    return Panel(title, below, bars(group), (noise.lowest, noise.highest))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
FASTER, SLOWER, MARKER, BAND = "#2a9d8f", "#e07a5f", "#52606d", "#d8dee6"
FORMATS = (".png", ".svg", ".pdf")
BAR_INCHES, ROOMY_BAR_INCHES = 0.27, 0.42
FEW = 12
"""Maximum bars of a panel with details under their names."""
PANEL_INCHES = 5.2
LEAST_INCHES = 8.0
"""Minimum width of a figure, so that the header lines are not wrapped too often."""
MARGIN_INCHES = 0.15
LINE_INCHES = 0.22
"""Spacing of the header lines."""
HEADING_INCHES = 0.58
"""From the upper edge to the first header line."""
LABEL = 0.13
"""Fraction of the axis that a value's label takes, with its gap."""
DENSE, SPARSE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100), (0.01, 0.1, 0.3, 1, 3, 10, 30, 100)
WIDE = 20
"""Ratio of the axis limits above which the ticks are sparse."""
BAND_EDGE = 3.0
"""Edge width of the noise band [points], so that a narrow band is visible next to the line at 1x."""
ABOVE = {"xycoords": "axes fraction", "textcoords": "offset points"}
"""Annotation coordinates: offset [points] from a corner of the panel."""


class PlotError(RuntimeError):
    """A chart cannot be drawn; the message says what to do."""


def require(path: Path) -> Any:
    """``pyplot`` with a file backend. Call it before a long run, to fail early on a wrong suffix or no matplotlib."""
    if path.suffix not in FORMATS:
        raise PlotError(f"cannot draw {path}: the name of a chart ends with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        raise PlotError("a plot needs matplotlib, which is not installed: pip install 'polyconv[bench]'") from None


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio, and a second one shown as a marker."""

    name: str
    detail: str
    ratio: float
    marked: float


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    below: str
    bars: Sequence[Bar]
    noise: tuple[float, float] | None = None
    """Lowest and highest A/A ratio (PyTorch against itself)."""

    @property
    def band(self) -> tuple[float, float]:
        """Shaded range: symmetric around 1 (in logarithms), so that even a single A/A ratio has a band."""
        worst = max(max(ratio, 1 / ratio) for ratio in self.noise or (1.0,))
        return 1 / worst, worst


TITLE = "polyconv against PyTorch"


def draw(panels: Sequence[Sequence[Panel]], path: Path, legend: str, subtitle: str = "", title: str = TITLE) -> None:
    """Write a figure of panels that share one axis range."""
    pyplot = require(path)
    with pyplot.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": GREY}):
        figure = figure_of(pyplot, panels, legend, subtitle, title)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def figure_of(pyplot: Any, panels: Sequence[Sequence[Panel]], legend: str, subtitle: str, title: str = TITLE) -> Any:
    across, tallest = max(map(len, panels)), max(len(panel.bars) for row in panels for panel in row)
    panel_inches = (ROOMY_BAR_INCHES if tallest <= FEW else BAR_INCHES) * tallest + 1.1
    width = max(PANEL_INCHES * across + 0.3, LEAST_INCHES)
    figure, axes = pyplot.subplots(len(panels), across, figsize=(width, 1.0), squeeze=False, layout="constrained")
    lines = [
        *_cut(figure, f"{legend}     right of 1×: polyconv is faster", "     "),
        *_cut(figure, subtitle, ", "),
    ]
    header = HEADING_INCHES + LINE_INCHES * len(lines)
    height = header + panel_inches * len(panels) + 0.35
    figure.set_figheight(height)
    figure.get_layout_engine().set(
        rect=(0, 0, 1, 1 - header / height), w_pad=0.12, h_pad=0.08, wspace=0.02, hspace=0.02
    )
    limits = _limits([panel for row in panels for panel in row])
    for down, row in enumerate(panels):
        for place in range(across):
            _draw_panel(axes[down][place], row[place] if place < len(row) else None, limits, tallest)
    _header(figure, height, lines, title)
    return figure


def _cut(figure: Any, text: str, between: str) -> list[str]:
    """Wrap text to the figure's width, breaking at separators."""
    room = (figure.get_figwidth() - 2 * MARGIN_INCHES) * figure.dpi
    probe = figure.text(0, 0, "")
    lines: list[str] = []
    for part in text.split(between):
        longer = f"{lines[-1]}{between}{part}" if lines else part
        probe.set_text(longer)
        if lines and probe.get_window_extent(figure.canvas.get_renderer()).width <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    probe.remove()
    return lines


def _header(figure: Any, height: float, lines: Sequence[str], title: str) -> None:
    left = MARGIN_INCHES / figure.get_figwidth()
    figure.text(left, 1 - 0.30 / height, title, fontsize=15, fontweight="bold", va="center")
    for number, line in enumerate(lines):
        figure.text(left, 1 - (HEADING_INCHES + LINE_INCHES * number) / height, line, color=GREY, va="center")


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Axis limits of all panels, including 1x and room for labels."""
    bars = [bar for panel in panels for bar in panel.bars]
    ratios = [*(bar.ratio for bar in bars), *(bar.marked for bar in bars)]
    ratios += [end for panel in panels for end in panel.band]
    low, high = min(ratios), max(ratios)
    span = max(high / low, 2.0)
    return low / span**0.04, high * span**0.22


def _draw_panel(axes: Any, panel: Panel | None, limits: tuple[float, float], tallest: int) -> None:
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(tallest - 0.4, -0.6)
    ticks = [tick for tick in (SPARSE if limits[1] / limits[0] > WIDE else DENSE) if limits[0] <= tick <= limits[1]]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", length=0, labelcolor=GREY)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])
    if panel is None or not panel.bars:
        return
    if panel.noise is not None:
        axes.axvspan(*panel.band, color=BAND, linewidth=BAND_EDGE, zorder=0)
    bars = sorted(panel.bars, key=lambda bar: -bar.ratio)
    for place, bar in enumerate(bars):
        color = FASTER if bar.ratio >= 1 else SLOWER
        axes.barh(place, bar.ratio - 1, left=1, height=0.66, color=color)
        axes.plot(bar.marked, place, marker="D", markersize=4, mfc="white", mec=MARKER, mew=1, clip_on=False)
        _value(axes, place, bar, limits)
    axes.axvline(1, color=INK, linewidth=1)
    _names(axes, bars, with_details=tallest <= FEW)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.annotate(panel.below, (0, 1), xytext=(0, 7), **ABOVE, fontsize=9, color=GREY)


def _value(axes: Any, place: int, bar: Bar, limits: tuple[float, float]) -> None:
    """Label a bar with its ratio, at its end, or beyond the marker if they would overlap."""
    end = max(bar.ratio, 1.0)
    gap = log(bar.marked / end) / log(limits[1] / limits[0])
    at = bar.marked if 0 < gap < LABEL else end
    marked = at == bar.marked
    color = INK if bar.ratio >= 1 else SLOWER
    axes.annotate(
        f"{bar.ratio:.2f}×",
        (at, place),
        xytext=(7 if marked else 4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=color,
    )


def _names(axes: Any, bars: Sequence[Bar], *, with_details: bool) -> None:
    for place, bar in enumerate(bars):
        lines = [(bar.name, 9, INK, 5.5), (bar.detail, 7, GREY, -5.5)]
        for text, size, color, up in lines if with_details else [(bar.name, 9, INK, 0)]:
            axes.annotate(
                text,
                (0, place),
                xycoords=axes.get_yaxis_transform(),
                xytext=(-5, up),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=size,
                color=color,
            )
