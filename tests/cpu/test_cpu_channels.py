"""The channel-lanes forward kernels against float64, also as input gradients of any stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_passes
from cpu_passes import Layer, arranged, close, poisoned, wide_layers
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cpu import native
from polyconv.numerics import reference

cpu_passes.load_native()

ALGORITHMS = range(4)
CHUNKS = Layer((3, 40, 28, 33), 37, (3, 3), (1, 1, 1, 1))
FEW_CHUNKS = Layer((1, 40, 7, 7), 150, (3, 3), (1, 1, 1, 1))
"""Threads share its output channels."""
ONE_IMAGE = Layer((1, 20, 26, 27), 24, (3, 3), (1, 1, 1, 1))
"""Of a chunk or two, which threads share by rows."""
THREE_IMAGES = Layer((3, 20, 9, 7), 33, (3, 3), (1, 1, 1, 1))
"""Of one chunk, which threads share by images."""
DILATED = Layer((1, 35, 30, 31), 70, (3, 3), (12, 12, 12, 12), (12, 12))
CASES = {**cpu_passes.EDGES, **cpu_passes.BORDERED, **cpu_passes.STRIDED}


def plan(algorithm: int) -> list[int]:
    return [1, algorithm, 0, 0, 0]


def check(case: Layer, algorithm: int, read: str = "contiguous", written: str = "contiguous") -> None:
    x, w, bias, dy = case.tensors()
    x, dy = arranged(x, read), arranged(dy, read)
    before = x.clone(), w.clone()
    y, dx = poisoned(case.y, written), poisoned(case.x, written)
    torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(algorithm), None)
    close(y, reference.fprop(case.moves, x, w, bias))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    if case.border == "zeros":
        torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(algorithm))
        close(dx, reference.dgrad(case.moves, dy, w, case.x))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_edges(case: Layer, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for algorithm in ALGORITHMS:
        check(case, algorithm)


@settings(max_examples=150 if NIGHTLY else 40, deadline=None)
@given(
    case=wide_layers(),
    algorithm=st.sampled_from(ALGORITHMS),
    read=st.sampled_from(cpu_passes.READABLE),
    written=st.sampled_from(cpu_passes.WRITABLE),
)
def test_any_geometry(case: Layer, algorithm: int, read: str, written: str) -> None:
    if min(case.y) >= 1:
        check(case, algorithm, read, written)


@pytest.mark.parametrize("out_channels", [5, 30, 47, 64, 70])
def test_every_register_tile(out_channels: int, instruction_set: str) -> None:
    """Chunks of all numbers of units, in channels_last: from one unit to more than a register tile has."""
    case = Layer((1, 20, 5, 70), out_channels, (3, 3), (1, 1, 1, 1))
    x, w, bias, _ = case.tensors()
    x, residual = arranged(x, "channels_last"), arranged(torch.randn(case.y), "channels_last")
    expected = (reference.fprop(case.moves, x, w, bias) + residual).relu()
    relu, *_ = native.activation_numbers(Activation.RELU)
    for algorithm in ALGORITHMS:
        kept = torch.ops.polyconv_cpu.transform_weights(x, w, residual, case.geometry, plan(algorithm))
        for units in range(1, 18):
            y, numbers = poisoned(case.y, "channels_last"), [1, algorithm, 0, units, 0]
            torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, numbers, kept, residual, relu)
            close(y, expected)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "window"])
@pytest.mark.parametrize(
    "case",
    [CHUNKS, FEW_CHUNKS, DILATED, ONE_IMAGE, THREE_IMAGES],
    ids=["chunks", "few chunks", "dilated", "one image", "three images"],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_whatever_the_number_of_threads(algorithm: int, case: Layer, layout: str) -> None:
    x, w, _, _ = case.tensors()
    x = arranged(x, layout)
    kept = torch.ops.polyconv_cpu.transform_weights(x, w, poisoned(case.y), case.geometry, plan(algorithm))

    def compute() -> list[torch.Tensor]:
        results = poisoned(case.y, layout), poisoned(case.y, layout)
        for y, weights in zip(results, (None, kept), strict=True):
            torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, plan(algorithm), weights)
            close(y, expected)
        return list(results)

    expected = reference.fprop(case.moves, x, w, None)

    cpu_passes.same_bits_for_any_threads(compute)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kept_weights_give_the_same_bits(algorithm: int) -> None:
    case = CASES["groups"]
    x, w, bias, _ = case.tensors()
    fresh, kept = poisoned(case.y), poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, bias, fresh, case.geometry, plan(algorithm), None)
    weights = torch.ops.polyconv_cpu.transform_weights(x, w, kept, case.geometry, plan(algorithm))
    torch.ops.polyconv_cpu.convolve(x, w, bias, kept, case.geometry, plan(algorithm), weights)
    assert torch.equal(fresh, kept)
