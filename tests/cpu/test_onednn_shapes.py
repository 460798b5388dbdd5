"""oneDNN's own test convolutions: all three passes against float64 and the predicted error.

Every geometry is kept (kernel, stride, dilation, padding per side, group structure). Batch, maps and channels are
reduced to what a float64 reference can afford, keeping the remainders that make edges: of outputs modulo eight, of
channels modulo sixteen. A tenth runs on every change, all with ``POLYCONV_NIGHTLY=1``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch import Tensor

from nightly import NIGHTLY
from polyconv import dispatch
from polyconv.arguments import Geometry
from polyconv.cpu.planner import plan_cpu
from polyconv.measure.operands import Operands
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem

SHAPES = Path(__file__).parents[3] / "shared" / "onednn_shapes.jsonl"
if not SHAPES.exists():
    pytest.skip("the list of oneDNN's shapes is not here", allow_module_level=True)

CHUNKS = 64
TENTH = 10
ABSOLUTE = RELATIVE = 1e-4
"""Per element: relative to the output map's scale, and to the element."""
LARGEST_MAP = 48
MOST_MULTIPLICATIONS = 50e6


@dataclass(frozen=True)
class Case:
    batch: int
    groups: int
    channels: tuple[int, int]
    """Input and output channels of one group."""
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]

    def problem(self, kind: Pass) -> Problem:
        c, k = self.channels
        return Problem.make(
            kind,
            (self.batch, self.groups * c, *self.size),
            (self.groups * k, c, *self.kernel),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=kind is not Pass.DGRAD,
        )

    @property
    def hash(self) -> int:
        """A hash that is the same in every process, unlike Python's."""
        return crc32(repr(self).encode())


