"""The native CPU kernels against float64: every scheme, stage order and instruction set, on ragged shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cpu_passes
import polyconv
from cpu_passes import Layer, arranged, close, poisoned, wide_layers
from nightly import NIGHTLY, sampled
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines.schemes import KernelScheme as Scheme
from polyconv.cpu.engines.tile_lanes import schemes
from polyconv.numerics import reference

cpu_passes.load_native()

SCHEMES = schemes()

AUTOMATIC, FUSED, GROUPED, PHASED = range(4)


def plan(scheme: Scheme, mode: int = AUTOMATIC, lanes: int = 0) -> list[int]:
    return [0, SCHEMES.index(scheme), mode, lanes, 0]


LAYOUTS = ("contiguous", "channels_last", "columns_outermost", "sliced")


@lru_cache(maxsize=8)
def operands(case: Layer) -> tuple[Tensor, ...]:
    """The tensors, and float64 output and input gradient; once for all schemes and layouts because it is slow."""
    x, w, bias, dy = case.tensors()
    return x, w, bias, dy, reference.fprop(case.moves, x, w, bias), reference.dgrad(case.moves, dy, w, case.x)


def check(
    case: Layer,
    scheme: Scheme,
    *,
    mode: int = AUTOMATIC,
    lanes: int = 0,
    x_layout: str = "contiguous",
    y_layout: str = "contiguous",
) -> None:
    """Forward pass and, without a border, input gradient."""
    x, w, bias, dy, exact_y, exact_dx = operands(case)
    x, y = arranged(x, x_layout), poisoned(case.y, y_layout)
    before = x.clone(), w.clone()
    torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(scheme, mode, lanes), None)
    close(y, exact_y)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    if case.border == "zeros":
        dy, dx = arranged(dy, y_layout), poisoned(case.x, x_layout)
        torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(scheme, mode, lanes))
        close(dx, exact_dx, 2e-4)


CASES = {
    **cpu_passes.EDGES,
    **cpu_passes.STRIDED,
    "many channels, small map": Layer((3, 150, 7, 7), 40, (3, 3), (1, 1, 1, 1)),
    "bands wider than a chunk": Layer((1, 4, 9, 700), 8, (3, 3), (1, 1, 1, 1)),
    "pointwise": Layer((2, 70, 7, 23), 20, (1, 1)),
    "pointwise, strided and padded": Layer((2, 20, 9, 23), 20, (1, 1), (1, 0, 2, 1), stride=(2, 3)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("mode", [FUSED, GROUPED, PHASED], ids=["fused", "grouped", "phased"])
def test_edges(case: Layer, mode: int) -> None:
    for scheme in SCHEMES:
        check(case, scheme, mode=mode)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_instruction_set(instruction_set: str, scheme: Scheme) -> None:
    assert native.instruction_set() == instruction_set
    for name in ("W1 in small", "channels that fill no register tile", "groups", "a dilation longer than a vector"):
        for mode in (FUSED, GROUPED, PHASED):
            check(CASES[name], scheme, mode=mode)
    for mode, layout in zip((FUSED, GROUPED, PHASED, FUSED), LAYOUTS, strict=True):
        for name in ("ResNet's first layer in small", "a stride longer than the kernel", "W1 in small"):
            check(CASES[name], scheme, mode=mode, x_layout=layout, y_layout=layout)


@pytest.mark.parametrize(("x_layout", "y_layout"), sampled(product(LAYOUTS, LAYOUTS), 6, "layouts"))
def test_any_memory_layout(x_layout: str, y_layout: str) -> None:
    for case in (
        Layer((2, 19, 20, 60), 21, (3, 5), (1, 1, 2, 2), (1, 2)),
        Layer((2, 40, 9, 33), 33, (3, 3), (1, 1, 1, 1)),
        Layer((3, 20, 7, 9), 32, (1, 1)),
    ):
        for scheme in SCHEMES:
            for mode in (FUSED, GROUPED, PHASED):
                check(case, scheme, mode=mode, x_layout=x_layout, y_layout=y_layout)


@pytest.fixture(params=[256, 1024, 2048], ids=lambda size: f"{size} KiB")
def l2_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Schedule for a core with this L2 size [bytes]."""
    before = native.l2_bytes()
    yield native.l2_bytes(request.param << 10)
    native.l2_bytes(before)


