"""The documentation's figures in the widest likely font: no text leaves its figure or box.

The figures name fonts that a machine may lack; browsers on Linux then fall back to DejaVu, whose letters are the
widest. Its metrics come with matplotlib.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("matplotlib")

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

FIGURES = sorted((Path(__file__).resolve().parents[2] / "docs" / "figures").glob("*-light.svg"))
SVG = "{http://www.w3.org/2000/svg}"
SLACK = 0.5
"""Rounding margin of a renderer [points]."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Box) -> bool:
        across = self.left - SLACK <= other.left and other.right <= self.right + SLACK
        return across and self.top - SLACK <= other.top and other.bottom <= self.bottom + SLACK

    def meets(self, other: Box) -> bool:
        across = self.left + SLACK < other.right and other.left + SLACK < self.right
        return across and self.top + SLACK < other.bottom and other.top + SLACK < self.bottom

    @property
    def middle(self) -> Box:
        x, y = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        return Box(x, y, x, y)


def texts(root: ET.Element) -> list[tuple[str, Box]]:
    """Every text with its ink extents in DejaVu."""
    found = []
    for element in root.iter(f"{SVG}text"):
        words, size = element.text or "", float(element.attrib["font-size"])
        family = "DejaVu Sans Mono" if "font-family" in element.attrib else "DejaVu Sans"
        weight = "bold" if "font-weight" in element.attrib else "normal"
        ink = TextPath((0, 0), words, size=size, prop=FontProperties(family=family, weight=weight)).get_extents()
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.attrib["text-anchor"]]
        left, baseline = float(element.attrib["x"]) - share * ink.x1, float(element.attrib["y"])
        found.append((words, Box(left + ink.x0, baseline - ink.y1, left + ink.x1, baseline - ink.y0)))
    return found


def frames(root: ET.Element) -> list[Box]:
    """Every rectangle with an outline."""
    found = []
    for element in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
        if element.attrib["stroke"] != "none":
            found.append(Box(x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_no_text_leaves_its_figure_or_its_box(path: Path) -> None:
    root = ET.parse(path).getroot()
    sheet = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    found = texts(root)
    assert len(found) > 5
    for words, box in found:
        around = [sheet, *(frame for frame in frames(root) if frame.holds(box.middle))]
        assert all(one.holds(box) for one in around), f"{path.name}: {words!r} at {box}"


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_no_text_covers_another(path: Path) -> None:
    for (words, box), (other, at) in combinations(texts(ET.parse(path).getroot()), 2):
        assert not box.meets(at), f"{path.name}: {words!r} and {other!r}"
