"""The native weight gradient against float64: every algorithm, border, memory layout and instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cpu_passes
from cpu_passes import Layer, arranged, close, poisoned, wide_layers
from nightly import NIGHTLY
from polyconv.cpu import native
from polyconv.numerics import reference

cpu_passes.load_native()

DIRECT = 0
ALGORITHMS = range(13)
CASES = {**cpu_passes.EDGES, **cpu_passes.BORDERED}


def check(case: Layer, algorithm: int, x: Tensor | None = None, dy: Tensor | None = None) -> None:
    made = case.tensors()
    x, dy = made[0] if x is None else x, made[3] if dy is None else dy
    before = x.clone(), dy.clone()
    dw, db = poisoned(case.w), poisoned((case.out_channels,))
    torch.ops.polyconv_cpu.weight_gradient(x, dy, dw, db, case.geometry, [algorithm])
    close(dw, reference.wgrad(case.moves, x, dy, case.w)[0])
    close(db, dy.double().sum((0, 2, 3)))
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_edges(case: Layer, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for algorithm in ALGORITHMS:
        check(case, algorithm)


@pytest.mark.parametrize("case", cpu_passes.STRIDED.values(), ids=cpu_passes.STRIDED.keys())
def test_strides_are_summed_directly(case: Layer, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    check(case, DIRECT)
    with pytest.raises(RuntimeError, match="directly"):
        check(case, 1)


def test_channels_beyond_the_cache(instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for algorithm in (DIRECT, 3, 4):
        check(Layer((3, 190, 9, 9), 340, (3, 3), (1, 1, 1, 1)), algorithm)


def test_accumulators_beyond_the_memory() -> None:
    check(Layer((1, 700, 4, 4), 700, (3, 3), (1, 1, 1, 1)), 4)


@settings(max_examples=150 if NIGHTLY else 40, deadline=None)
@given(
    case=wide_layers(),
    algorithm=st.sampled_from(ALGORITHMS),
    layouts=st.tuples(st.sampled_from(cpu_passes.READABLE), st.sampled_from(cpu_passes.READABLE)),
)
def test_any_geometry(case: Layer, algorithm: int, layouts: tuple[str, str]) -> None:
    if min(case.y) < 1:
        return
    x, dy = (arranged(t, layout) for t, layout in zip(case.tensors()[::3], layouts, strict=True))
    if layouts[0] == "one scalar" and layouts[1] == "one scalar":
        dy = dy.contiguous()
    check(case, algorithm if case.stride == (1, 1) else DIRECT, x, dy)


@pytest.mark.parametrize("layout", cpu_passes.READABLE)
def test_memory_layouts(layout: str, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    case = Layer((2, 21, 14, 37), 19, (3, 3), (1, 1, 1, 1))
    x, _, _, dy = case.tensors()
    for algorithm in (DIRECT, 4):
        check(case, algorithm, arranged(x, layout), dy)
        check(case, algorithm, x, arranged(dy, layout))


def test_any_memory_layout_of_the_result() -> None:
    case = Layer((2, 21, 14, 37), 19, (3, 3), (1, 1, 1, 1))
    x, _, _, dy = case.tensors()
    for algorithm in (DIRECT, 4):
        dw = poisoned(case.w).contiguous(memory_format=torch.channels_last)
        torch.ops.polyconv_cpu.weight_gradient(x, dy, dw, None, case.geometry, [algorithm])
        close(dw, reference.wgrad(case.moves, x, dy, case.w)[0])


@pytest.mark.parametrize("algorithm", [DIRECT, 1, 4])
@pytest.mark.parametrize("channels", [8, 300], ids=["slices", "shared accumulators"])
def test_same_bits_whatever_the_number_of_threads(algorithm: int, channels: int) -> None:
    case = Layer((6, channels, 28, 33), channels + 3, (3, 3), (1, 1, 1, 1))
    x, _, _, dy = case.tensors()

    def compute() -> tuple[Tensor, Tensor]:
        dw, db = poisoned(case.w), poisoned((case.out_channels,))
        torch.ops.polyconv_cpu.weight_gradient(x, dy, dw, db, case.geometry, [algorithm])
        return dw, db

    cpu_passes.same_bits_for_any_threads(compute)


def test_nothing_to_sum_gives_zeros() -> None:
    case = replace(CASES["groups"], x=(0, 12, 15, 33))
    for algorithm in ALGORITHMS:
        dw, db = poisoned(case.w), poisoned((case.out_channels,))
        torch.ops.polyconv_cpu.weight_gradient(*case.tensors()[::3], dw, db, case.geometry, [algorithm])
        assert not dw.any()
        assert not db.any()


def test_sums_are_cut() -> None:
    case = Layer((4, 32, 200, 200), 64, (3, 3), (1, 1, 1, 1))
    for algorithm in ALGORITHMS:
        blocks = torch.ops.polyconv_cpu.weight_gradient_blocks(
            [*case.x, *case.w, *case.y[2:]], case.geometry, [algorithm]
        )
        assert blocks[0] <= (64 if algorithm != DIRECT else 128)
        assert len(blocks) == 2


def test_long_sums_stay_accurate() -> None:
    case = Layer((1, 16, 500, 500), 16, (3, 3), (1, 1, 1, 1))
    x, _, _, dy = case.tensors()
    expected = reference.wgrad(case.moves, x, dy, case.w)[0]
    for algorithm, most in ((DIRECT, 3e-6), (5, 3e-6), (3, 2e-5), (4, 3e-5)):
        dw = poisoned(case.w)
        torch.ops.polyconv_cpu.weight_gradient(x, dy, dw, None, case.geometry, [algorithm])
        assert (dw - expected).abs().max() < most * expected.square().mean().sqrt()
