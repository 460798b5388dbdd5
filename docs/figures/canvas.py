"""A sheet to draw on that writes SVG: rectangles, words, lines and arrows, in two sets of colours.

Plain text out of the standard library, so that the same drawing is the same file everywhere and a test can tell whether
a committed figure is current. The background is transparent; ``light`` and ``dark`` are for readers of either scheme.
Coordinates are points, y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONOSPACE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Name -> colour for light pages, colour for dark ones. Hues come in a strong and a soft kind.
COLOURS = {
    "ink": ("#1f2933", "#e6eaf0"),
    "grey": ("#5b6773", "#a3afbd"),
    "rule": ("#c3cad2", "#4a5563"),
    "panel": ("#f3f5f7", "#262b36"),
    "teal": ("#2a9d8f", "#3dbdad"),
    "teal soft": ("#bfe3de", "#1d5b55"),
    "coral": ("#d9694b", "#f08e72"),
    "coral soft": ("#f6d2c7", "#74402f"),
    "blue": ("#3f72af", "#7aa7e0"),
    "blue soft": ("#cfdff1", "#2c4a70"),
    "gold": ("#b5830f", "#e2b447"),
    "gold soft": ("#f3e3b8", "#63501f"),
}
THEMES = ("light", "dark")


@dataclass
class Canvas:
    """One figure of ``width`` x ``height`` points in the colours of ``theme``; ``title`` is for screen readers."""

    width: float
    height: float
    title: str
    theme: str = "light"
    parts: list[str] = field(default_factory=list)

    def colour(self, name: str) -> str:
        return "none" if name == "none" else COLOURS[name][THEMES.index(self.theme)]

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        line: str = "none",
        *,
        weight: float = 1.0,
        corner: float = 0.0,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" '
            f'fill="{self.colour(fill)}" stroke="{self.colour(line)}" stroke-width="{weight:g}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        colour: str = "ink",
        at: str = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """``at``: which end of the words lies at x: start, middle or end. y is the middle of the line."""
        weight = ' font-weight="600"' if bold else ""
        family = f" font-family={quoteattr(MONOSPACE)}" if code else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size:g}" fill="{self.colour(colour)}" '
            f'text-anchor="{at}"{weight}{family}>{escape(words)}</text>'
        )

    def line(
        self, *points: tuple[float, float], colour: str = "grey", weight: float = 1.2, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colour(colour)}" stroke-width="{weight:g}"{dash}/>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = "grey", weight: float = 1.4) -> None:
        """A line with a head at its last point; the last piece is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.line(*points[:-1], (x - 4 * dx, y - 4 * dy), colour=colour, weight=weight)
        wings = (
            f"{x - 7 * dx - 3.2 * dy:g},{y - 7 * dy - 3.2 * dx:g} {x - 7 * dx + 3.2 * dy:g},{y - 7 * dy + 3.2 * dx:g}"
        )
        self.parts.append(f'<polygon points="{x:g},{y:g} {wings}" fill="{self.colour(colour)}"/>')

    def bracket(self, x: float, y: float, width: float, colour: str, *, up: bool = False, depth: float = 5) -> None:
        """A horizontal bracket at y that opens downwards, or upwards."""
        end = y - depth if up else y + depth
        self.line((x, end), (x, y), (x + width, y), (x + width, end), colour=colour, weight=1.8)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" font-family={quoteattr(FONT)}>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>"]) + "\n"
