"""What was measured of a processor, and what it makes of the cost model's estimates.

The cost model counts. How far a count is from the truth differs from kernel to kernel and from processor to processor,
most of all for PyTorch's kernels, whose insides it does not know. A profile has problems that were timed, kernels of
every engine in turn with PyTorch's convolution. Of a new problem it asks those that lie near it: how wrong was the
estimated ratio between a kernel and PyTorch's there (the shift), and how much do such errors scatter (the doubt)? Far
from everything that was measured, the doubt is that of the model alone.

A kernel of polyconv's runs where it is ahead of PyTorch's by more than the doubt. A problem is covered where measured
problems of its class weigh enough: those of its pass and layout with nearly its channels, groups, taps, stride,
dilation, images and pixels (:func:`place_of`). Where it is not covered, the doubt counts twice, and it is larger where
the cost model was fitted to nothing of such extents (:func:`is_extreme`): PyTorch's convolution runs unless the
advantage is large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import exp, log, log2, prod, sqrt
from operator import add
from typing import NamedTuple, Protocol, runtime_checkable

from ...problem import Extents, Pair, Pass, Problem
from .trend import Moments, plane_through

CAUTION = 1.4
"""Doubts by which a kernel must be ahead of PyTorch's."""
UNCOVERED_CAUTION = 2.8
"""The same where no measured problem is near enough."""
COVERED = 0.25
"""Weight of measured problems from which on a problem is covered: one that lies at its place weighs one."""
REACH = 1.0
"""How far a measured problem is heard, in the units of :func:`place_of`."""
FAR = 3.0
"""From so many times that distance on, it is not heard at all."""
MODEL_WEIGHT = 0.1
"""What the model's own word weighs beside measured problems, each of which weighs one where it lies."""
TRENDS = (0, 1, 3, 4)
"""Coordinates of :func:`place_of` along which errors may grow: channels in and out, images, the size of the map."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Of the ratio between the estimated times of a kernel and of PyTorch's, in natural logarithms."""

    shift: float
    doubt: float
    """A standard deviation."""
    covered: bool = field(default=True, compare=False)
    """Whether enough was measured nearby to go by it."""
    caution: float = field(default=CAUTION, compare=False)
    """Doubts that count."""

    @property
    def factor(self) -> float:
        """What an estimate is to be multiplied by, so that a kernel which is chosen all the same is ahead, probably."""
        return exp(self.shift + self.caution * self.doubt)

    def elsewhere(self, doubt: float) -> Correction:
        """The same for another processor, of which less is known."""
        return replace(self, doubt=sqrt(self.doubt**2 + doubt**2))


Formula = tuple[str, bool, bool]
Errors = tuple[tuple[Formula, float], ...]
Place = tuple[float, ...]
CHANGING = (3, 4)
"""Coordinates of :func:`place_of` that change with the batch and the size of the map: not with the layer."""

UNMEASURED = Correction(0.4, 0.5, covered=False)
"""Of the cost model alone: it thinks well of polyconv's kernels, and one time in three is wrong by a factor of 1.6."""
EXTREME = Correction(0.4, 1.1, covered=False, caution=UNCOVERED_CAUTION)
"""Of the cost model beyond the extents that it was fitted to. Where that was measured it was wrong by factors of 4 to
20 (``benchmarks/cpu/uncovered_classes.py``): the depthwise kernel sums several rows side by side and a signal has one,
so its products wait for one another; and no kernel skips taps of a wide dilation that meet no pixel."""
MOST_TAPS, MOST_TAPS_OF_SIGNAL, MOST_STRIDE, MOST_DILATION = 31, 16, 8, 64
"""Along an axis, in the layers that the cost model was fitted to."""


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of one call, measured and estimated."""

    seconds: float
    cycles: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A candidate of an engine's."""

    name: str
    """``F(4,3) x F(4,3), tile lanes``: as the planner calls it."""
    kept: bool = False
    """With weights that were prepared by an earlier call."""

    @property
    def formula(self) -> Formula:
        """Kernels that are estimated by one formula are wrong alike: those of an engine, direct or fast ones."""
        return formula_of(self.name, self.kept)


