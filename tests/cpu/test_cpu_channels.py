"""The channel-lanes forward kernels against float64, also as input gradients of any stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_passes
from cpu_passes import Layer, arranged, close, poisoned, wide_layers
from nightly import NIGHTLY
from polyconv.cpu import native
from polyconv.numerics import reference

cpu_passes.load_native()

ALGORITHMS = range(4)
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_whatever_the_number_of_threads(algorithm: int) -> None:
    case = Layer((3, 40, 28, 33), 37, (3, 3), (1, 1, 1, 1))
    x, w, _, _ = case.tensors()

    def compute() -> list[torch.Tensor]:
        y = poisoned(case.y)
        torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, plan(algorithm), None)
        return [y]

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