# ---- reading and reducing


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Every geometry once, reduced."""
    with SHAPES.open(encoding="utf-8") as lines:
        read = [_read(json.loads(line)) for line in lines]
    return tuple(dict.fromkeys(_cut(case) for case in dict.fromkeys(read)))


def _read(entry: dict[str, list[int] | int]) -> Case:
    def pair(key: str) -> tuple[int, int]:
        first, second = entry[key]  # type: ignore[misc]
        return (first, second)

    n, c, k, g = (entry[key] for key in "nckg")
    assert isinstance(n, int)
    assert isinstance(c, int)
    assert isinstance(k, int)
    assert isinstance(g, int)
    top, bottom, left, right = entry["pad"]  # type: ignore[misc]
    case = Case(
        batch=n,
        groups=g,
        channels=(c // g, k // g),
        size=pair("in"),
        kernel=pair("kernel"),
        stride=pair("stride"),
        dilation=pair("dilation"),
        padding=(top, bottom, left, right),
    )
    assert case.problem(Pass.FPROP).out_size == pair("out")
    return case


def _cut(case: Case) -> Case:
    out = case.problem(Pass.FPROP).out_size
    size = tuple(_cut_map(case.size[axis], out[axis], case.stride[axis]) for axis in (0, 1))
    case = replace(case, batch=min(case.batch, 2), size=(size[0], size[1]))
    # Groups of few channels are vectorised like channels; of larger groups three suffice.
    alone = case.channels[0] == 1 or max(case.channels) <= 4
    for most in (128, 64, 32):
        groups = _cut_channels(case.groups, most) if alone else min(case.groups, 3)
        c, k = (_cut_channels(channels, most) for channels in case.channels)
        cut = replace(case, groups=groups, channels=(c, k))
        if cut.problem(Pass.FPROP).multiplications <= MOST_MULTIPLICATIONS:
            return cut
    return replace(cut, batch=1)


def _cut_map(extent: int, out: int, stride: int) -> int:
    """A smaller map with the same remainder of outputs modulo eight and of unread input rows."""
    if out <= LARGEST_MAP:
        return extent
    shorter = out - (LARGEST_MAP - 8 + out % 8)
    return extent - stride * max(0, min(shorter, (extent - 8) // stride))


def _cut_channels(channels: int, most: int) -> int:
    """Fewer channels with the same remainder modulo sixteen; ``most`` is a multiple of 32."""
    return channels if channels <= most else most // 2 + channels % 16


# ---- running


def failures(case: Case) -> Iterator[str]:
    """Errors of a case, as text."""
    operands = Operands.random(case.problem(Pass.WGRAD), seed=case.hash)
    assert operands.bias is not None
    assert operands.dy is not None
    tensors = {"x": operands.x, "w": operands.w, "bias": operands.bias, "y": operands.dy}
    for name, kind, found, expected in results(case, operands):
        problem = case.problem(kind)
        unit = scales(problem, tensors)["x" if name == "dx" else name]
        deviation = (found.double() - expected).abs()
        wrong = ~(deviation <= ABSOLUTE * unit + RELATIVE * expected.abs())
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            yield (
                f"{problem}: {name} is wrong in {int(wrong.sum())} of {wrong.numel()} elements, first at {first}: "
                f"{float(found[tuple(first)]):.6g} instead of {float(expected[tuple(first)]):.6g}"
            )
        elif name != "db":
            plan = plan_cpu(problem, inference=kind is Pass.FPROP)
            observed = largest(deviation, unit)
            if observed > plan.predicted_error:
                yield f"{problem}: {name} has the error {observed:.2e}; {plan.name} predicts {plan.predicted_error:.2e}"


def failures_and_errors(case: Case) -> list[str]:
    """Also catches exceptions, so that later geometries still run."""
    try:
        return list(failures(case))
    except Exception as error:
        return [f"{case.problem(Pass.FPROP)}: {type(error).__name__}: {error}"]


def results(case: Case, operands: Operands) -> Iterator[tuple[str, Pass, Tensor, Tensor]]:
    """Name, pass, polyconv's result and the reference of every output."""
    x, w, bias, dy = operands.x, operands.w, operands.bias, operands.dy
    assert bias is not None
    assert dy is not None
    geometry = Geometry(case.stride, case.padding, case.dilation, case.groups)
    dw64, db64 = reference.wgrad(geometry, x, dy, w.shape)
    yield "y", Pass.FPROP, dispatch.fprop(x, w, bias, *geometry), reference.fprop(geometry, x, w, bias)
    dx = dispatch.dgrad(dy, w, x.shape, False, *geometry)
    yield "dx", Pass.DGRAD, dx, reference.dgrad(geometry, dy, w, x.shape)
    dw, db = dispatch.wgrad(dy, x, w.shape, False, True, *geometry)
    yield "dw", Pass.WGRAD, dw, dw64
    yield "db", Pass.WGRAD, db, db64


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """New tensors are filled with NaN, so that unwritten outputs are found."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_agrees_with_float64(chunk: int) -> None:
    chosen = [case for case in cases() if NIGHTLY or case.hash % TENTH == 0]
    mine = [case for case in chosen if case.hash // TENTH % CHUNKS == chunk]
    wrong = [failure for case in mine for failure in failures_and_errors(case)]
    assert not wrong, f"{len(wrong)} failures in {len(mine)} geometries:\n" + "\n".join(wrong)


# ---- the reduction itself


def test_cutting_keeps_the_geometry() -> None:
    with SHAPES.open(encoding="utf-8") as lines:
        read = [_read(json.loads(line)) for line in lines]
    for case in read:
        cut = _cut(case)
        assert (cut.kernel, cut.stride, cut.dilation, cut.padding) == (
            case.kernel,
            case.stride,
            case.dilation,
            case.padding,
        )
        assert (cut.groups > 1) == (case.groups > 1)
        for before, after in zip(case.channels, cut.channels, strict=True):
            assert after == before or after % 16 == before % 16
        whole, part = case.problem(Pass.FPROP), cut.problem(Pass.FPROP)
        assert part.multiplications <= 4 * MOST_MULTIPLICATIONS
        for axis in (0, 1):
            assert min(whole.out_size[axis], 8) <= part.out_size[axis] <= whole.out_size[axis]
            unread = math.gcd(case.stride[axis], abs(case.size[axis] - cut.size[axis]) or case.stride[axis])
            assert unread == case.stride[axis]


def test_a_tenth_is_a_tenth() -> None:
    share = sum(case.hash % TENTH == 0 for case in cases()) / len(cases())
    assert 0.07 < share < 0.13
