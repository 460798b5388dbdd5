"""Draws every figure of the documentation, for light and for dark pages.

    python docs/figures/draw.py            write those that have changed
    python docs/figures/draw.py --check    name those that are not current, and fail if there are any

The figures are drawn from the package's own algebra and from benchmarks/gpu/table.json, so they change with them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[1] / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import counted  # noqa: E402
import lanes  # noqa: E402
import phases  # noqa: E402
import pipeline  # noqa: E402
import tiles  # noqa: E402
from canvas import THEMES, Canvas  # noqa: E402

FIGURES = tuple(module.FIGURE for module in (phases, tiles, pipeline, lanes, counted))


def drawings() -> Iterator[tuple[Path, str]]:
    """Each file with the text that belongs into it."""
    for name, width, height, title, draw in FIGURES:
        for theme in THEMES:
            canvas = Canvas(width, height, title, theme)
            draw(canvas)
            yield HERE / f"{name}-{theme}.svg", canvas.svg()


def stale() -> list[Path]:
    """The committed files that are not what would be drawn now."""
    return [path for path, text in drawings() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a figure is not current")
    args = parser.parse_args()
    old = stale()
    for path in old:
        print(f"not current: {path}" if args.check else f"drew {path}")
    if not args.check:
        for path, text in drawings():
            if path in old:
                path.write_text(text, encoding="utf-8")
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
