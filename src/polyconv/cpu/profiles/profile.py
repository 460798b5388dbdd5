"""Measurements of a processor, and the corrections of the cost model's estimates that follow from them.

The error of an estimate depends on the kernel and the processor, most of all for ATen, whose kernels the cost model
does not know. A profile holds timed problems: kernels of every engine, interleaved with ATen's convolution. For a new
problem its neighbours tell how wrong the estimated ratio between a kernel and ATen was (the shift), and how much such
errors scatter (the doubt, an uncertainty). Far from all measurements the doubt is that of the cost model.

A polyconv kernel runs if it is ahead of ATen by more than the doubt. A problem is covered if measured problems of its
class weigh enough: of its pass and layout, with similar channels, groups, taps, stride, dilation, batch and pixels
(:func:`place_of`). Otherwise the doubt counts twice, and is larger beyond the extents that the cost model was fitted to
(:func:`is_extreme`): ATen runs unless the advantage is large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import exp, log, log2, prod, sqrt
from operator import add
from typing import NamedTuple, Protocol, runtime_checkable

from ...problem import Extents, Pair, Pass, Problem
from ...util.intmath import ceil_div
from .trend import Moments, plane_through

CAUTION = 1.4
"""Required lead over ATen, in standard deviations."""
UNCOVERED_CAUTION = 2.8
"""Required lead for a problem that is not covered."""
COVERED = 0.25
"""Total weight of neighbours from which a problem is covered. A measured problem at distance 0 weighs 1."""
REACH = 1.0
"""Standard deviation of the Gaussian weight of a neighbour, in the units of :func:`place_of`."""
FAR = 3.0
"""Neighbours beyond this multiple of :data:`REACH` are ignored."""
MODEL_WEIGHT = 0.1
"""Weight of the prior, the cost model or a fallback profile; a measured problem at distance 0 weighs 1."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of the estimated ratio of a kernel's time to ATen's, in natural logarithms."""

    shift: float
    doubt: float
    """Standard deviation."""
    covered: bool = field(default=True, compare=False)
    """True if enough was measured nearby."""
    caution: float = field(default=CAUTION, compare=False)
    """Standard deviations added in :attr:`factor`."""

    @property
    def factor(self) -> float:
        """Conservative factor for an estimate: a kernel chosen despite it is probably faster than ATen."""
        return exp(self.shift + self.caution * self.doubt)

    def elsewhere(self, doubt: float) -> Correction:
        """The correction with more uncertainty, for another processor."""
        return Correction(self.shift, sqrt(self.doubt**2 + doubt**2), self.covered, self.caution)


Formula = tuple[str, bool, bool]
Errors = tuple[tuple[Formula, float], ...]
Place = tuple[float, ...]
CHANGING = (3, 4)
"""Coordinates of :func:`place_of` that depend on the batch and the map size, not on the layer."""
ENOUGH_PIXELS = 2**18
"""Outputs from which on another image takes as long as the last: more images change no error."""

UNMEASURED = Correction(0.4, 0.5, covered=False)
"""Cost model without measurements: optimistic about polyconv's kernels, one time in three wrong by a factor of 1.6."""
UNHEARD = replace(UNMEASURED, caution=UNCOVERED_CAUTION)
"""The same where there are measurements, but none nearby."""
EXTREME = Correction(0.4, 1.1, covered=False, caution=UNCOVERED_CAUTION)
"""Cost model beyond the extents that it was fitted to, where errors of 4 to 20 times were measured
(``benchmarks/cpu/uncovered_classes.py``). The depthwise kernel interleaves the sums of several rows; a signal has one
row, so its products wait for one another. No kernel skips taps of a wide dilation that meet no pixel."""
MOST_TAPS, MOST_TAPS_OF_SIGNAL, MOST_STRIDE, MOST_DILATION = 31, 16, 8, 64
"""Largest values along an axis in the layers that the cost model was fitted to."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Measured time and estimated cycles of one call."""

    seconds: float
    cycles: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A candidate of an engine."""

    name: str
    """The planner's name: ``F(4,3) x F(4,3), tile lanes``."""
    kept: bool = False
    """The weight was transformed by an earlier call."""

    @property
    def formula(self) -> Formula:
        """Kernels estimated by one formula have similar errors: those of an engine, direct or fast."""
        return formula_of(self.name, self.kept)


