"""Phases of a dilated 5x9 kernel: which pixels one output reads, and the dense sub-images that they form."""

from __future__ import annotations

from canvas import Canvas

from polyconv.algebra.polyphase import DenseAxis, dense_axis, forward_phases

KERNEL, DILATION = (5, 9), (2, 3)
IMAGE = (12, 30)
OUTPUT = (1, 1)
"""The output whose taps are shown."""
CELL = 12
HUES = ("teal", "coral", "blue")


def draw(canvas: Canvas) -> None:
    rows, columns = (
        dense_axis(forward_phases(size - d * (k - 1), k, 1, d, 0)[0])
        for size, k, d in zip(IMAGE, KERNEL, DILATION, strict=True)
    )
    _image(canvas, rows, columns, left=8, top=34)
    _phases(canvas, rows, columns, left=400, top=34)


def _positions(axis: DenseAxis, output: int) -> list[int]:
    """Where the taps of one output read."""
    (taps,) = axis.classes
    return [taps.read_first + axis.read_step * (output + axis.dilation * t) for t in range(taps.taps)]


def _fill(row: int, column: int) -> str:
    """Phases of the columns differ in hue, those of the rows in strength."""
    hue = HUES[column % DILATION[1]]
    return hue if row % DILATION[0] else f"{hue} soft"


def _image(canvas: Canvas, rows: DenseAxis, columns: DenseAxis, left: float, top: float) -> None:
    canvas.text(left, 12, "The image: one output reads 45 pixels", bold=True)
    for row in range(IMAGE[0]):
        for column in range(IMAGE[1]):
            canvas.rect(left + column * CELL, top + row * CELL, CELL - 1.5, CELL - 1.5, _fill(row, column), corner=2)
    for row in _positions(rows, OUTPUT[0]):
        for column in _positions(columns, OUTPUT[1]):
            canvas.rect(
                left + column * CELL - 0.5,
                top + row * CELL - 0.5,
                CELL - 0.5,
                CELL - 0.5,
                line="ink",
                weight=2,
                corner=2,
            )
    below = top + IMAGE[0] * CELL + 14
    canvas.text(
        left, below, "A kernel of 5×9, dilation 2×3. Its taps (framed) all have one colour:", size=10.5, colour="grey"
    )
    canvas.text(
        left, below + 15, "rows of one remainder modulo 2, columns of one remainder modulo 3.", size=10.5, colour="grey"
    )


def _phases(canvas: Canvas, rows: DenseAxis, columns: DenseAxis, left: float, top: float) -> None:
    canvas.text(left, 12, "Six phases: dense images", bold=True)
    small = 8
    high, wide = IMAGE[0] // DILATION[0], IMAGE[1] // DILATION[1]
    for a in range(rows.dilation):
        for b in range(columns.dilation):
            x, y = left + b * (wide * small + 12), top + a * (high * small + 24)
            for row in range(high):
                for column in range(wide):
                    canvas.rect(x + column * small, y + row * small, small - 1, small - 1, _fill(a, b), corner=1.5)
            if (a, b) == OUTPUT:
                canvas.rect(x - 1, y - 1, KERNEL[1] * small + 1, KERNEL[0] * small + 1, line="ink", weight=2, corner=2)
            canvas.text(x, y + high * small + 8, f"x[{a}+2i, {b}+3j]", size=9, colour="grey")
    below = top + IMAGE[0] * CELL + 14
    canvas.text(left, below, "Here the same taps are a dense 5×9 window.", size=10.5, colour="grey")
    canvas.text(left, below + 15, "No copy: a phase is an offset and a stride.", size=10.5, colour="grey")


FIGURE = (
    "phases",
    670,
    216,
    "An image whose pixels are coloured by phase; the 45 taps of a dilated 5x9 kernel all fall on one colour; the six "
    "phases, each a dense image.",
    draw,
)
