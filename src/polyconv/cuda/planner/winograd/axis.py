"""One axis of a Winograd (Cook-Toom) kernel: the counts that its launches need, and the C++ of its transforms.

The mathematics is in :mod:`polyconv.algebra`. Planning needs only counts, which follow from m, the segments and the
tiles; the algebra is imported lazily, for a kernel's source and its error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ....util.cached import cached_property

if TYPE_CHECKING:
    from ....algebra.matrices import Matrix
    from ....algebra.segments import AxisScheme


@dataclass(frozen=True)
class ToomAxis:
    """F(m, longest segment) along one axis; segments of taps are added up, or nested by F(tiles, segments).

    ``ToomAxis(4, (4, 5), 2)`` is F(4,5) for nine taps, cut 4 + 5, nested by F(2,2). ``ToomAxis(1, (3,))`` is direct.
    """

    m: int
    segments: tuple[int, ...]
    """Taps of each segment."""
    tiles: int = 1
    """Tiles of m outputs computed together: more than one if segments are nested."""

    @cached_property
    def taps(self) -> int:
        return sum(self.segments)

    @cached_property
    def longest(self) -> int:
        return max(self.segments)

    @cached_property
    def points(self) -> int:
        """Products of the inner algorithm; also the inputs of its tile."""
        return self.m + self.longest - 1

    @cached_property
    def passes(self) -> int:
        """Products of the outer algorithm, over segments and tiles."""
        return self.tiles + len(self.segments) - 1 if self.tiles > 1 else len(self.segments)

    @cached_property
    def outputs(self) -> int:
        """Outputs computed together."""
        return self.m * self.tiles

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First inputs of the outer algorithm's input tiles."""
        if self.tiles > 1:
            return tuple(tile * self.m for tile in range(self.passes))
        return tuple(sum(self.segments[:s]) for s in range(len(self.segments)))

    @cached_property
    def span(self) -> int:
        """Inputs read for the outputs computed together."""
        return self.offsets[-1] + self.points

    @cached_property
    def is_direct(self) -> bool:
        return self.m == 1

    @cached_property
    def struct(self) -> str:
        """C++ name of the struct of emitted transforms."""
        return "Toom" + "_".join(map(str, (self.m, *self.segments, self.tiles)))

    @property
    def cpp(self) -> str:
        return f"polyconv::{self.struct}"

    @cached_property
    def counts(self) -> dict[str, int]:
        """Constants of the C++ struct, as ``k<name>``."""
        return {
            "M": self.m,
            "Longest": self.longest,
            "Points": self.points,
            "Segments": len(self.segments),
            "Tiles": self.tiles,
            "Passes": self.passes,
            "OuterInputs": len(self.offsets),
            "Outputs": self.outputs,
            "Span": self.span,
        }

    @cached_property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """Lookup functions of the C++ struct, by index of a segment or of an input tile."""
        first_taps = tuple(sum(self.segments[:s]) for s in range(len(self.segments)))
        return {"offset": self.offsets, "first_tap": first_taps, "taps": self.segments}

    def transforms(self) -> dict[str, Matrix]:
        """Matrices of the inner algorithm, by the names of their C++ methods."""
        from ....algebra.matrices import transpose

        inner = self.scheme().inner
        return {
            "input": inner.bt,
            "output": inner.at,
            "weights": inner.g,
            "spread": transpose(inner.at),
            "collect": transpose(inner.g),
        }

    def scheme(self) -> AxisScheme:
        """The axis as an exact algorithm."""
        return _scheme(self)

    def text(self) -> str:
        """C++ struct with the transforms, for a kernel that includes winograd/axis.cuh."""
        return _struct(self)

    def __str__(self) -> str:
        return str(self.scheme())


@lru_cache(maxsize=256)
def _scheme(axis: ToomAxis) -> AxisScheme:
    from ....algebra.segments import AxisScheme

    return AxisScheme.cut(axis.m, axis.taps, *axis.segments, tiles=axis.tiles)


@lru_cache(maxsize=256)
def _struct(axis: ToomAxis) -> str:
    lines = [
        f"// {axis.scheme()}",
        f"struct {axis.struct} {{",
        *(f"  static constexpr int k{name} = {value};" for name, value in axis.counts.items()),
        *(
            f"  static POLYCONV_INLINE constexpr int {name}({index_of(values)}) {{ return {choice_of(values)}; }}"
            for name, values in axis.tables.items()
        ),
        *(_method(name, matrix) for name, matrix in axis.transforms().items()),
        "};",
    ]
    return "\n".join(["namespace polyconv {", *lines, "}  // namespace polyconv", ""])


def index_of(values: tuple[int, ...]) -> str:
    """Parameter of a C++ function from index to value; unnamed if there is one value."""
    return "int i" if len(values) > 1 else "int"


def choice_of(values: tuple[int, ...]) -> str:
    """Return expression of such a function: device code has no static arrays that fold to constants."""
    choice = str(values[-1])
    for index, value in reversed(list(enumerate(values[:-1]))):
        choice = f"i == {index} ? {value} : {choice}"
    return choice


def _method(name: str, matrix: Matrix) -> str:
    from ....algebra.emit import emit_transform

    text = emit_transform(name, matrix, rounded=True).replace("\nPOLYCONV_INLINE", "\nstatic POLYCONV_INLINE")
    return "".join(f"  {line}\n" for line in text.rstrip("\n").split("\n")).rstrip("\n")
