"""Strides, dilations and paddings far beyond the image: computed as torch does, or refused with a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import polyconv
from polyconv.arguments import Geometry, normalise
from polyconv.autotune import preferences
from polyconv.backend import override
from polyconv.cpu import native
from polyconv.cpu.engines.correlations import correlations
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import ImplicitGemmParams
from polyconv.cuda.planner.kernel_params import AxisPhase, FastDivisor
from polyconv.dispatch.operands import fprop_layout
from polyconv.lowering import extreme_geometry
from polyconv.lowering.extreme_geometry import Axis, reduce_axis, reduce_geometry
from polyconv.lowering.lower import lower, lowered
from polyconv.measure.workloads import find
from polyconv.model.explain import problems_of
from polyconv.problem import PaddingMode, Pass, Problem, dense_strides, output_extent
from polyconv.selection import PlanError
from recording import Recorder

MODES = tuple(PaddingMode)


# ---- the reference: the definition in Python's integers


def source(place: int, extent: int, mode: PaddingMode) -> int | None:
    """Pixel index at a position of the padded axis; None for a zero."""
    if 0 <= place < extent:
        return place
    if mode is PaddingMode.ZEROS:
        return None
    if mode is PaddingMode.REPLICATE:
        return min(max(place, 0), extent - 1)
    if mode is PaddingMode.CIRCULAR:
        return place % extent
    folded = place % max(2 * (extent - 1), 1)
    return min(folded, 2 * (extent - 1) - folded)


def selection(axis: Axis) -> Tensor:
    """1 at (tap, output, pixel) if that tap of that output reads that pixel."""
    chosen = torch.zeros(axis.kernel, axis.outputs, axis.extent, dtype=torch.float64)
    for tap, output in product(range(axis.kernel), range(axis.outputs)):
        pixel = source(output * axis.stride + tap * axis.dilation - axis.before, axis.extent, axis.mode)
        if pixel is not None:
            chosen[tap, output, pixel] = 1
    return chosen


def defined(x: Tensor, w: Tensor, bias: Tensor | None, axes: Sequence[Axis], groups: int) -> Tensor:
    """The convolution in float64, differentiable."""
    n = x.shape[0]
    k, per_group, *_ = w.shape
    rows, columns = map(selection, axes)
    grouped, weights = x.reshape(n, groups, per_group, *x.shape[2:]), w.reshape(groups, k // groups, *w.shape[1:])
    patches = torch.einsum("ngchw,rih,sjw->ngcrsij", grouped, rows, columns)
    y = torch.einsum("ngcrsij,gkcrs->ngkij", patches, weights).reshape(n, k, rows.shape[1], columns.shape[1])
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)


# ---- extreme problems


@dataclass(frozen=True)
class Case:
    axes: tuple[Axis, Axis]
    batch: int = 2
    channels: tuple[int, int] = (2, 3)
    """Channels of one group."""
    groups: int = 1
    bias: bool = True
    activation: str | None = None
    residual: bool = False
    channels_last: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, Any]:
        h, w = self.axes
        return {
            "stride": (h.stride, w.stride),
            "padding": (h.before, h.after, w.before, w.after),
            "dilation": (h.dilation, w.dilation),
            "groups": self.groups,
            "padding_mode": h.mode.value,
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        generator = torch.Generator().manual_seed(7)
        c, k = self.channels
        h, w = self.axes

        def made(*shape: int) -> Tensor:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            if self.channels_last and len(shape) == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            return tensor.requires_grad_()

        return (
            made(self.batch, c * self.groups, h.extent, w.extent),
            made(k * self.groups, c, h.kernel, w.kernel),
            made(k * self.groups) if self.bias else None,
            made(self.batch, k * self.groups, h.outputs, w.outputs) if self.residual else None,
        )

    def problem(self, kind: Pass) -> Problem:
        (c, k), (h, w) = self.channels, self.axes
        options = self.arguments | {"padding_mode": h.mode}
        x = (self.batch, c * self.groups, h.extent, w.extent)
        return Problem.make(kind, x, (k * self.groups, c, h.kernel, w.kernel), bias=self.bias, **options)


STEPS = st.one_of(
    st.integers(1, 6),
    st.sampled_from([1023, 1024, 1025, 2**16, 10**6, 10**8, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**58]),
    st.integers(1, 2**58),
)


@st.composite
def axes(draw: st.DrawFn, mode: PaddingMode) -> Axis:
    """An axis with few outputs and any parameters."""
    extent, kernel, outputs = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride = draw(STEPS)
    dilation = draw(st.one_of(STEPS, st.just(stride), st.integers(1, 3).map(lambda times: times * stride)))
    needed = stride * (outputs - 1) + dilation * (kernel - 1) + 1 - extent
    slack = draw(st.sampled_from([0, 1, stride - 1]).filter(lambda value: value < stride))
    if mode is PaddingMode.ZEROS or mode is PaddingMode.REPLICATE:
        lowest = -(extent - 1) if mode is PaddingMode.ZEROS else 0
        # Positions where some tap of some output sees the image, or any position.
        meeting = draw(st.integers(0, outputs - 1)) * stride + draw(st.integers(0, kernel - 1)) * dilation
        before = draw(st.one_of(st.just(meeting), st.integers(-7, 7).map(lambda by: meeting + by), st.integers(0, 9)))
        before = max(before, lowest)
        after = max(needed + slack - before, lowest)
    else:
        largest = extent - 1 if mode is PaddingMode.REFLECT else extent
        before, after = draw(st.integers(0, largest)), draw(st.integers(0, largest))
    axis = Axis(extent, kernel, stride, dilation, before, after, mode)
    assume(max(-before, 0) + max(-after, 0) < extent and 0 < axis.outputs <= 12)
    assume(extent + before + after >= dilation * (kernel - 1) + 1 and max(before, after) < 2**62)
    return axis


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(MODES))
    return Case(
        (draw(axes(mode)), draw(axes(mode))),
        batch=draw(st.integers(1, 2)),
        channels=draw(st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 1)])),
        groups=draw(st.sampled_from([1, 2, 3])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "relu", "silu"])),
        residual=draw(st.booleans()),
        channels_last=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )


def check(case: Case) -> None:
    """All three passes, and second derivatives of two, against the definition."""
    x, w, bias, residual = case.tensors()
    tolerance = {"rtol": 0.0, "atol": 2e-4 if case.dtype == torch.float32 else 1e-10}
    act: Callable[[Tensor], Tensor] = {None: lambda z: z, "relu": torch.relu, "silu": F.silu}[case.activation]
    inputs = [tensor for tensor in (x, w, bias, residual) if tensor is not None]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    named = dict(
        zip([n for n, t in zip("xwbr", (x, w, bias, residual), strict=True) if t is not None], exact, strict=True)
    )
    z = defined(named["x"], named["w"], named.get("b"), case.axes, case.groups)
    expected = act(z if residual is None else z + named["r"])

    found = polyconv.conv2d(x, w, bias, activation=case.activation, residual=residual, **case.arguments)
    with torch.no_grad():
        unrecorded = polyconv.conv2d(x, w, bias, activation=case.activation, residual=residual, **case.arguments)
    assert found.shape == expected.shape
    geometry = normalise(w.shape[2:], **case.arguments)
    assert unrecorded.stride() == dense_strides(*fprop_layout(x.shape, x.stride(), w.shape, w.stride(), None, geometry))
    torch.testing.assert_close(found.double(), expected, **tolerance)
    torch.testing.assert_close(unrecorded.double(), expected, **tolerance)

    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(8)).to(case.dtype)
    grads = torch.autograd.grad(found, inputs, upstream, create_graph=True)
    wanted = torch.autograd.grad(expected, exact, upstream.double(), create_graph=True)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)
    second = torch.autograd.grad(grads[0].square().sum() + grads[1].square().sum(), inputs[:2], allow_unused=True)
    wanted = torch.autograd.grad(wanted[0].square().sum() + wanted[1].square().sum(), exact[:2], allow_unused=True)
    for tensor, one, other in zip(exact, second, wanted, strict=False):
        one, other = (torch.zeros_like(tensor) if t is None else t for t in (one, other))
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double() / scale, other / scale, **tolerance)


@settings(max_examples=120)
@given(cases())
def test_extreme_geometry_is_computed_by_its_definition(case: Case) -> None:
    check(case)


@settings(max_examples=40)
@given(cases())
def test_a_gpu_is_asked_for_ordinary_numbers_only(case: Case) -> None:
    for kind in Pass:
        for runs in lowered(case.problem(kind), "cuda"):
            assert max(*runs.stride, *runs.dilation, *map(abs, runs.padding)) <= 1024
            plan_cuda(runs, DEVICES["v100"])


NAMED = {
    "a stride of 2**32": {"stride": 2**32},
    "a stride of 2**63 - 1": {"stride": 2**63 - 1},
    "a stride of 1e8": {"stride": 10**8, "padding": 1},
    "dilation and padding of 2**31": {"dilation": 2**31, "padding": 2**31},
    "dilation and padding of 2**32": {"dilation": 2**32, "padding": 2**32},
    "dilation and padding of 2**61": {"dilation": 2**61, "padding": 2**61},
    "dilation and padding of 1e6": {"dilation": 10**6, "padding": 10**6},
    "stride and padding of 1e6": {"stride": 10**6, "padding": 10**6},
    "all of them": {"stride": 2**32, "dilation": 2**32, "padding": 2**33},
    "one axis only": {"stride": (2**32, 1), "dilation": (1, 2**32), "padding": (1, 2**32)},
    "nothing is seen": {"stride": 2**32, "dilation": 2**32 - 1, "padding": 3 * 2**32 + 2},
    "a long padding": {"stride": (1, 3), "padding": (5000, 1)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 4], ids=["dense", "depthwise"])
@pytest.mark.parametrize("arguments", NAMED.values(), ids=NAMED)
def test_what_torch_computes(arguments: dict[str, Any], groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensors = torch.randn(2, 4, 4, 4), torch.randn(4, 4 // groups, 3, 3), torch.randn(4)
    ours = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    found, expected = polyconv.conv2d(*ours, groups=groups, **arguments), F.conv2d(*theirs, groups=groups, **arguments)
    close = {"rtol": 0.0, "atol": 1e-4 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(found.double(), expected, **close)
    upstream = torch.randn_like(expected)
    grads, wanted = (
        torch.autograd.grad(found, ours, upstream.to(dtype)),
        torch.autograd.grad(expected, theirs, upstream),
    )
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, **close)


def test_ones_under_a_dilation_of_2_to_the_32() -> None:
    x, w = torch.ones(1, 2, 4, 4), torch.ones(1, 2, 3, 3)
    y = polyconv.conv2d(x, w, dilation=2**32, padding=2**32)
    assert torch.equal(y, torch.full((1, 1, 4, 4), 2.0))


def test_outputs_that_see_nothing_are_the_bias() -> None:
    """Columns 4 before the image and 1 after it. ATen's own kernel crashes on a processor with AVX-512."""
    x, bias = torch.randn(3, 16, 257, 1).contiguous(memory_format=torch.channels_last), torch.randn(16)
    w = torch.randn(16, 16, 9, 1, requires_grad=True)
    y = polyconv.conv2d(x, w, bias, stride=(4, 5), padding=4, dilation=(2, 5))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, bias.reshape(1, -1, 1, 1).expand(3, 16, 63, 2))
    y.sum().backward()
    assert not w.grad.any()


