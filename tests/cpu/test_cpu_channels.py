"""The forward kernels with channels in the lanes against float64, and as input gradients of any stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from channel_cases import CASES, LAYOUTS, STRIDED, Case, cases, close, laid_out, poisoned
from nightly import NIGHTLY
from polyconv.cpu import native
from polyconv.numerics import reference

ALGORITHMS = range(4)


def plan(algorithm: int) -> list[int]:
    return [1, algorithm, 0, 0, 0]


def forward(case: Case, algorithm: int, layouts: tuple[str, str] = ("dense", "dense")) -> None:
    x, y = case.tensors()
    x = laid_out(x, layouts[0])
    w, bias = torch.randn(case.dw), torch.randn(case.out_channels)
    before = x.clone(), w.clone()
    y = laid_out(y, layouts[1]).fill_(float("nan"))
    torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(algorithm), None)
    close(y, reference.fprop(case.moves, x, w, bias))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def input_gradient(case: Case, algorithm: int, layouts: tuple[str, str] = ("dense", "dense")) -> None:
    x, dy = case.tensors()
    dx = laid_out(x, layouts[0]).fill_(float("nan"))
    dy = laid_out(dy, layouts[1])
    w = torch.randn(case.dw)
    torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(algorithm))
    close(dx, reference.dgrad(case.moves, dy, w, case.x))


@pytest.mark.parametrize("case", [*CASES.values(), *STRIDED.values()], ids=[*CASES, *STRIDED])
def test_edges(case: Case, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for algorithm in ALGORITHMS:
        forward(case, algorithm)
        if case.border == 0:
            input_gradient(case, algorithm)


WRITABLE = tuple(layout for layout in LAYOUTS if layout not in ("one scalar", "a row for all"))


@settings(max_examples=150 if NIGHTLY else 40, deadline=None)
@given(
    case=st.one_of(cases(strided=False), cases(strided=True)),
    algorithm=st.sampled_from(ALGORITHMS),
    read=st.sampled_from(LAYOUTS),
    written=st.sampled_from(WRITABLE),
)
def test_any_geometry(case: Case, algorithm: int, read: str, written: str) -> None:
    if min(case.y) < 1:
        return
    forward(case, algorithm, (read, written))
    if case.border == 0:
        input_gradient(case, algorithm, (written, read))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_whatever_the_number_of_threads(algorithm: int) -> None:
    case = Case((3, 40, 28, 33), 37, (3, 3), (1, 1, 1, 1))
    x, _ = case.tensors()
    w = torch.randn(case.dw)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            y = poisoned(case.y)
            torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, plan(algorithm), None)
            results.append(y)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kept_weights_give_the_same_bits(algorithm: int) -> None:
    case = CASES["groups"]
    x, _ = case.tensors()
    w, bias = torch.randn(case.dw), torch.randn(case.out_channels)
    fresh, kept = poisoned(case.y), poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, bias, fresh, case.geometry, plan(algorithm), None)
    weights = torch.ops.polyconv_cpu.transform_weights(x, w, kept, case.geometry, plan(algorithm))
    torch.ops.polyconv_cpu.convolve(x, w, bias, kept, case.geometry, plan(algorithm), weights)
    assert torch.equal(fresh, kept)
