"""What the subcommands print: tables on standard output, progress on standard error, with ``rich`` if it is there."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

PATIENCE = 2.0
"""Seconds of silence before progress is shown, and between two lines of it."""
WIDE = 200
"""Columns of a table that is written to a file or a pipe, where nothing says how wide the reader's window is."""


def rich(module: str) -> ModuleType | None:
    """A module of the extra ``polyconv[cli]``, if it is installed."""
    try:
        return import_module(f"rich.{module}")
    except ImportError:
        return None


def print_json(value: Any) -> None:
    """Print JSON on standard output, where nothing else may go then."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> None:
    """Print rows of text under headers: the first ``left`` columns flush left, the rest (numbers) flush right.

    An empty row is a line between two groups.
    """
    console, table = rich("console"), rich("table")
    if console is None or table is None:
        print(plain_table(title, headers, rows, left=left))
        return
    drawn = table.Table()
    for place, header in enumerate(headers):
        drawn.add_column(header, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        if row:
            drawn.add_row(*row)
        else:
            drawn.add_section()
    width = None if sys.stdout.isatty() else WIDE
    screen = console.Console(width=width, markup=False, highlight=False)
    if title:
        screen.print(title, soft_wrap=True)  # and not as the table's own, which is cut to the table's width
    screen.print(drawn)


def plain_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """The same as aligned text."""
    filled = [headers, *(row for row in rows if row)]
    widths = [max(len(row[column]) for row in filled) for column in range(len(headers))]

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


def report_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, styles: Sequence[str], caption: str
) -> Any:
    """The same as a table of ``rich`` for a report to give away: a style for each row, and a text below."""
    module = rich("table")
    if module is None:
        raise ModuleNotFoundError("report.table() needs rich: pip install 'polyconv[cli]', or print(report)")
    drawn = module.Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for place, header in enumerate(headers):
        drawn.add_column(header, justify="left" if place < left else "right", overflow="fold", no_wrap=place >= left)
    for row, style in zip(rows, styles, strict=True):
        drawn.add_row(*row, style=style)
    return drawn


def size_text(size: float) -> str:
    """A number of bytes for people: ``14 kB``."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


class Progress:
    """Says what was done last. Safe to tell from several threads."""

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
                print(f"{self.done}/{self.total} {what}", file=sys.stderr, flush=True)

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
    """Progress that is shown once the work has taken :data:`PATIENCE`, unless nothing should be."""
    shown = Progress(quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()