def formula_of(name: str, kept: bool) -> Formula:
    form, _, engine = name.rpartition(", ")
    return engine, form == "direct", kept


@dataclass(frozen=True, slots=True)
class Record:
    """A measured problem: ATen's convolution and polyconv's kernels."""

    problem: Problem
    torch: Spent
    kernels: tuple[tuple[Kernel, Spent], ...]

    def errors(self) -> Errors:
        """Logarithm by which the estimated ratio of each kernel to ATen was too small."""
        return tuple(
            (kernel.formula, log(spent.seconds / self.torch.seconds) - log(spent.cycles / self.torch.cycles))
            for kernel, spent in self.kernels
        )


Room = tuple[Pass, bool]


@runtime_checkable
class Measurements(Protocol):
    """Records that a profile reads lazily."""

    def __len__(self) -> int:
        """Number of records."""

    def of_pass(self, kind: Pass) -> Iterable[tuple[Room, Place, Callable[[], Errors]]]:
        """Room and place of each problem of a pass, with a callable for :meth:`Record.errors`."""


class Profile:
    """Measured problems of one processor. Immutable."""

    def __init__(
        self, name: str, records: Iterable[Record], behind: Profile | None = None, distance: float = 0.0
    ) -> None:
        self.name = name
        """Processor and environment, for messages."""
        self.behind = behind
        """Fallback profile, the prior of this one."""
        self.distance = distance
        """Additional uncertainty of the fallback."""
        self._measurements = records if isinstance(records, Measurements) else _InMemory(records)
        self._measured = lru_cache(maxsize=len(Pass))(self._read)
        self._near_layer = lru_cache(maxsize=256)(self._listen_near_layer)
        self._corrected = lru_cache(maxsize=2048)(self._correct)

    @cached_property
    def identity(self) -> str:
        """Text of all that corrections depend on. A shipped profile is part of the package: its name is enough."""
        here = self._measurements if isinstance(self._measurements, _InMemory) else ""
        behind = self.behind.identity if self.behind is not None else ""
        return f"{self.name} {self.distance} {here} {behind}"

    def correction(self, problem: Problem, kernel: Kernel) -> Correction:
        return self.corrected(problem, kernel.formula)

    def corrected(self, problem: Problem, formula: Formula) -> Correction:
        """Correction for all kernels of one formula on a problem."""
        found = self._corrected(*_situation(problem), formula)
        return EXTREME if not found.covered and is_extreme(problem) else found

    def _correct(self, room: Room, place: Place, formula: Formula) -> Correction:
        prior = UNMEASURED
        if self.behind is not None:
            prior = self.behind._corrected(room, place, formula).elsewhere(self.distance)
        elif len(self._measurements):
            prior = UNHEARD
        if not len(self._measurements):
            return prior
        heard = self._listen(room, place, formula)
        count = heard.n
        if not count:
            return prior
        shift, squares = plane_through(heard, prior.shift, MODEL_WEIGHT)
        scatter = (MODEL_WEIGHT * prior.doubt**2 + squares) / (MODEL_WEIGHT + count)
        covered = count >= COVERED or prior.covered
        if not covered:
            shift = max(shift, prior.shift)  # an advantage is not extrapolated
        # The shift is estimated from few problems, and itself uncertain.
        doubt = sqrt(scatter * (1.0 + min(count, 1.0 / count)))
        return Correction(shift, doubt, covered, CAUTION if covered else UNCOVERED_CAUTION)

    def _read(self, kind: Pass) -> dict[Room, list[tuple[Place, Callable[[], Errors]]]]:
        """Measurements of a pass, by room."""
        found: dict[Room, list[tuple[Place, Callable[[], Errors]]]] = {}
        for room, place, errors in self._measurements.of_pass(kind):
            found.setdefault(room, []).append((place, errors))
        return found

    def _listen_near_layer(self, room: Room, layer: Place) -> dict[Formula, list[_Group]]:
        """Neighbours of a layer at any batch and map size, by formula. ``layer``: a place with zeros for
        :data:`CHANGING`."""
        near: dict[Formula, dict[tuple[float, float], list[tuple[float, tuple[float, ...]]]]] = {}
        for there, errors in self._measured(room[0]).get(room, ()):
            steps = [a - b for a, b in zip(_without_sizes(there), layer, strict=True)]
            apart = sum([step * step for step in steps])
            if apart < FAR**2 * REACH**2:
                sizes = there[CHANGING[0]], there[CHANGING[1]]
                weight, (c, k) = exp(-apart / (2.0 * REACH**2)), steps[:2]
                for formula, e in errors():
                    products = (1.0, c, k, c * c, c * k, k * k, e, c * e, k * e, e * e)
                    weighed = tuple([weight * product for product in products])
                    near.setdefault(formula, {}).setdefault(sizes, []).append((apart, weighed))
        return {
            formula: [_Group.of(*sizes, sorted(found)) for sizes, found in groups.items()]
            for formula, groups in near.items()
        }

    def _listen(self, room: Room, place: Place, formula: Formula) -> Moments:
        """Weighted moments of the errors near a place."""
        groups = self._near_layer(room, _without_sizes(place)).get(formula, ())
        batch, size = place[CHANGING[0]], place[CHANGING[1]]
        farthest = FAR**2 * REACH**2
        n = c = k = b = s = e = cc = ck = kk = cb = kb = bb = cs = ks = bs = ss = ce = ke = be = se = ee = 0.0
        for other_batch, other_size, reaches, sums in groups:
            d, f = other_batch - batch, other_size - size
            apart = d * d + f * f
            if apart < farthest and (heard := bisect_left(reaches, farthest - apart)):
                one, of_c, of_k, of_cc, of_ck, of_kk, of_e, of_ce, of_ke, of_ee = sums[heard - 1]
                weight = exp(-apart / (2.0 * REACH**2))
                n += weight * one
                c += weight * of_c
                k += weight * of_k
                cc += weight * of_cc
                ck += weight * of_ck
                kk += weight * of_kk
                e += weight * of_e
                ce += weight * of_ce
                ke += weight * of_ke
                ee += weight * of_ee
                if d:
                    along = weight * d
                    b += along * one
                    cb += along * of_c
                    kb += along * of_k
                    be += along * of_e
                    bb += along * d * one
                    bs += along * f * one
                along = weight * f
                s += along * one
                cs += along * of_c
                ks += along * of_k
                se += along * of_e
                ss += along * f * one
        return Moments(n, c, k, b, s, e, cc, ck, kk, cb, kb, bb, cs, ks, bs, ss, ce, ke, be, se, ee)

    def __str__(self) -> str:
        return self.name