def test_no_backend_is_asked_for_a_long_loop() -> None:
    recorder = Recorder()
    x, w = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randn(3, 2, 3, 3, requires_grad=True)
    with override("cpu", recorder):
        for arguments in NAMED.values():
            polyconv.conv2d(x, w, **arguments).sum().backward()
    assert recorder.problems
    for problem in recorder.problems:
        assert max(*problem.stride, *problem.dilation, *problem.padding) < 1024


def test_an_input_gradient_of_long_strides_is_planned_at_once() -> None:
    """It has a phase per pair of stride residues, with launches for each: a quarter of a million here."""
    x, w = torch.randn(1, 2, 1000, 1000, requires_grad=True), torch.randn(3, 2, 3, 3)
    expected = F.conv2d(x.double(), w.double(), stride=499)
    upstream = torch.randn_like(expected)
    (found,) = torch.autograd.grad(polyconv.conv2d(x, w, stride=499), x, upstream.float())
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, upstream)[0], rtol=0, atol=1e-4)
    for kernel in (3, 499):
        problem = Problem.make(Pass.DGRAD, (1, 2, 1000, 1000), (3, 2, kernel, kernel), stride=(499, 499))
        (runs,) = lowered(problem, "cuda")
        assert len(plan_cuda(runs, DEVICES["v100"]).launches) < 10
    patches = Problem.make(Pass.DGRAD, (1, 3, 224, 224), (64, 3, 16, 16), stride=(16, 16))
    rejected = {candidate.name: candidate.rejected for candidate in plan_cuda(patches, DEVICES["v100"]).candidates}
    assert any("launches of its own" in str(why) for why in rejected.values())
    assert len(correlations(replace(patches, stride=(15, 15)))) < 10