@pytest.mark.parametrize(
    "case",
    [
        Layer((1, 32, 40, 200), 64, (5, 9), (2, 2, 4, 4), (2, 3)),
        Layer((2, 64, 56, 56), 64, (3, 3), (1, 1, 1, 1)),
        Layer((3, 128, 28, 28), 32, (3, 3), (1, 1, 1, 1)),
        Layer((9, 256, 14, 14), 24, (3, 3), (1, 1, 1, 1)),
        Layer((1, 16, 30, 700), 128, (3, 3)),
        Layer((2, 256, 28, 28), 40, (3, 3), (1, 1, 1, 1), stride=(2, 2)),
    ],
    ids=lambda case: f"{case.x} {case.kernel}",
)
def test_any_size_of_cache(case: Layer, l2_bytes: int) -> None:
    """Every scheme, with the stage order and chunks for such a core."""
    assert native.l2_bytes() == l2_bytes
    for scheme in SCHEMES:
        check(case, scheme)


def test_the_size_of_the_cache_is_read_and_kept_within_bounds() -> None:
    before = native.l2_bytes()
    assert 256 << 10 <= before <= 2 << 20
    try:
        assert native.l2_bytes(1) == 256 << 10
        assert native.l2_bytes(1 << 30) == 2 << 20
        assert native.l2_bytes() == 2 << 20
    finally:
        assert native.l2_bytes(before) == before


def test_nothing_is_written_between_the_columns() -> None:
    case = Layer((1, 4, 12, 30), 8, (3, 3), (1, 1, 1, 1))
    x, w, bias, _ = case.tensors()
    for scheme in SCHEMES:
        out = torch.full((1, 8, 12, 60), float("nan"))
        torch.ops.polyconv_cpu.convolve(x, w, bias, out[..., ::2], case.geometry, plan(scheme), None)
        assert out[..., 1::2].isnan().all()
        close(out[..., ::2], reference.fprop(case.moves, x, w, bias))


def test_expanded_gradient() -> None:
    """The gradient of a sum is an expanded scalar: all strides are 0."""
    case = CASES["W1 in small"]
    _, w, _, _ = case.tensors()
    dy = torch.tensor(0.3).expand(case.y)
    expected = reference.dgrad(case.moves, dy, w, case.x)
    for scheme in SCHEMES:
        dx = poisoned(case.x)
        torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(scheme))
        close(dx, expected)


@pytest.mark.parametrize("border", cpu_passes.BORDERS[1:])
def test_borders(border: str) -> None:
    for case in (
        Layer((2, 6, 20, 60), 16, (5, 9), (2, 2, 4, 4), (2, 3), border=border),
        Layer((1, 6, 9, 40), 8, (3, 3), (8, 8, 39, 20), border=border),
        Layer((1, 3, 30, 40), 8, (7, 7), (3, 2, 3, 1), stride=(2, 2), border=border),
        Layer((1, 5, 5, 150), 8, (3, 3), (1, 1, 1, 1), border=border),
    ):
        for scheme in SCHEMES:
            for mode in (FUSED, GROUPED, PHASED):
                check(case, scheme, mode=mode, lanes=48)


def test_long_sums_are_cut() -> None:
    """With thousands of equal terms a single running sum would lose several digits."""
    case = Layer((1, 4096, 5, 20), 8, (1, 1))
    x, w = torch.full(case.x, 1 / 3), torch.full((8, 4096, 1, 1), 1 / 7)
    y = poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, plan(SCHEMES[12]), None)
    expected = reference.fprop(case.moves, x, w, None)
    assert (y.double() / expected - 1).abs().max() < 3e-6


@settings(max_examples=150 if NIGHTLY else 40, deadline=None)
@given(
    case=wide_layers(),
    scheme=st.sampled_from(SCHEMES),
    mode=st.sampled_from([AUTOMATIC, FUSED, GROUPED, PHASED]),
    lanes=st.sampled_from([0, 16, 33, 48, 100]),
    x_layout=st.sampled_from(LAYOUTS),
    y_layout=st.sampled_from(LAYOUTS),
)
def test_any_geometry(case: Layer, scheme: Scheme, mode: int, lanes: int, x_layout: str, y_layout: str) -> None:
    if min(case.y) >= 1:
        check(case, scheme, mode=mode, lanes=lanes, x_layout=x_layout, y_layout=y_layout)