def formula_of(name: str, kept: bool) -> Formula:
    """That of the kernel of this name, whose weights are kept or not."""
    form, _, engine = name.rpartition(", ")
    return engine, form == "direct", kept


@dataclass(frozen=True, slots=True)
class Record:
    """A problem that was measured: PyTorch's convolution, and kernels of polyconv's."""

    problem: Problem
    torch: Spent
    kernels: tuple[tuple[Kernel, Spent], ...]

    def errors(self) -> Errors:
        """By how much the estimated ratio of each kernel to PyTorch's was too small, as a logarithm."""
        return tuple(
            (kernel.formula, log(spent.seconds / self.torch.seconds) - log(spent.cycles / self.torch.cycles))
            for kernel, spent in self.kernels
        )


Room = tuple[Pass, bool]


@runtime_checkable
class Measurements(Protocol):
    """Records of which a profile reads no more than it is asked about."""

    def __len__(self) -> int:
        """How many there are."""

    def of_pass(self, kind: Pass) -> Iterable[tuple[Room, Place, Callable[[], Errors]]]:
        """Where the problems of a pass lie, each with what gives :meth:`Record.errors`."""


class Profile:
    """Measured problems of one processor. Never changed once it is made."""

    def __init__(
        self, name: str, records: Iterable[Record], behind: Profile | None = None, distance: float = 0.0
    ) -> None:
        self.name = name
        """For people: which processor, and with what."""
        self.behind = behind
        """Another profile, believed where this one has nothing."""
        self.distance = distance
        """How much less that one is to be believed: a doubt."""
        self._measurements = records if isinstance(records, Measurements) else _InMemory(records)
        self._measured = lru_cache(maxsize=len(Pass))(self._read)
        self._near_layer = lru_cache(maxsize=256)(self._listen_near_layer)
        self._corrected = lru_cache(maxsize=2048)(self._correct)

    def correction(self, problem: Problem, kernel: Kernel) -> Correction:
        """For a kernel on a problem."""
        return self.corrected(problem, kernel.formula)

    def corrected(self, problem: Problem, formula: Formula) -> Correction:
        """For all kernels of one formula on a problem."""
        found = self._corrected(*_situation(problem), formula)
        return EXTREME if not found.covered and is_extreme(problem) else found

    def _correct(self, room: Room, place: Place, formula: Formula) -> Correction:
        prior = UNMEASURED
        if self.behind is not None:
            prior = self.behind._corrected(room, place, formula).elsewhere(self.distance)
        elif len(self._measurements):
            prior = replace(prior, caution=UNCOVERED_CAUTION)
        heard = self._listen(room, place, formula)
        count = heard[0][0]
        if not count:
            return prior
        shift, squares = plane_through(heard, prior.shift, MODEL_WEIGHT)
        scatter = (MODEL_WEIGHT * prior.doubt**2 + squares) / (MODEL_WEIGHT + count)
        covered = count >= COVERED or prior.covered
        if not covered:
            shift = max(shift, prior.shift)  # an advantage is not taken from afar
        # The shift is found from so many, and itself uncertain.
        doubt = sqrt(scatter * (1.0 + min(count, 1.0 / count)))
        return Correction(shift, doubt, covered, CAUTION if covered else UNCOVERED_CAUTION)

    def _read(self, kind: Pass) -> dict[Room, list[tuple[Place, Callable[[], Errors]]]]:
        """What was measured of a pass, by room."""
        found: dict[Room, list[tuple[Place, Callable[[], Errors]]]] = {}
        for room, place, errors in self._measurements.of_pass(kind):
            found.setdefault(room, []).append((place, errors))
        return found

    def _listen_near_layer(self, room: Room, layer: Place) -> dict[Formula, list[_Group]]:
        """What may be near a layer, whatever the batch and the size of the map, by formula.

        ``layer``: a place with zeros for :data:`CHANGING`.
        """
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
        """What was measured near a place."""
        groups = self._near_layer(room, _without_sizes(place)).get(formula, ())
        batch, size = place[CHANGING[0]], place[CHANGING[1]]
        n = c = k = b = s = e = cc = ck = kk = cb = kb = bb = cs = ks = bs = ss = ce = ke = be = se = ee = 0.0
        for group in groups:
            d, f = group.batch - batch, group.size - size
            apart = d * d + f * f
            heard = bisect_left(group.reaches, FAR**2 * REACH**2 - apart)
            if heard:
                one, of_c, of_k, of_cc, of_ck, of_kk, of_e, of_ce, of_ke, of_ee = group.sums[heard - 1]
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
        return [n], [c, cc], [k, ck, kk], [b, cb, kb, bb], [s, cs, ks, bs, ss], [e, ce, ke, be, se, ee]

    def __str__(self) -> str:
        return self.name


