"""The native CPU kernels against float64: every scheme, order of stages and instruction set, on ragged shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyconv
from polyconv import backends
from polyconv.bench.workloads import find
from polyconv.cpu import native
from polyconv.cpu.schemes import SCHEMES, Scheme, choose
from polyconv.problem import Pass, Problem

_BUILT = Path(__file__).parent.parent / "build" / "cpu" / "_native.abi3.so"
if _BUILT.exists():
    native.load(_BUILT)
if not native.is_available():
    pytest.skip("the native extension is not built: python csrc/build.py", allow_module_level=True)

AUTOMATIC, FUSED, GROUPED, PHASED = range(4)


@dataclass(frozen=True)
class Case:
    """A convolution of unit stride; padding is top, bottom, left, right."""

    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def y(self) -> tuple[int, int, int, int]:
        n, _, h, w = self.x
        top, bottom, left, right = self.padding
        (r, s), (dh, dw) = self.kernel, self.dilation
        return n, self.out_channels, h + top + bottom - dh * (r - 1), w + left + right - dw * (s - 1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        c = self.x[1] // self.groups
        scale = (c * self.kernel[0] * self.kernel[1]) ** -0.5
        weight = torch.randn(self.out_channels, c, *self.kernel) * scale
        return torch.randn(self.x), weight, torch.randn(self.out_channels)

    def reference(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        top, bottom, left, right = self.padding
        padded = F.pad(x.double(), (left, right, top, bottom))
        bias = None if bias is None else bias.double()
        return F.conv2d(padded, w.double(), bias, dilation=self.dilation, groups=self.groups)

    @property
    def geometry(self) -> list[int]:
        top, _, left, _ = self.padding
        return [1, 1, top, left, *self.dilation, self.groups, 0]


def plan(scheme: Scheme, mode: int = AUTOMATIC, lanes: int = 0) -> list[int]:
    return [scheme.index, mode, lanes, 0]


def close(found: Tensor, expected: Tensor) -> None:
    """Per element: 1e-4 absolute and relative. What was not written is NaN, and fails."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def poisoned(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, float("nan"))


def fprop(case: Case, scheme: Scheme, *, mode: int = AUTOMATIC, lanes: int = 0) -> None:
    x, w, bias = case.tensors()
    before = x.clone(), w.clone()
    y = poisoned(case.y)
    torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, plan(scheme, mode, lanes), None)
    close(y, case.reference(x, w, bias))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def dgrad(case: Case, scheme: Scheme, *, mode: int = AUTOMATIC, lanes: int = 0) -> None:
    x, w, _ = case.tensors()
    dy = torch.randn(case.y) * 0.5
    dx = poisoned(case.x)
    torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, plan(scheme, mode, lanes))
    _, expected = torch.autograd.functional.vjp(lambda t: case.reference(t, w, None), x.double(), dy.double())
    close(dx, expected)


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
}


@pytest.fixture(params=["avx512", "avx2", "sse4"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        native.instruction_set(request.param)
    except RuntimeError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.instruction_set("best")


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
    x = draw(st.integers(1, 3)), groups * draw(st.integers(1, 10)), height, width
    return Case(x, groups * draw(st.integers(1, 20)), kernel, padding, dilation, groups)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    scheme=st.sampled_from(SCHEMES),
    mode=st.sampled_from([AUTOMATIC, FUSED, GROUPED, PHASED]),
    lanes=st.sampled_from([0, 16, 33, 48, 100]),
)
def test_any_geometry(case: Case, scheme: Scheme, mode: int, lanes: int) -> None:
    if min(case.y) < 1:
        return
    fprop(case, scheme, mode=mode, lanes=lanes)
    dgrad(case, scheme, mode=mode, lanes=lanes)


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
    close(y, case.reference(x, w, bias))
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


@pytest.fixture
def backend() -> Iterator[native.NativeBackend]:
    with backends.override("cpu", native.NativeBackend()) as found:
        assert isinstance(found, native.NativeBackend)
        yield found


def test_module_notices_changed_weights(backend: native.NativeBackend) -> None:
    module = polyconv.Conv2d(16, 32, (5, 9), padding=(2, 4))
    x = torch.randn(1, 16, 64, 96)

    def check() -> None:
        with torch.no_grad():
            expected = F.conv2d(x.double(), module.weight.double(), module.bias.double(), padding=(2, 4))
            close(module(x), expected)

    check()
    check()
    assert backend._weights.size > 0
    with torch.no_grad():
        module.weight.mul_(2)
    check()
    module.weight.data.copy_(module.weight.data.flip(0))  # moves no version counter
    check()
    module.weight.data = torch.randn_like(module.weight) * 0.03
    check()


def test_inference_mode_and_training(backend: native.NativeBackend) -> None:
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


def test_headline_workloads_get_their_schemes(backend: native.NativeBackend) -> None:
    for name, scheme in (("W1", SCHEMES[0]), ("W3", SCHEMES[0]), ("W2", SCHEMES[3])):
        (workload,) = find(name)
        for kind in (Pass.FPROP, Pass.DGRAD):
            problem = workload.problem(kind)
            assert choose(problem, 1e-4).scheme == scheme
            assert str(scheme) in backend.explain(problem)


def test_what_has_no_scheme_is_explained(backend: native.NativeBackend) -> None:
    strided = Problem.make("fprop", (1, 8, 32, 32), (8, 8, 3, 3), stride=(2, 2))
    assert choose(strided, 1e-4).scheme is None
    assert "a stride has no native kernel yet" in backend.explain(strided)
    dense = Problem.make("fprop", (1, 32, 64, 64), (32, 32, 3, 3))
    assert choose(dense, 1e-4).scheme is not None
    assert choose(dense, 1e-9).scheme is None


def test_output_pool_reuses_and_is_bounded() -> None:
    like, shape = torch.empty(0), (1, 16, 1024, 512)
    size = 16 * 1024 * 512 * 4
    try:
        first = native.empty_output(like, shape)
        assert first.is_contiguous()
        address = first.data_ptr()
        other = native.empty_output(like, shape)
        assert other.data_ptr() != address
        view = first[0, 3]
        del first
        assert native.empty_output(like, shape).data_ptr() != address  # a view keeps the memory
        del view
        assert native.empty_output(like, shape).data_ptr() == address
        native.set_output_pool_limit(size // 2)
        assert torch.ops.polyconv_cpu.output_pool_idle_bytes() <= size // 2
    finally:
        native.set_output_pool_limit(1 << 30)
