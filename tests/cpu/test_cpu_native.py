"""The native CPU kernels against float64: every scheme, order of stages and instruction set, on ragged shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyconv
from nightly import NIGHTLY, sampled
from polyconv.arguments import Geometry
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines.schemes import KernelScheme as Scheme
from polyconv.cpu.engines.tile_lanes import schemes
from polyconv.numerics import reference
from polyconv.problem import PaddingMode

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

SCHEMES = schemes()

AUTOMATIC, FUSED, GROUPED, PHASED = range(4)


@dataclass(frozen=True)
class Case:
    """Padding is top, bottom, left, right."""

    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    stride: tuple[int, int] = (1, 1)
    border: PaddingMode = PaddingMode.ZEROS

    @property
    def y(self) -> tuple[int, int, int, int]:
        n, _, h, w = self.x
        top, bottom, left, right = self.padding
        (r, s), (dh, dw) = self.kernel, self.dilation
        height, width = h + top + bottom - dh * (r - 1), w + left + right - dw * (s - 1)
        return n, self.out_channels, (height - 1) // self.stride[0] + 1, (width - 1) // self.stride[1] + 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        c = self.x[1] // self.groups
        scale = (c * self.kernel[0] * self.kernel[1]) ** -0.5
        weight = torch.randn(self.out_channels, c, *self.kernel) * scale
        return torch.randn(self.x), weight, torch.randn(self.out_channels)

    def gradient(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(self.y) * 0.5

    @property
    def moves(self) -> Geometry:
        return Geometry(self.stride, self.padding, self.dilation, self.groups, self.border.value)

    @property
    def geometry(self) -> list[int]:
        top, _, left, _ = self.padding
        return [*self.stride, top, left, *self.dilation, self.groups, native.facts()["borders"].index(self.border)]


def plan(scheme: Scheme, mode: int = AUTOMATIC, lanes: int = 0) -> list[int]:
    return [0, SCHEMES.index(scheme), mode, lanes, 0]


def close(found: Tensor, expected: Tensor) -> None:
    """Per element: 1e-4 absolute and relative. What was not written is NaN, and fails."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


LAYOUTS = ("dense", "channels last", "columns outermost", "every third column")


def poisoned(shape: tuple[int, ...], layout: str = "dense") -> Tensor:
    """Of NaN, in some layout of memory; what lies between its elements is NaN, too."""
    n, c, h, w = shape
    nan = float("nan")
    if layout == "channels last":
        return torch.full((n, h, w, c), nan).permute(0, 3, 1, 2)
    if layout == "columns outermost":
        return torch.full((w, h, c, n), nan).permute(3, 2, 1, 0)
    if layout == "every third column":
        return torch.full((n, c + 1, h + 2, 3 * w + 5), nan)[:, 1:, 1:-1, 2 : 3 * w + 2 : 3]
    return torch.full(shape, nan)


def arranged(tensor: Tensor, layout: str) -> Tensor:
    """The same values in some layout of memory."""
    return poisoned(tuple(tensor.shape), layout).copy_(tensor)


@lru_cache(maxsize=8)
def exact_output(case: Case) -> Tensor:
    """Once for all schemes and layouts: it takes longer than most of them."""
    return reference.fprop(case.moves, *case.tensors())


@lru_cache(maxsize=8)
def exact_input_gradient(case: Case) -> Tensor:
    x, w, _ = case.tensors()
    return reference.dgrad(case.moves, case.gradient(), w, x.shape)


def fprop(
    case: Case,
    scheme: Scheme,
    *,
    mode: int = AUTOMATIC,
    lanes: int = 0,
    x_layout: str = "dense",
    y_layout: str = "dense",
) -> None:
    x, w, bias = case.tensors()
    x = arranged(x, x_layout)
    before = x.clone(), w.clone()
    y = poisoned(case.y, y_layout)
    torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(scheme, mode, lanes), None)
    close(y, exact_output(case))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def dgrad(
    case: Case,
    scheme: Scheme,
    *,
    mode: int = AUTOMATIC,
    lanes: int = 0,
    x_layout: str = "dense",
    y_layout: str = "dense",
) -> None:
    _, w, _ = case.tensors()
    dy = arranged(case.gradient(), y_layout)
    dx = poisoned(case.x, x_layout)
    torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(scheme, mode, lanes))
    close(dx, exact_input_gradient(case))