class _Group(NamedTuple):
    """Errors of one formula near a layer, for problems of one batch and map size. For another batch or map size the
    sums of a fit change only by a common weight and by the number of problems within reach; hence prefix sums by
    ascending distance."""

    batch: float
    size: float
    """Coordinates of :func:`place_of`."""
    reaches: list[float]
    """Squared distances in all other coordinates, in ascending order."""
    sums: list[tuple[float, ...]]
    """Prefix sums, weighted by these distances, of 1, c, k, their products, the error e, its products with c and k, and
    its square. c and k are steps along the axes of the channels."""

    @classmethod
    def of(cls, batch: float, size: float, found: list[tuple[float, tuple[float, ...]]]) -> _Group:
        weighed = (products for _, products in found)
        sums = list(accumulate(weighed, lambda some, others: tuple(map(add, some, others))))
        return cls(batch, size, [apart for apart, _ in found], sums)


class _InMemory:
    def __init__(self, records: Iterable[Record]) -> None:
        self._records = tuple(records)

    def __len__(self) -> int:
        return len(self._records)

    def __str__(self) -> str:
        return str(self._records)

    def of_pass(self, kind: Pass) -> Iterable[tuple[Room, Place, Callable[[], Errors]]]:
        of_kind = (record for record in self._records if record.problem.kind is kind)
        return ((_room(record.problem), place_of(record.problem), record.errors) for record in of_kind)