class _Group(NamedTuple):
    """Errors of one formula near a layer, of problems of one batch and one size of the map.

    What is summed over them for a fit does not change with the batch and the size that are asked about, but for the
    weight of the whole and for which of them are too far: those come last.
    """

    batch: float
    size: float
    """As coordinates of :func:`place_of`."""
    reaches: list[float]
    """Squared distances in all other coordinates, in ascending order."""
    sums: list[tuple[float, ...]]
    """Of the first, of the first two, and so on, weighed by these distances: of 1, c, k, their products, the error e,
    its products with c and k, and its square. c and k are steps along the axes of the channels."""

    @classmethod
    def of(cls, batch: float, size: float, found: list[tuple[float, tuple[float, ...]]]) -> _Group:
        weighed = (products for _, products in found)
        sums = list(accumulate(weighed, lambda some, others: tuple(map(add, some, others))))
        return cls(batch, size, [apart for apart, _ in found], sums)


class _InMemory:
    """Records that are there."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = tuple(records)

    def __len__(self) -> int:
        return len(self._records)

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
    """Problems in different rooms say nothing about one another: of another pass, or in another layout."""
    return problem.kind, is_channels_last(problem)


def is_channels_last(problem: Problem) -> bool:
    """By the input; by the output, if the input has one channel and so lies alike in both layouts."""
    if problem.in_channels > 1:
        return problem.x_strides[1] == 1
    return problem.y_strides[1] == 1 and problem.out_channels > 1


def is_extreme(problem: Problem) -> bool:
    """Whether a problem has extents that no layer has which the cost model was fitted to: longer taps, wider strides or
    dilations, or, in an input gradient, an image that is mostly border to the taps."""
    axes = zip(problem.in_size, problem.out_size, problem.stride, strict=True)
    border = problem.kind is Pass.DGRAD and any(size > 4 * out * stride for size, out, stride in axes)
    most_taps = MOST_TAPS_OF_SIGNAL if _is_signal(problem) else MOST_TAPS
    wide = max(problem.stride) > MOST_STRIDE or max(problem.dilation) > MOST_DILATION
    return max(problem.kernel) > most_taps or wide or border


def _is_signal(problem: Problem) -> bool:
    """Whether it is a picture of height 1."""
    return problem.in_size[0] == problem.kernel[0] == 1


def in_words(problem: Problem) -> str:
    """The class of a problem: what those that say something about it have nearly in common with it."""
    kind = "depthwise" if problem.depthwise else "grouped" if problem.groups > 1 else "dense"
    what = "signals" if _is_signal(problem) else "pictures"
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
    """Where a problem lies among others of its room: sizes as logarithms, each weighed by how much it decides."""
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
    """The same from numbers; ``strides`` and ``dilations`` are the products over both axes."""
    c, k = channels
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
        2.0 * (out_size[0] == 1),  # a signal is no picture of as many pixels
    )


def _log(size: int) -> float:
    return log2(max(1, size))