@pytest.mark.parametrize("mode", [FUSED, GROUPED, PHASED], ids=["fused", "grouped", "phased"])
def test_same_bits_whatever_the_number_of_threads(mode: int) -> None:
    case = CASES["W1 in small"]
    x, w, bias, _ = case.tensors()

    def compute() -> list[Tensor]:
        y = poisoned(case.y)
        torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(SCHEMES[0], mode, 32), None)
        return [y]

    cpu_passes.same_bits_for_any_threads(compute)


def test_sliced_tensors_need_no_copy() -> None:
    case = Layer((2, 6, 20, 40), 8, (3, 3), (1, 1, 1, 1))
    x, w, bias, _ = case.tensors()
    wide = torch.randn(4, 9, 31, 57)
    wide[1:3, 2:8, 5:25, 8:48] = x
    out = poisoned((2, 11, 25, 49))
    y = out[:, 1:9, 2:22, 3:43]
    torch.ops.polyconv_cpu.convolve(
        wide[1:3, 2:8, 5:25, 8:48],
        w.transpose(0, 1).contiguous().transpose(0, 1),
        bias,
        y,
        case.geometry,
        plan(SCHEMES[2]),
        None,
    )
    close(y, reference.fprop(case.moves, x, w, bias))
    assert out.isnan().sum() == out.numel() - y.numel()


def test_kept_weights_give_the_same_bits() -> None:
    case = CASES["W3 in small"]
    x, w, bias, _ = case.tensors()
    numbers = case.geometry, plan(SCHEMES[0])
    fresh, kept = poisoned(case.y), poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, bias, fresh, *numbers, None)
    transformed = torch.ops.polyconv_cpu.transform_weights(x, w, kept, *numbers)
    torch.ops.polyconv_cpu.convolve(x, w, bias, kept, *numbers, transformed)
    assert torch.equal(fresh, kept)


def test_module_notices_changed_weights() -> None:
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    module = polyconv.Conv2d(16, 32, (5, 9), padding=(2, 4))
    x = torch.randn(1, 16, 64, 96)

    def check() -> None:
        with torch.no_grad():
            expected = F.conv2d(x.double(), module.weight.double(), module.bias.double(), padding=(2, 4))
            close(module(x), expected)

    check()
    check()
    assert backend.weights.size > 0
    with torch.no_grad():
        module.weight.mul_(2)
    check()
    module.weight.data.copy_(module.weight.data.flip(0))  # no version counter changes
    check()
    module.weight.data = torch.randn_like(module.weight) * 0.03
    check()


def test_inference_mode_and_training() -> None:
    module, other = (m(12, 16, 3, padding=2, dilation=2) for m in (polyconv.Conv2d, torch.nn.Conv2d))
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 12, 40, 50)
    with torch.inference_mode():
        close(module(x), other(x).double())
    results = []
    for m in (module, other):
        t = x.clone().requires_grad_()
        m(t).square().mean().backward()
        results.append((t.grad, m.weight.grad, m.bias.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_output_pool_reuses_and_is_bounded() -> None:
    like, shape, strides = torch.empty(0), (1, 16, 1024, 512), (16 * 1024 * 512, 1024 * 512, 512, 1)
    size = 16 * 1024 * 512 * 4
    first = native.empty_output(like, shape, strides)
    assert first.is_contiguous()
    address = first.data_ptr()
    other = native.empty_output(like, shape, strides)
    assert other.data_ptr() != address
    view = first[0, 3]
    del first
    assert native.empty_output(like, shape, strides).data_ptr() != address  # a view keeps the memory alive
    del view
    assert native.empty_output(like, shape, strides).data_ptr() == address
    with polyconv.settings.use(output_pool=size // 2):
        assert torch.ops.polyconv_cpu.output_pool_idle_bytes() <= size // 2
