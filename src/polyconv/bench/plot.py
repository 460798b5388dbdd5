"""The rows as a picture: for each pass, how many times faster than PyTorch every layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import log
from pathlib import Path
from typing import Any

from ..problem import Pass
from .rows import Row, means

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
FASTER, SLOWER, MARKER = "#2a9d8f", "#e07a5f", "#52606d"
FORMATS = (".png", ".svg", ".pdf")
TITLES = {Pass.FPROP: "Forward", Pass.DGRAD: "Input gradient", Pass.WGRAD: "Weight gradient"}
BAR_INCHES, ROOMY_BAR_INCHES = 0.27, 0.42
FEW = 12
"""Bars of a panel up to which there is room for the layers' shapes under their names."""
PANEL_INCHES = 5.2
LEAST_INCHES = 8.0
"""Width that the lines above the panels take."""
LABEL = 0.13
"""Share of the axis that a value takes, with a gap."""


class PlotError(RuntimeError):
    """No picture can be drawn; the message says what to do."""


def require(path: Path) -> Any:
    """``matplotlib``, set up to draw into a file. Asked for before a long run, so that none is wasted."""
    if path.suffix not in FORMATS:
        raise PlotError(
            f"cannot draw {path}: the name of a picture ends with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        )
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        raise PlotError("a plot needs matplotlib, which is not installed: pip install 'polyconv[bench]'") from None


def draw(rows: Sequence[Row], path: Path, subtitle: str = "") -> None:
    """Write a picture: one column of panels per pass, one row of them per number of threads, layers sorted."""
    pyplot = require(path)
    passes = list(dict.fromkeys(row.kind for row in rows))
    threads = list(dict.fromkeys(row.threads for row in rows))
    tallest = max(
        sum(row.threads == count and row.kind is kind for row in rows) for count in threads for kind in passes
    )
    header, panel = 1.0, (ROOMY_BAR_INCHES if tallest <= FEW else BAR_INCHES) * tallest + 0.95
    width, height = max(PANEL_INCHES * len(passes) + 0.3, LEAST_INCHES), header + panel * len(threads) + 0.35
    with pyplot.rc_context({"font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": GREY}):
        figure, panels = pyplot.subplots(
            len(threads), len(passes), figsize=(width, height), squeeze=False, layout="constrained"
        )
        figure.get_layout_engine().set(
            rect=(0, 0, 1, 1 - header / height), w_pad=0.12, h_pad=0.08, wspace=0.02, hspace=0.02
        )
        limits = _limits(rows)
        for down, count in enumerate(threads):
            for across, kind in enumerate(passes):
                chosen = [row for row in rows if row.threads == count and row.kind is kind]
                _panel(panels[down][across], chosen, limits, tallest, with_threads=len(threads) > 1)
        _header(figure, height, subtitle)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def _header(figure: Any, height: float, subtitle: str) -> None:
    left = 0.15 / figure.get_figwidth()
    figure.text(left, 1 - 0.30 / height, "polyconv against PyTorch", fontsize=15, fontweight="bold", va="center")
    legend = "bars: against PyTorch's faster layout     ◇ against PyTorch NCHW     right of 1×: polyconv is faster"
    figure.text(left, 1 - 0.58 / height, legend, fontsize=9, color=GREY, va="center")
    figure.text(left, 1 - 0.80 / height, subtitle, fontsize=9, color=GREY, va="center")


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """One axis for all panels; 1x is on it, and there is room for the labels."""
    low = min(1.0, *(row.ratio_best for row in rows))
    high = max(1.0, *(row.ratio_nchw for row in rows), *(row.ratio_best for row in rows))
    span = max(high / low, 2.0)
    return low / span**0.04, high * span**0.22


def _panel(axes: Any, rows: list[Row], limits: tuple[float, float], tallest: int, *, with_threads: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(tallest - 0.4, -0.6)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if limits[0] <= tick <= limits[1]]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", length=0, labelcolor=GREY)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])
    if not rows:
        return
    rows = sorted(rows, key=lambda row: -row.ratio_best)
    for place, row in enumerate(rows):
        color = FASTER if row.ratio_best >= 1 else SLOWER
        axes.barh(place, row.ratio_best - 1, left=1, height=0.66, color=color)
        axes.plot(row.ratio_nchw, place, marker="D", markersize=4, mfc="white", mec=MARKER, mew=1, clip_on=False)
        _value(axes, place, row, limits)
    axes.axvline(1, color=INK, linewidth=1)
    _names(axes, rows, with_shapes=tallest <= FEW)
    mean = means(rows)[0]
    where = f", {_threads(mean.threads)}" if with_threads else ""
    axes.set_title(TITLES[mean.kind] + where, loc="left", fontsize=11, fontweight="bold", pad=8)
    axes.set_title(f"mean {mean.ratio_best:.2f}×", loc="right", fontsize=9, color=GREY, pad=8)


def _value(axes: Any, place: int, row: Row, limits: tuple[float, float]) -> None:
    """The ratio in figures: at the end of the bar, or beyond the marker where that is in the way."""
    end = max(row.ratio_best, 1.0)
    gap = log(row.ratio_nchw / end) / log(limits[1] / limits[0])
    at = row.ratio_nchw if 0 < gap < LABEL else end
    marked = at == row.ratio_nchw
    color = INK if row.ratio_best >= 1 else SLOWER
    axes.annotate(
        f"{row.ratio_best:.2f}×",
        (at, place),
        xytext=(7 if marked else 4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=color,
    )


def _names(axes: Any, rows: Sequence[Row], *, with_shapes: bool) -> None:
    for place, row in enumerate(rows):
        lines = [(row.workload, 9, INK, 5.5), (row.shape, 7, GREY, -5.5)]
        for text, size, color, up in lines if with_shapes else [(row.workload, 9, INK, 0)]:
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


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