CASES = {
    "one output": Case((1, 1, 5, 9), 1, (5, 9)),
    "one column": Case((2, 3, 20, 3), 5, (3, 3)),
    "one row": Case((1, 3, 3, 70), 9, (3, 3)),
    "channels that fill no register tile": Case((1, 5, 17, 41), 13, (3, 3), (1, 1, 1, 1)),
    "padding wider than the kernel": Case((1, 4, 9, 11), 8, (3, 3), (5, 7, 6, 20)),
    "cropped input": Case((1, 4, 19, 50), 8, (3, 3), (-2, -3, -4, 0)),
    "W1 in small": Case((2, 8, 40, 60), 16, (5, 9), (2, 2, 4, 4), (2, 3)),
    "W3 in small": Case((1, 8, 30, 150), 16, (5, 9)),
    "a dilation longer than a vector": Case((1, 3, 30, 90), 8, (3, 3), (18, 18, 18, 18), (18, 18)),
    "a dilation longer than the image": Case((1, 2, 8, 8), 4, (3, 3), (12, 12, 12, 12), (12, 12)),
    "groups": Case((2, 12, 15, 33), 18, (3, 5), (1, 1, 2, 2), groups=3),
    "depthwise": Case((1, 6, 15, 33), 6, (3, 3), (1, 1, 1, 1), groups=6),
    "a kernel longer than any scheme": Case((1, 3, 40, 60), 8, (11, 21), (5, 5, 10, 10)),
    "one row of taps": Case((1, 8, 9, 77), 8, (1, 7), (0, 0, 3, 3)),
    "one column of taps": Case((1, 8, 40, 30), 8, (7, 1), (3, 3, 0, 0)),
    "many channels, small map": Case((3, 150, 7, 7), 40, (3, 3), (1, 1, 1, 1)),
    "bands wider than a chunk": Case((1, 4, 9, 700), 8, (3, 3), (1, 1, 1, 1)),
    "AlexNet's first layer in small": Case((1, 3, 51, 67), 16, (11, 11), (2, 2, 2, 2), stride=(4, 4)),
    "ResNet's first layer in small": Case((2, 3, 38, 50), 16, (7, 7), (3, 3, 3, 3), stride=(2, 2)),
    "a stride that divides the dilation": Case((1, 5, 30, 64), 8, (3, 3), (4, 4, 4, 4), (2, 4), stride=(2, 2)),
    "a stride longer than the kernel": Case((1, 20, 31, 64), 8, (1, 2), stride=(2, 5)),
    "pointwise": Case((2, 70, 7, 23), 20, (1, 1)),
    "pointwise, strided and padded": Case((2, 20, 9, 23), 20, (1, 1), (1, 0, 2, 1), stride=(2, 3)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("mode", [FUSED, GROUPED, PHASED], ids=["fused", "grouped", "phased"])
def test_edges(case: Case, mode: int) -> None:
    for scheme in SCHEMES:
        fprop(case, scheme, mode=mode)
        dgrad(case, scheme, mode=mode)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_instruction_set(instruction_set: str, scheme: Scheme) -> None:
    assert native.instruction_set() == instruction_set
    for name in ("W1 in small", "channels that fill no register tile", "groups", "a dilation longer than a vector"):
        for mode in (FUSED, GROUPED, PHASED):
            fprop(CASES[name], scheme, mode=mode)
            dgrad(CASES[name], scheme, mode=mode)
    for mode, layout in zip((FUSED, GROUPED, PHASED, FUSED), LAYOUTS, strict=True):
        for name in ("ResNet's first layer in small", "a stride longer than the kernel", "W1 in small"):
            fprop(CASES[name], scheme, mode=mode, x_layout=layout, y_layout=layout)
            dgrad(CASES[name], scheme, mode=mode, x_layout=layout, y_layout=layout)


@pytest.mark.parametrize(("x_layout", "y_layout"), sampled(product(LAYOUTS, LAYOUTS), 6, "layouts"))
def test_any_memory_layout(x_layout: str, y_layout: str) -> None:
    for case in (
        Case((2, 19, 20, 60), 21, (3, 5), (1, 1, 2, 2), (1, 2)),
        Case((2, 40, 9, 33), 33, (3, 3), (1, 1, 1, 1)),
        Case((3, 20, 7, 9), 32, (1, 1)),
    ):
        for scheme in SCHEMES:
            for mode in (FUSED, GROUPED, PHASED):
                fprop(case, scheme, mode=mode, x_layout=x_layout, y_layout=y_layout)
                dgrad(case, scheme, mode=mode, x_layout=x_layout, y_layout=y_layout)


@pytest.fixture(params=[256, 1024, 2048], ids=lambda size: f"{size} KiB")
def l2_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Work that is cut for a core with so much L2 cache."""
    before = native.l2_bytes()
    yield native.l2_bytes(request.param << 10)
    native.l2_bytes(before)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 40, 200), 64, (5, 9), (2, 2, 4, 4), (2, 3)),
        Case((2, 64, 56, 56), 64, (3, 3), (1, 1, 1, 1)),
        Case((3, 128, 28, 28), 32, (3, 3), (1, 1, 1, 1)),
        Case((9, 256, 14, 14), 24, (3, 3), (1, 1, 1, 1)),
        Case((1, 16, 30, 700), 128, (3, 3)),
        Case((2, 256, 28, 28), 40, (3, 3), (1, 1, 1, 1), stride=(2, 2)),
    ],
    ids=lambda case: f"{case.x} {case.kernel}",
)
def test_any_size_of_cache(case: Case, l2_bytes: int) -> None:
    """Every scheme, in the order of stages and the cut that suit such a core."""
    assert native.l2_bytes() == l2_bytes
    for scheme in SCHEMES:
        fprop(case, scheme)
        dgrad(case, scheme)


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
    case = Case((1, 4, 12, 30), 8, (3, 3), (1, 1, 1, 1))
    x, w, bias = case.tensors()
    for scheme in SCHEMES:
        out = torch.full((1, 8, 12, 60), float("nan"))
        torch.ops.polyconv_cpu.convolve(x, w, bias, out[..., ::2], case.geometry, plan(scheme), None)
        assert out[..., 1::2].isnan().all()
        close(out[..., ::2], reference.fprop(case.moves, x, w, bias))


def test_expanded_gradient() -> None:
    """The gradient of a sum is one number, expanded: all strides are 0."""
    case = CASES["W1 in small"]
    x, w, _ = case.tensors()
    dy = torch.tensor(0.3).expand(case.y)
    expected = reference.dgrad(case.moves, dy, w, x.shape)
    for scheme in SCHEMES:
        dx = poisoned(case.x)
        torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(scheme))
        close(dx, expected)


@pytest.mark.parametrize("border", [mode for mode in PaddingMode if mode is not PaddingMode.ZEROS], ids=str)
def test_borders(border: PaddingMode) -> None:
    for case in (
        Case((2, 6, 20, 60), 16, (5, 9), (2, 2, 4, 4), (2, 3), border=border),
        Case((1, 6, 9, 40), 8, (3, 3), (8, 8, 39, 20), border=border),
        Case((1, 3, 30, 40), 8, (7, 7), (3, 2, 3, 1), stride=(2, 2), border=border),
        Case((1, 5, 5, 150), 8, (3, 3), (1, 1, 1, 1), border=border),
    ):
        for scheme in SCHEMES:
            for mode in (FUSED, GROUPED, PHASED):
                fprop(case, scheme, mode=mode, lanes=48)


def test_long_sums_are_cut() -> None:
    """With thousands of equal terms a single running sum would lose several digits."""
    case = Case((1, 4096, 5, 20), 8, (1, 1))
    x, w = torch.full(case.x, 1 / 3), torch.full((8, 4096, 1, 1), 1 / 7)
    y = poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, plan(SCHEMES[12]), None)
    expected = reference.fprop(case.moves, x, w, None)
    assert (y.double() / expected - 1).abs().max() < 3e-6


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel = draw(st.integers(1, 7)), draw(st.integers(1, 11))
    dilation = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 4, 5, 6, 9, 16, 19]))
    padding = tuple(draw(st.integers(-2, 6)) for _ in range(4))
    height = max(1, dilation[0] * (kernel[0] - 1) - padding[0] - padding[1] + draw(st.integers(1, 14)))
    width = max(1, dilation[1] * (kernel[1] - 1) - padding[2] - padding[3] + draw(st.integers(1, 120)))
    # A crop leaves at least one row and one column.
    height, width = max(height, 5 - min(0, *padding[:2])), max(width, 5 - min(0, *padding[2:]))
    x = draw(st.integers(1, 3)), groups * draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 35])), height, width
    stride = draw(st.sampled_from([1, 1, 1, 2, 3, 4])), draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    return Case(x, groups * draw(st.integers(1, 20)), kernel, padding, dilation, groups, stride)  # type: ignore[arg-type]


@settings(max_examples=150 if NIGHTLY else 40, deadline=None)
@given(
    case=cases(),
    scheme=st.sampled_from(SCHEMES),
    mode=st.sampled_from([AUTOMATIC, FUSED, GROUPED, PHASED]),
    lanes=st.sampled_from([0, 16, 33, 48, 100]),
    x_layout=st.sampled_from(LAYOUTS),
    y_layout=st.sampled_from(LAYOUTS),
)
def test_any_geometry(case: Case, scheme: Scheme, mode: int, lanes: int, x_layout: str, y_layout: str) -> None:
    if min(case.y) < 1:
        return
    fprop(case, scheme, mode=mode, lanes=lanes, x_layout=x_layout, y_layout=y_layout)
    dgrad(case, scheme, mode=mode, lanes=lanes, x_layout=x_layout, y_layout=y_layout)


@pytest.mark.parametrize("mode", [FUSED, GROUPED, PHASED], ids=["fused", "grouped", "phased"])
def test_same_bits_whatever_the_number_of_threads(mode: int) -> None:
    case = CASES["W1 in small"]
    x, w, bias = case.tensors()
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            y = poisoned(case.y)
            torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(SCHEMES[0], mode, 32), None)
            results.append(y)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_sliced_tensors_need_no_copy() -> None:
    case = Case((2, 6, 20, 40), 8, (3, 3), (1, 1, 1, 1))
    x, w, bias = case.tensors()
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
    x, w, bias = case.tensors()
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
    module.weight.data.copy_(module.weight.data.flip(0))  # moves no version counter
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
    assert native.empty_output(like, shape, strides).data_ptr() != address  # a view keeps the memory
    del view
    assert native.empty_output(like, shape, strides).data_ptr() == address
    with polyconv.settings.use(output_pool=size // 2):
        assert torch.ops.polyconv_cpu.output_pool_idle_bytes() <= size // 2