def _without_sizes(place: Place) -> Place:
    before, after = CHANGING
    return (*place[:before], 0.0, 0.0, *place[after + 1 :])


@lru_cache(maxsize=64)
def _situation(problem: Problem) -> tuple[Room, Place]:
    return _room(problem), place_of(problem)


def _room(problem: Problem) -> Room:
    """Pass and layout. Problems in different rooms are not compared."""
    return problem.kind, is_channels_last(problem)


def is_channels_last(problem: Problem) -> bool:
    """By the input's strides; by the output's if the input has one channel, whose layouts coincide."""
    if problem.in_channels > 1:
        return problem.x_strides[1] == 1
    return problem.y_strides[1] == 1 and problem.out_channels > 1


def is_extreme(problem: Problem) -> bool:
    """True beyond the layers that the cost model was fitted to: more taps, larger strides or dilations, or an input
    gradient whose image is over four times as long as its outputs times the stride."""
    axes = zip(problem.in_size, problem.out_size, problem.stride, strict=True)
    border = problem.kind is Pass.DGRAD and any(size > 4 * out * stride for size, out, stride in axes)
    most_taps = MOST_TAPS_OF_SIGNAL if _is_signal(problem) else MOST_TAPS
    wide = max(problem.stride) > MOST_STRIDE or max(problem.dilation) > MOST_DILATION
    return max(problem.kernel) > most_taps or wide or border


def _is_signal(problem: Problem) -> bool:
    """True for a 1-D problem, lowered to height 1."""
    return problem.in_size[0] == problem.kernel[0] == 1


def in_words(problem: Problem) -> str:
    """Describe the class of a problem: what its neighbours have nearly in common with it."""
    kind = "depthwise" if problem.depthwise else "grouped" if problem.groups > 1 else "dense"
    what = "signals" if _is_signal(problem) else "images"
    moved = [f"{name} {_by(sizes)}" for name, sizes in _moves(problem) if max(sizes) > 1]
    taps = " ".join([f"{_by(problem.kernel)} taps", *(["with", " and ".join(moved)] if moved else [])])
    layout = "channels_last" if is_channels_last(problem) else "NCHW"
    channels, outputs = problem.channels_per_group
    return (
        f"{kind} {problem.kind} of {what}, {taps}, {channels} to {outputs} channels in {problem.groups} group"
        f"{'s' if problem.groups > 1 else ''}, {problem.batch} of {_by(problem.out_size)} in {layout}"
    )


def _moves(problem: Problem) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ("stride", problem.stride), ("dilation", problem.dilation)


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def place_of(problem: Problem) -> Place:
    """Coordinates of a problem in its room: logarithms of sizes, weighted by their influence."""
    return place_at(
        problem.channels_per_group,
        problem.groups,
        problem.batch,
        problem.out_size,
        problem.kernel,
        prod(problem.stride),
        prod(problem.dilation),
    )


def place_at(
    channels: Pair, groups: int, batch: int, out_size: Extents, kernel: Extents, strides: int, dilations: int
) -> Place:
    """:func:`place_of` from numbers; ``strides`` and ``dilations`` are the products over both axes."""
    c, k = channels
    batch = min(batch, ceil_div(ENOUGH_PIXELS, max(1, prod(out_size))))
    return (
        0.5 * _log(c),
        0.5 * _log(k),
        0.5 * _log(groups),
        0.35 * _log(batch),
        0.5 * _log(prod(out_size)),
        1.5 * _log(kernel[0]),
        1.5 * _log(kernel[1]),
        1.5 * _log(strides),
        0.7 * _log(dilations),
        2.0 * (out_size[0] == 1),  # a signal differs from a 2-D map of as many pixels
    )


def _log(size: int) -> float:
    return log2(max(1, size))
