"""Console output: tables on standard output, progress on standard error, with ``rich`` if it is installed."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

PATIENCE = 2.0
"""Time before progress is shown, and between two lines of it [s]."""
WIDE = 200
"""Width of a table written to a file or a pipe, where the reader's window is unknown [columns]."""

NARROWEST = 16
"""Least width that a text is folded to [columns]."""


def rich(module: str) -> ModuleType | None:
    """A module of ``rich``, which the extra ``polyconv[cli]`` installs; None without it."""
    try:
        return import_module(f"rich.{module}")
    except ImportError:
        return None


def print_json(value: Any) -> None:
    """Print JSON on standard output, which must then contain nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0, grouped: bool = False
) -> None:
    """Print rows of text under headers: the first ``left`` columns flush left, the rest (numbers) flush right.

    An empty row separates two groups; with ``grouped``, rows with other first cells are separated. In a narrow window
    the widest column is folded; if that is not enough, plain text is printed for the window to wrap, as folded numbers
    would be unreadable.
    """
    console, table = rich("console"), rich("table")
    if console is None or table is None:
        print(plain_table(title, headers, rows, left=left))
        return
    screen = console.Console(width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False)
    widths = _widths(headers, rows)
    folded = widths.index(max(widths))
    borders = 3 * len(widths) + 1
    if sum(widths) - widths[folded] + min(widths[folded], NARROWEST) + borders > screen.width:
        print(plain_table(title, headers, rows, left=left))
        return
    drawn = table.Table()
    for place, header in enumerate(headers):
        drawn.add_column(
            header,
            justify="left" if place < left else "right",
            overflow="fold",
            min_width=None if place == folded else widths[place],
        )
    for place, row in enumerate(rows):
        if not row or (grouped and place and row[0] != rows[place - 1][0]):
            drawn.add_section()
        if row:
            drawn.add_row(*row)
    if title:
        screen.print(title, soft_wrap=True)  # not Table(title=...), which is cut to the table's width
    screen.print(drawn)


def plain_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """The table as aligned text."""
    widths = _widths(headers, rows)

    def line(row: Sequence[str]) -> str:
        cells = (
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(
        [
            *([title] if title else []),
            line(headers),
            "  ".join("-" * width for width in widths),
            *(line(row) for row in rows if row),
        ]
    )


class TableReport:
    """A report that prints as a table, with notes below."""

    _headers: ClassVar[tuple[str, ...]]
    _texts: ClassVar[int]
    """Number of text columns, which precede the numeric ones."""

    def _title(self) -> str:
        raise NotImplementedError

    def _lines(self) -> list[tuple[Sequence[str], str]]:
        """Cells and style of each row."""
        raise NotImplementedError

    def _notes(self) -> list[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        text = plain_table(self._title(), self._headers, [cells for cells, _ in self._lines()], left=self._texts)
        return "\n".join([text, *self._notes()])

    __repr__ = __str__

    def table(self) -> Any:
        """The report as a table of ``rich``, which ``polyconv[cli]`` installs."""
        module = rich("table")
        if module is None:
            raise ModuleNotFoundError("report.table() needs rich: pip install 'polyconv[cli]', or print(report)")
        notes = "\n".join(self._notes())
        drawn = module.Table(title=self._title(), title_justify="left", caption=notes, caption_justify="left")
        for place, header in enumerate(self._headers):
            text = place < self._texts
            drawn.add_column(header, justify="left" if text else "right", overflow="fold", no_wrap=not text)
        for cells, style in self._lines():
            drawn.add_row(*cells, style=style)
        return drawn

    def __rich__(self) -> Any:
        return self.table()


def _widths(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Widths of the columns: of the longest text in each."""
    filled = [headers, *(row for row in rows if row)]
    return [max(len(row[column]) for row in filled) for column in range(len(headers))]


def size_text(size: float) -> str:
    """Number of bytes as text: ``14 kB``."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def duration_text(seconds: float) -> str:
    """Duration as text: ``40 s``, ``12 min``, ``3 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


class Progress:
    """Progress display of the last step done. Thread-safe."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.total = 0
        self.done = 0
        self._began = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None

    def expect(self, pieces: int) -> None:
        with self._lock:
            self.total += pieces

    def step(self, what: str) -> None:
        with self._lock:
            self.done += 1
            now = time.monotonic()
            if self.quiet or now - self._began < PATIENCE:
                return
            if self._bar is None and sys.stderr.isatty():
                self._open_bar()
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done, total=self.total, description=what)
            elif now - self._said >= PATIENCE:
                self._said = now
                print(f"{self.done}/{self.total} {what}{self._left(now)}", file=sys.stderr, flush=True)

    def _left(self, now: float) -> str:
        """Text of the extrapolated remaining time; empty below 10 s."""
        seconds = (now - self._began) / self.done * (self.total - self.done)
        return "" if seconds < 10 else f", about {duration_text(seconds)} left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _open_bar(self) -> None:
        progress, console = rich("progress"), rich("console")
        if progress is None or console is None:
            return
        self._bar = progress.Progress(console=console.Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=self.total)
        self._bar.start()


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Progress that is shown after :data:`PATIENCE` seconds of work, unless ``quiet``."""
    shown = Progress(quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()
