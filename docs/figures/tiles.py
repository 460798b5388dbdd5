"""Cook-Toom tiles along one axis: how they overlap, what nesting two segments saves, and what both axes come to."""

from __future__ import annotations

from canvas import Canvas

from polyconv.algebra.segments import AxisScheme, Scheme2d

CELL = 15
HUES = ("teal", "coral", "blue")
LEFT = 64


def draw(canvas: Canvas) -> None:
    _overlap(canvas, AxisScheme.cut(4, 5), top=4)
    _nested(canvas, AxisScheme.cut(4, 9, 4, 5, tiles=2), top=158)
    _saving(canvas, left=478)


def _cells(canvas: Canvas, x: float, y: float, hues: list[str]) -> None:
    for number, hue in enumerate(hues):
        canvas.rect(x + number * CELL, y, CELL - 1.5, CELL - 1.5, hue, corner=2)


def _overlap(canvas: Canvas, scheme: AxisScheme, top: float) -> None:
    """Three tiles in a row."""
    m, span = scheme.m, scheme.span
    canvas.text(
        0, top + 8, f"{scheme}: {scheme.products} products give {m} outputs of a kernel of {scheme.r} taps", bold=True
    )
    y = top + 30
    inputs = 2 * m + span
    _cells(canvas, LEFT, y, ["rule"] * inputs)
    canvas.text(0, y + 7, "inputs", colour="grey", size=10.5)
    for tile, hue in enumerate(HUES):
        line = y + 25 + 13 * tile
        canvas.line((LEFT + tile * m * CELL, line), (LEFT + (tile * m + span) * CELL - 2, line), colour=hue, weight=4)
        canvas.text(LEFT + (tile * m + span) * CELL + 6, line, f"tile {tile} reads {span}", size=9.5, colour="grey")
    y += 66
    canvas.text(0, y + 7, "outputs", colour="grey", size=10.5)
    _cells(canvas, LEFT, y, [hue for hue in HUES for _ in range(m)])
    canvas.text(
        0,
        y + 28,
        f"Neighbouring tiles share {span - m} inputs; their outputs lie side by side.",
        colour="grey",
        size=10.5,
    )


def _nested(canvas: Canvas, scheme: AxisScheme, top: float) -> None:
    """Two segments over two tiles of outputs."""
    m = scheme.m
    canvas.text(0, top + 8, "Nine taps: two segments over the same tiles, nested", bold=True)
    y = top + 30
    canvas.text(0, y + 7, "taps", colour="grey", size=10.5)
    _cells(canvas, LEFT, y, ["gold soft"] * 4 + ["gold"] * 5)
    canvas.text(LEFT + 4 * CELL / 2, y + 22, "U₀", size=10.5, at="middle")
    canvas.text(LEFT + 6.5 * CELL, y + 22, "U₁", size=10.5, at="middle")
    y += 42
    canvas.text(0, y + 7, "inputs", colour="grey", size=10.5)
    _cells(canvas, LEFT, y, ["rule"] * scheme.span)
    for tile, (offset, hue) in enumerate(zip(scheme.tile_offsets, HUES, strict=True)):
        line = y + 24 + 13 * tile
        canvas.line(
            (LEFT + offset * CELL, line), (LEFT + (offset + scheme.inner.inputs) * CELL - 2, line), colour=hue, weight=4
        )
        canvas.text(LEFT + (offset + scheme.inner.inputs) * CELL + 6, line, "V" + "₀₁₂"[tile], size=10.5)
    y += 72
    canvas.text(0, y, f"{m} outputs each:", colour="grey", size=10.5)
    canvas.text(104, y, "y₀ = U₀V₀ + U₁V₁ ,  y₁ = U₀V₁ + U₁V₂", size=11.5)
    canvas.text(366, y, "4 products", colour="grey", size=10.5)
    canvas.text(104, y + 18, "P = (U₀+U₁)V₁ ,  y₀ = U₀(V₀−V₁) + P ,", size=11.5)
    canvas.text(104, y + 36, "y₁ = P + U₁(V₂−V₁)", size=11.5)
    canvas.text(366, y + 36, "3 products", colour="coral", size=10.5, bold=True)


def _saving(canvas: Canvas, left: float) -> None:
    """Multiplications per output for 5x9, from the schemes themselves."""
    h = AxisScheme.cut(4, 5)
    schemes = [
        ("direct", Scheme2d(AxisScheme.direct(5), AxisScheme.direct(9)), "rule"),
        ("two segments", Scheme2d(h, AxisScheme.cut(4, 9, 4, 5)), "teal soft"),
        ("nested", Scheme2d(h, AxisScheme.cut(4, 9, 4, 5, tiles=2)), "teal"),
    ]
    canvas.text(left, 12, "5×9, both axes", bold=True)
    canvas.text(left, 29, "multiplications per output", colour="grey", size=10.5)
    canvas.text(left, 44, "and pair of channels", colour="grey", size=10.5)
    most, base = 45.0, 310.0
    for number, (name, scheme, hue) in enumerate(schemes):
        x, height = left + number * 66, 225 * float(scheme.multiplications) / most
        canvas.rect(x, base - height, 48, height, hue, corner=3)
        canvas.text(x + 24, base - height - 11, f"{scheme.multiplications}", size=13, at="middle", bold=True)
        for row, word in enumerate(name.split()):
            canvas.text(x + 24, base + 12 + 13 * row, word, size=10, colour="grey", at="middle")


FIGURE = (
    "tiles",
    670,
    350,
    "Tiles of eight inputs that overlap by four and give four outputs each; nine taps as two nested segments with "
    "three products for four; 45 multiplications per output become 8 and, nested, 6.",
    draw,
)