@pytest.mark.parametrize(("taps", "stride", "channels"), [(512, 256, (16, 1)), (400, 160, (64, 1)), (256, 128, (8, 8))])
def test_a_signal_has_no_other_axis_whose_stride_could_be_long(
    taps: int, stride: int, channels: tuple[int, int]
) -> None:
    """A transposed convolution to a 1-D signal: its pixels must not be gathered, which took thirty times as long."""
    c, k = channels
    module = polyconv.ConvTranspose1d(c, k, taps, stride=stride, groups=k)
    forward = problems_of(module, (1, c, 64))[0]
    assert (forward.kind, forward.stride, forward.dilation) == (Pass.DGRAD, (1, stride), (1, 1))
    x = torch.randn(1, c, 64)
    expected = F.conv_transpose1d(x.double(), module.weight.double(), module.bias.double(), stride=stride, groups=k)
    torch.testing.assert_close(module(x).double(), expected, atol=1e-4, rtol=1e-4)
    both = normalise((8, 8), stride=stride, rank=2)
    assert reduce_geometry(Pass.DGRAD, (16 * stride, 16 * stride), (8, 8), both) is not None


def test_long_images_with_long_strides_and_paddings() -> None:
    x, w = torch.randn(1, 2, 1, 300_000, requires_grad=True), torch.randn(3, 2, 1, 3, requires_grad=True)
    for arguments in ({"stride": (1, 5000)}, {"dilation": (1, 70_000)}, {"padding": (0, 400_000), "stride": (1, 999)}):
        y = polyconv.conv2d(x, w, **arguments)
        exact = F.conv2d(x.double(), w.double(), **arguments)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)
        for one, other in zip(
            torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(exact.sum(), (x, w)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-3)


# ---- around the operators


def test_empty_batches_and_channels() -> None:
    for batch, channels in ((0, 2), (2, 0)):
        x, w = torch.randn(batch, channels, 4, 4), torch.randn(3, channels, 3, 3)
        for arguments in NAMED.values():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            y, shape = polyconv.conv2d(x, w, torch.ones(3), **arguments), F.conv2d(x, w, **arguments).shape
            assert torch.equal(y, torch.ones(batch, 3, *shape[2:]))
            assert [g.shape for g in torch.autograd.grad(y.sum(), (x, w))] == [x.shape, w.shape]


def test_fake_tensors_have_the_shapes() -> None:
    for arguments in NAMED.values():
        with FakeTensorMode():
            x, w = torch.empty(2, 4, 4, 4), torch.empty(4, 4, 3, 3)
            assert polyconv.conv2d(x, w, **arguments).shape == F.conv2d(x, w, **arguments).shape


def test_compiled() -> None:
    x, w = torch.randn(2, 4, 4, 4, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
    for name in ("dilation and padding of 2**32", "all of them"):
        plain = polyconv.conv2d(x, w, **NAMED[name])
        compiled = torch.compile(lambda x, w: polyconv.conv2d(x, w, **NAMED[name]), backend="aot_eager")(x, w)  # noqa: B023
        torch.testing.assert_close(compiled, plain)
        for one, other in zip(
            torch.autograd.grad(compiled.sum(), (x, w)), torch.autograd.grad(plain.sum(), (x, w)), strict=True
        ):
            torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_mapped_over_a_batch() -> None:
    x, w = torch.randn(3, 2, 4, 4, 4), torch.randn(3, 4, 4, 3, 3)
    for arguments in NAMED.values():
        found = torch.vmap(lambda x, w: polyconv.conv2d(x, w, **arguments))(x, w)  # noqa: B023
        expected = torch.stack([F.conv2d(a, b, **arguments) for a, b in zip(x, w, strict=True)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arguments", NAMED.values(), ids=NAMED)
def test_an_explanation_names_what_runs(arguments: dict[str, Any]) -> None:
    module, x = polyconv.Conv2d(4, 4, 3, **arguments), torch.randn(2, 4, 4, 4, requires_grad=True)
    with preferences.watched() as seen:
        y = module(x)
        y.backward(torch.randn_like(y))
    asked = {replace(decision.problem, vector_aligned=True) for decision in seen}
    assert asked == set(problems_of(module, x))
    text = str(polyconv.explain(module, x))
    assert "nothing runs" in text if not asked else "without outputs and taps that see no pixel" in text


# ---- errors, as torch raises them


@pytest.mark.parametrize(
    "arguments",
    [
        {"stride": 2**63},
        {"dilation": 2**63},
        {"padding": 2**63},
        {"groups": 2**63},
        {"stride": 2**70},
        {"stride": (2**63, 1)},
        {"dilation": [1, 2**63]},
        {"padding": (0, 2**64)},
        {"padding": 2**62, "stride": 2**62},
        {"padding": 2**63 - 1, "stride": 2**62},
        {"padding": 2**62 - 1},
        {"padding": 2**40},
        {"dilation": 2**32},
        {"dilation": 2**32, "padding": 2**31},
        {"groups": 2**40},
    ],
    ids=str,
)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_what_torch_refuses_is_refused(arguments: dict[str, Any], fake: bool) -> None:
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode:
        x, w = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 3, 3)
        with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
            F.conv2d(x, w, **arguments)
        with pytest.raises(theirs.type) as ours:
            polyconv.conv2d(x, w, **arguments)
    assert type(ours.value) is theirs.type


# ---- the reduction itself


@pytest.fixture
def _everything_is_extreme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extreme_geometry, "ORDINARY", 0)


SMALL = [
    Axis(extent, kernel, stride, dilation, before, after, mode)
    for mode in (PaddingMode.ZEROS, PaddingMode.REPLICATE)
    for extent, kernel, stride, dilation in product((1, 2, 5), (1, 2, 3), (1, 2, 3, 7), (1, 2, 6))
    for before, after in product((-1, 0, 1, 6, 13), (-1, 0, 2, 14))
    if extent + before + after >= dilation * (kernel - 1) + 1
    and (min(before, after) >= 0 or (mode is PaddingMode.ZEROS and extent > 2))
]


def pixels_of(axis: Axis) -> dict[tuple[int, int], int]:
    found = {
        (output, tap): source(output * axis.stride + tap * axis.dilation - axis.before, axis.extent, axis.mode)
        for output, tap in product(range(axis.outputs), range(axis.kernel))
    }
    return {pair: pixel for pair, pixel in found.items() if pixel is not None}


@pytest.mark.usefixtures("_everything_is_extreme")
def test_a_reduction_meets_the_same_pixels() -> None:
    gathered = 0
    for axis in SMALL:
        reduced = reduce_axis(axis)
        if reduced.nothing:
            assert not pixels_of(axis)
            continue
        if reduced.gathered:
            gathered += 1
            places = pixels_of(reduced.axis)
            assert reduced.axis.outputs == len(reduced.outputs)
            assert set(places) == set(product(range(len(reduced.outputs)), range(len(reduced.taps))))
            assert sorted(places.values()) == list(range(reduced.axis.extent))
            met = {(o, r) for o, r in pixels_of(axis)}
            assert met <= set(product(reduced.outputs, reduced.taps))
            continue
        met = {(reduced.outputs[o], reduced.taps[r]): p for (o, r), p in pixels_of(reduced.axis).items()}
        assert (reduced.axis.outputs, reduced.axis.kernel) == (len(reduced.outputs), len(reduced.taps))
        assert met == pixels_of(axis)
        again = reduce_axis(reduced.axis)
        assert again.axis == reduced.axis
    assert gathered > 100


@settings(max_examples=200)
@given(st.sampled_from(MODES).flatmap(axes))
def test_what_is_reduced_is_not_reduced_again(axis: Axis) -> None:
    reduced = reduce_axis(axis)
    if not reduced.nothing:
        again = reduce_axis(reduced.axis)
        assert again.axis == reduced.axis
        assert not again.gathered
        assert reduced.axis.outputs == output_extent(
            reduced.axis.extent,
            reduced.axis.before,
            reduced.axis.after,
            reduced.axis.kernel,
            reduced.axis.stride,
            reduced.axis.dilation,
        )


def test_ordinary_layers_stay_what_they_are() -> None:
    for workload in find("all"):
        for kind in Pass:
            problem = workload.problem(kind)
            assert lower(problem, "cpu") is None or problem.rank == 1
    # Dilated past the image, as in DeepLab; one output of a stride past it; a kernel longer than the image.
    for size, kernel, geometry in (
        ((33, 33), (3, 3), Geometry(padding=(36, 36, 36, 36), dilation=(36, 36))),
        ((1, 1), (3, 3), Geometry(stride=(32, 32), padding=(1, 1, 1, 1))),
        ((1, 20), (1, 301), Geometry(padding=(0, 0, 300, 300))),
        ((1, 16000), (1, 2), Geometry(padding=(0, 0, 8192, 0), dilation=(1, 8192))),
        ((1, 16000), (1, 1024), Geometry(stride=(1, 256))),
        ((224, 224), (32, 32), Geometry(stride=(32, 32))),
    ):
        for kind in Pass:
            assert reduce_geometry(kind, size, kernel, geometry) is None


# ---- checks in front of the kernels


@pytest.mark.skipif(not native.is_available(), reason="no native kernels")
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, 2**32, "is 4294967296"),
        (2, 2**31, "is 2147483648"),
        (4, -(2**40), "is -1099511627776"),
        (0, 0, "positive"),
        (6, 0, "positive"),
        (1, 2**31 - 1, "the last place that a tap may have"),
        (5, 2**30, "the last place that a tap may have"),
        (7, 2**32, "is 4294967296"),
    ],
)
def test_no_native_operator_narrows_without_a_word(place: int, value: int, words: str) -> None:
    ops = torch.ops.polyconv_cpu
    x, w, y = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 2, 2)
    geometry = [1, 1, 0, 0, 1, 1, 1, 0]
    geometry[place] = value
    plan = [0, 0, 0, 0, 0]
    calls: list[Callable[[], object]] = [
        lambda: ops.convolve(x, w, None, y, geometry, plan, None),
        lambda: ops.transform_weights(x, w, y, geometry, plan),
        lambda: ops.input_gradient(y, w, x, geometry, plan),
        lambda: ops.weight_gradient(x, y, w, None, geometry, [0]),
        lambda: ops.depthwise_fprop(x, w, None, y, geometry),
        lambda: ops.depthwise_dgrad(y, w, x, geometry),
        lambda: ops.depthwise_wgrad(x, y, w, None, geometry),
        lambda: ops.plain_fprop(x, w, None, y, geometry),
        lambda: ops.plain_dgrad(y, w, x, geometry),
        lambda: ops.plain_wgrad(x, y, w, None, geometry),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(RuntimeError, match=words):
        ops.plain_fprop(x, w, None, y, geometry)


def test_no_parameter_of_a_cuda_kernel_is_wrapped() -> None:
    with pytest.raises(PlanError, match="written_first of AxisPhase is 2147483648"):
        AxisPhase(2**31, 1, 0, 1, 1, 0, 1)
    with pytest.raises(PlanError, match="source_row of ImplicitGemmParams is 4294967296"):
        ImplicitGemmParams().source_row = 2**32
    with pytest.raises(PlanError, match="divisor"):
        FastDivisor.of(2**33)


@pytest.mark.parametrize("kind", Pass)
@pytest.mark.parametrize(
    "arguments",
    [
        {"stride": (2**32, 2**32)},
        {"stride": (2**31 + 1, 1), "padding": (2**31, 2**31, 1, 1)},
        {"dilation": (2**32, 1), "padding": (2**32, 2**32, 1, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 4])
def test_a_cuda_plan_for_what_was_not_reduced_is_refused(kind: Pass, arguments: dict[str, Any], groups: int) -> None:
    problem = Problem.make(kind, (1, 4, 4, 4), (4, 4 // groups, 3, 3), groups=groups, **arguments)
    with pytest.raises(PlanError):
        plan_cuda(problem, DEVICES["v100"])


@pytest.mark.parametrize("kind", Pass)
@pytest.mark.parametrize(
    ("mode", "padding", "words"),
    [
        ("replicate", (-1, 2, 0, -1), "height of 1 needs 1 .* leaves 0"),
        ("replicate", (0, 1, -2, -1), "width of 3 needs 1 .* leaves 0"),
        ("circular", (0, 1, -1, 3), "width of 3 needs 3 .* leaves 2"),
        ("reflect", (0, 0, -1, 2), "width of 3 needs 3 .* leaves 2"),
    ],
    ids=str,
)
def test_a_cuda_plan_for_a_border_of_nothing_is_refused(
    kind: Pass, mode: str, padding: tuple[int, int, int, int], words: str
) -> None:
    """Refused as torch does, with a message: a height of zero after cropping caused a division by zero."""
    problem = Problem.make(kind, (1, 4, 1, 3), (4, 4, 1, 1), stride=(4, 4), padding=padding, padding_mode=mode)
    with pytest.raises(PlanError, match=words):
        plan_cuda(problem, DEVICES["v100"])
    with pytest.raises(RuntimeError):
        polyconv.conv2d(torch.randn(1, 4, 1, 3), torch.randn(4, 4, 1, 1), padding=padding, padding_mode=mode)
