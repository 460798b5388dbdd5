"""The bundler on a package made for the purpose: names that clash, f-strings, unused methods, old spellings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from polyconv.export.bundle import BundleError, bundle

FILES = {
    "shapes.py": '''"""Shapes: see :class:`~shop.shapes.Square`."""

from __future__ import annotations

import math
from dataclasses import dataclass

Pair = tuple[int, int]
"""Two numbers."""
UNUSED = 1


# A comment that belongs to it.
@dataclass(frozen=True, slots=True)
class Square:
    side: int

    @property
    def area(self) -> int:
        return self.side**2

    def never_called(self) -> float:
        return math.sqrt(self.side)

    def __str__(self) -> str:
        return f"square of {self.side}"


def area(square: Square) -> int:
    """Of one."""
    return square.area
''',
    "prices.py": '''"""What things cost."""

from __future__ import annotations

from . import shapes
from .shapes import Pair, Square

RATE = 3


def area(square: Square) -> int:
    return RATE * shapes.area(square)


def quote(pair: Pair) -> str:
    RATE = "local"  # shadows nothing that is used here
    squares = [Square(side) for side in pair]
    return f"{area(squares[0])} and {shapes.area(squares[1])} {RATE}"
''',
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)


ENTRY = '"""The entry."""\n\nfrom shop.prices import quote\n\n\ndef main():\n    return quote((2, 3))\n'


@pytest.mark.usefixtures("shop")
def test_one_file_that_does_the_same() -> None:
    text = bundle(ENTRY, package="shop", replaced={})
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "bundled", "exec"), namespace)
    assert namespace["main"]() == "12 and 9 local"
    assert "def shapes_area" in text
    assert "def prices_area" in text
    assert "UNUSED" not in text
    assert "never_called" not in text
    assert "import math" not in text
    assert "slots=True" not in text
    assert "Pair = Tuple[int, int]" in text
    assert "# A comment that belongs to it.\n@dataclass(frozen=True)" in text
    assert "# ---- Shapes: see Square." in text
    assert text.startswith('"""The entry."""\n\nfrom __future__ import annotations\n')


@pytest.mark.usefixtures("shop")
def test_a_module_can_be_replaced_and_a_method_dropped() -> None:
    replaced = {"shop.prices": "from .shapes import Square\n\n\ndef quote(pair):\n    return Square(pair[1]).area\n"}
    text = bundle(ENTRY, package="shop", replaced=replaced, dropped=["shop.shapes.Square.__str__"])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "bundled", "exec"), namespace)
    assert namespace["main"]() == 9
    assert "__str__" not in text


@pytest.mark.usefixtures("shop")
def test_what_cannot_be_carried_over_is_named() -> None:
    with pytest.raises(BundleError, match=r"shop\.shapes does not define circle"):
        bundle("from shop.shapes import circle\n\nx = circle\n", package="shop", replaced={})
    with pytest.raises(BundleError, match="module shapes is used as a value"):
        bundle('"""Entry."""\nfrom shop import shapes\n\nx = shapes\n', package="shop", replaced={})
    with pytest.raises(BundleError, match="statement in line 2"):
        bundle('"""Entry."""\nfor i in ():\n    pass\n', package="shop", replaced={})
