"""1-D, 3-D and transposed convolutions: they share conv2d's operators, so its tests are sampled here."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import polyconv
from nightly import NIGHTLY
from polyconv import dispatch
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu


@dataclass(frozen=True)
class Case:
    """Arguments of one call, by function name."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    bias: bool = True

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        channels = self.w[1] * self.kwargs.get("groups", 1) if "transpose" in self.name else self.w[0]
        shapes = [self.x, self.w, *([(channels,)] if self.bias else [])]
        return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]

    @property
    def ours(self) -> Callable[..., Tensor]:
        function = getattr(polyconv, self.name)
        return lambda *tensors: function(*tensors, **self.kwargs)

    @property
    def theirs(self) -> Callable[..., Tensor]:
        function = getattr(F, self.name)
        return lambda *tensors: function(*tensors, **self.kwargs)


CASES = {
    "conv1d": Case("conv1d", (2, 3, 17), (4, 3, 5), {"padding": 2}),
    "conv1d, strided and dilated": Case("conv1d", (2, 4, 31), (6, 2, 3), {"stride": 3, "dilation": 4, "groups": 2}),
    "conv1d, depthwise": Case("conv1d", (2, 4, 12), (4, 1, 7), {"padding": "same", "groups": 4}),
    "conv1d, long kernel": Case("conv1d", (1, 2, 90), (3, 2, 41), {"stride": 10, "padding": 20}, bias=False),
    "conv1d, unbatched": Case("conv1d", (3, 9), (4, 3, 2)),
    "conv1d, a stride past the signal": Case("conv1d", (2, 3, 9), (4, 3, 3), {"stride": 2**32, "padding": 1}),
    "conv1d, taps that meet nothing": Case("conv1d", (2, 3, 9), (4, 3, 3), {"dilation": 2**32, "padding": 2**32}),
    "conv1d, gathered": Case("conv1d", (1, 2, 4000), (3, 2, 3), {"dilation": 1990, "stride": 1500, "padding": 1500}),
    "transposed 1d": Case("conv_transpose1d", (2, 3, 9), (3, 4, 4), {"stride": 2, "padding": 1}),
    "transposed 1d, vocoder": Case("conv_transpose1d", (1, 4, 6), (4, 2, 16), {"stride": 8, "padding": 4}),
    "transposed 2d": Case("conv_transpose2d", (2, 3, 5, 4), (3, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    "transposed 2d, without a bias": Case("conv_transpose2d", (2, 3, 5, 4), (3, 4, 2, 2), {"stride": 2}, bias=False),
    "transposed 2d, output padding": Case(
        "conv_transpose2d", (2, 4, 5, 4), (4, 3, 3, 3), {"stride": (3, 2), "output_padding": (2, 1), "groups": 2}
    ),
    "transposed 2d, output padding past the stride": Case(
        "conv_transpose2d", (1, 2, 5, 4), (2, 3, 3, 2), {"dilation": 3, "padding": (1, 0), "output_padding": 2}
    ),
    "transposed 2d, depthwise": Case("conv_transpose2d", (1, 4, 5, 4), (4, 1, 4, 4), {"stride": 2, "groups": 4}),
    "transposed 2d, unbatched": Case("conv_transpose2d", (3, 5, 4), (3, 4, 2, 3)),
    "transposed 2d, a stride past the output": Case(
        "conv_transpose2d", (1, 2, 1, 2), (2, 3, 3, 3), {"stride": (2**20, 2), "padding": 1}
    ),
    "conv3d": Case("conv3d", (2, 3, 5, 6, 7), (4, 3, 3, 2, 3), {"padding": (1, 0, 1)}),
    "conv3d, strided and dilated": Case(
        "conv3d", (3, 4, 7, 9, 8), (6, 2, 2, 3, 2), {"stride": (2, 3, 1), "dilation": (3, 1, 2), "groups": 2}
    ),
    "conv3d, more padding than kernel": Case("conv3d", (2, 3, 2, 5, 4), (4, 3, 2, 3, 3), {"padding": (4, 1, 3)}),
    "conv3d, more images than depth": Case("conv3d", (5, 2, 3, 4, 4), (3, 2, 3, 3, 3), {"padding": 1}),
    "conv3d, depthwise": Case("conv3d", (2, 4, 5, 6, 4), (4, 1, 3, 3, 3), {"padding": "same", "groups": 4}),
    "conv3d, a kernel along the depth": Case("conv3d", (2, 3, 7, 4, 5), (4, 3, 5, 1, 1), {"padding": (2, 0, 0)}),
    "conv3d, single taps": Case("conv3d", (2, 3, 4, 4, 5), (4, 3, 1, 1, 1), {"stride": 2}, bias=False),
    "conv3d, unbatched": Case("conv3d", (3, 4, 5, 6), (4, 3, 2, 2, 3)),
    "conv3d, a stride past the volume": Case("conv3d", (1, 2, 3, 4, 3), (2, 2, 2, 3, 3), {"stride": (2**32, 1, 1)}),
    "transposed 3d": Case("conv_transpose3d", (2, 3, 3, 4, 3), (3, 4, 3, 2, 4), {"stride": (2, 1, 2), "padding": 1}),
    "transposed 3d, output padding": Case(
        "conv_transpose3d", (2, 4, 3, 2, 3), (4, 3, 2, 3, 3), {"stride": (3, 2, 2), "output_padding": 1, "groups": 2}
    ),
    "transposed 3d, unbatched": Case("conv_transpose3d", (3, 3, 4, 2), (3, 2, 2, 3, 2)),
}
BATCHED = [name for name in CASES if "unbatched" not in name]
SMALL = [name for name in CASES if "gathered" not in name]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_torch(name: str, dtype: torch.dtype) -> None:
    if "past the" in name or "nothing" in name:
        return  # torch's kernels crash, or allocate too much memory
    case = CASES[name]
    tensors = case.tensors(dtype)
    ours, theirs = case.ours(*tensors), case.theirs(*tensors)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()
    dy = torch.randn_like(theirs)
    for one, other in zip(*(torch.autograd.grad(y, tensors, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_gradcheck(name: str) -> None:
    case = CASES[name]
    assert gradcheck(case.ours, case.tensors(), fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(case.ours, case.tensors(), fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize(
    "name", ["conv1d", "conv3d", "transposed 1d", "transposed 2d, output padding", "transposed 3d"]
)
@pytest.mark.parametrize("mapped", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_vmap(name: str, mapped: tuple[int, ...]) -> None:
    case = CASES[name]
    tensors = [t.detach() for t in case.tensors()]
    stacked = [torch.stack([t, t * 2, t - 1], dim=t.dim() // 2) if i in mapped else t for i, t in enumerate(tensors)]
    dims = tuple(t.dim() // 2 if i in mapped else None for i, t in enumerate(tensors))
    found = torch.func.vmap(case.ours, in_dims=dims)(*stacked)
    for i in range(3):
        one = [t.select(dim, i) if dim is not None else t for t, dim in zip(stacked, dims, strict=True)]
        torch.testing.assert_close(found[i], case.theirs(*one))


@pytest.mark.parametrize(
    "name", ["conv1d", "conv3d", "transposed 1d", "transposed 2d, output padding", "transposed 3d"]
)
@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True)])
def test_vmap_of_the_gradients(name: str, mapped: tuple[bool, bool]) -> None:
    """vmap rules of the two gradient passes, with one or both tensors mapped."""
    case = CASES[name]
    x, w, bias = (t.detach() for t in case.tensors())
    stacked = [torch.stack([t, t * 2]) if each else t for t, each in zip((x, w), mapped, strict=True)]

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *each: case.ours(*each, bias).pow(2).sum(), argnums=(0, 1))(x, w)

    found = torch.func.vmap(gradients, in_dims=tuple(0 if each else None for each in mapped))(*stacked)
    for i in range(2):
        one = [(t[i] if each else t).requires_grad_() for t, each in zip(stacked, mapped, strict=True)]
        expected = torch.autograd.grad(case.theirs(*one, bias).pow(2).sum(), one)
        torch.testing.assert_close(tuple(each[i] for each in found), expected)


@pytest.mark.parametrize(
    "name", ["conv1d", "conv3d", "transposed 1d", "transposed 2d, output padding", "transposed 3d"]
)
def test_compiled(name: str) -> None:
    case = CASES[name]
    tensors = case.tensors()
    compiled = torch.compile(case.ours, backend="aot_eager", fullgraph=True)
    y, expected = compiled(*tensors), case.theirs(*tensors)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for one, other in zip(*(torch.autograd.grad(z, tensors, dy) for z in (y, expected)), strict=True):
        torch.testing.assert_close(one, other)


GEOMETRIES = {
    "conv1d": ([1], [2, 2], [1], 1, "zeros"),
    "conv3d": ([1, 1, 1], [1, 1, 0, 0, 1, 1], [1, 1, 1], 1, "zeros"),
    "transposed 2d, output padding": ([3, 2], [0, 0, 0, 0], [1, 1], 2, "zeros"),
    "transposed 3d": ([2, 1, 2], [1, 1, 1, 1, 1, 1], [1, 1, 1], 1, "zeros"),
}
"""Operator arguments of the named cases."""


@pytest.mark.parametrize("name", GEOMETRIES)
def test_opcheck(name: str) -> None:
    case, geometry = CASES[name], GEOMETRIES[name]
    x, w, bias = case.tensors()
    y = case.ours(x, w).detach().requires_grad_()
    sizes = list(w.shape), False
    if "transpose" in case.name:
        torch.library.opcheck(dispatch.dgrad, (x, w, list(y.shape), False, *geometry, None, bias))
        torch.library.opcheck(dispatch.wgrad, (x, y, *sizes, False, *geometry))
    else:
        torch.library.opcheck(dispatch.fprop, (x, w, bias, *geometry))
        torch.library.opcheck(dispatch.wgrad, (y, x, *sizes, True, *geometry))


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_look_alike(name: str) -> None:
    case = CASES[name]
    tensors = [t.detach() for t in case.tensors()]
    real = case.ours(*tensors)
    with FakeTensorMode() as mode:
        fake = case.ours(*map(mode.from_tensor, tensors))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [f"{kind}{axes}d" for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)])
def test_traced(name: str) -> None:
    """For sizes other than the traced one."""
    module = getattr(polyconv, name)(3, 4, 4, 2, 1)
    check_traced(module, *(torch.randn(2, 3, *(extent for _ in module.kernel_size)) for extent in (7, 9)))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in CASES if "transposed" in name and "stride past" not in name])
def test_a_function_traced(name: str) -> None:
    case = CASES[name]
    x, *others = (tensor.detach() for tensor in case.tensors(torch.float32))
    check_traced(lambda x: case.ours(x, *others), x, torch.cat([x, x, x], -1))


def test_traced_in_an_autocast_region() -> None:
    """The graph computes in the dtype of the region wherever it runs, as torch's convolution does."""
    module = polyconv.ConvTranspose2d(3, 4, 4, 2, 1)
    x = torch.randn(2, 3, 7, 7)
    with warnings.catch_warnings(action="ignore"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        traced, expected = torch.jit.trace(module, x, check_trace=False), module(x)
    assert traced(x).dtype == expected.dtype
    torch.testing.assert_close(traced(x), expected)


def check_traced(function: Callable[[Tensor], Tensor], x: Tensor, longer: Tensor) -> None:
    traced = torch.jit.trace(function, x)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for graph in (traced, torch.jit.load(file)):
        for tensor in (x, longer):
            torch.testing.assert_close(graph(tensor), function(tensor))


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("padding", [(0, 1), (1, 1)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_transposed_output_without_pixels(axes: int, padding: tuple[int, int], batch: int) -> None:
    """An empty tensor and zero gradients. torch's oneDNN path gives them, too, as do all paths for batch 0."""
    sides = (*padding[:1] * (axes - 1), padding[1])
    case = Case(f"conv_transpose{axes}d", (0, 2, *[1] * axes), (2, 3, *[2] * axes), {"padding": sides})
    _, w, bias = case.tensors(torch.float32)
    expected = case.theirs(torch.empty(case.x), w, bias)
    x = torch.randn((batch, *case.x[1:]), requires_grad=True)
    y = case.ours(x, w, bias)
    assert y.shape == (batch, *expected.shape[1:])
    assert 0 in y.shape[2:]
    gradient = torch.ones_like(y, requires_grad=True)
    gradients = torch.autograd.grad(y, (x, w, bias), gradient, create_graph=True)
    for tensor, found in zip((x, w, bias), gradients, strict=True):
        assert torch.equal(found, torch.zeros_like(tensor))
    (again,) = torch.autograd.grad([found.sum() for found in gradients], gradient)
    assert torch.equal(again, torch.zeros_like(y))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = case.ours(*map(mode.from_tensor, (x, w, bias)))
    assert (fake.shape, fake.stride()) == (y.shape, y.stride())
    with torch.inference_mode():
        assert case.ours(x, w, bias).shape == y.shape
    tangent = torch.func.jvp(case.ours, (x, w, bias), (x, w, bias))[1]
    assert tangent.shape == y.shape
    mapped = torch.vmap(case.ours, in_dims=(0, None, None))(x.detach().unsqueeze(0), w.detach(), bias.detach())
    assert mapped.shape == (1, *y.shape)
    if batch:
        with pytest.raises(RuntimeError, match="Only the batch and the channels may be empty"):
            getattr(polyconv, f"conv{axes}d")(y.detach(), w.detach(), padding=sides)


def test_channels_last_stays() -> None:
    x = torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    y = polyconv.conv_transpose2d(x, torch.randn(8, 6, 3, 3))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_signal_that_is_no_row_of_memory() -> None:
    """Channels of a sample interleaved, which torch copies first."""
    x, w = torch.randn(2, 30, 8).transpose(1, 2), torch.randn(6, 8, 9)
    torch.testing.assert_close(polyconv.conv1d(x, w, padding=4), F.conv1d(x, w, padding=4), rtol=1e-4, atol=1e-4)


def test_two_sides_and_borders() -> None:
    x, w = torch.randn(2, 3, 9, dtype=torch.float64), torch.randn(4, 3, 4, dtype=torch.float64)
    for mode in ("constant", "reflect", "replicate", "circular"):
        expected = F.conv1d(F.pad(x, (3, 1), mode=mode), w)
        ours = polyconv.conv1d(x, w, padding=(3, 1), padding_mode="zeros" if mode == "constant" else mode)
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        polyconv.conv1d(x, w, padding=(-2, 3), padding_mode="reflect"),
        F.conv1d(F.pad(x[..., 2:], (0, 3), "reflect"), w),
    )


def test_residual_and_activation() -> None:
    x, w, b, r = (torch.randn(s, requires_grad=True) for s in ((2, 3, 9), (4, 3, 3), (4,), (2, 4, 9)))
    for name, function in (("relu", torch.relu), ("silu", F.silu)):
        ours = polyconv.conv1d(x, w, b, padding=1, activation=name, residual=r)
        theirs = function(F.conv1d(x, w, b, padding=1) + r)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for one, other in zip(*(torch.autograd.grad(y.sum(), (x, w, b, r)) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_output_may_be_changed_in_place() -> None:
    """Autograd must not treat a backend's pooled memory as a view."""
    for name in ("conv1d", "conv3d", "transposed 1d"):
        for tolerance in (0.0, 1e-4):
            x, *others = CASES[name].tensors(torch.float32)
            with polyconv.tolerance(tolerance):
                F.relu(CASES[name].ours(x, *others), inplace=True).sum().backward()
            assert x.grad is not None


WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "channels": ("conv_transpose2d", ((1, 3, 5, 5), (4, 3, 2, 2)), {}, "to have 4 channels, but got 3"),
    "groups": ("conv_transpose2d", ((1, 3, 5, 5), (3, 3, 2, 2)), {"groups": 2}, "divisible by 2 at dimension 0"),
    "bias": ("conv_transpose1d", ((1, 3, 5), (3, 4, 2), (3,)), {}, "with 4 elements"),
    "stride": ("conv_transpose1d", ((1, 3, 5), (3, 4, 2)), {"stride": 0}, "non-positive stride"),
    "padding": ("conv_transpose1d", ((1, 3, 5), (3, 4, 2)), {"padding": -1}, "negative padding"),
    "too much padding": ("conv_transpose1d", ((1, 3, 2), (3, 4, 2)), {"padding": 2}, "Output size is too small"),
    "output padding": (
        "conv_transpose1d",
        ((1, 3, 5), (3, 4, 2)),
        {"output_padding": 1},
        "must be smaller than either",
    ),
    "negative": (
        "conv_transpose1d",
        ((1, 3, 5), (3, 4, 2)),
        {"stride": 2, "output_padding": -1},
        "negative output_pad",
    ),
    "dimensions": ("conv_transpose1d", ((1, 3, 5, 5), (3, 4, 2)), {}, "2D (unbatched) or 3D (batched) input to conv_t"),
    "weight": ("conv1d", ((1, 3, 5), (3, 3, 2, 2)), {}, "for conv1d a 3-dimensional weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    function, shapes, kwargs, words = WRONG[name]
    tensors = [torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        getattr(F, function)(*tensors, **kwargs)
    with pytest.raises(RuntimeError) as error:
        getattr(polyconv, function)(*tensors, **kwargs)
    assert words in str(error.value)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Any 1-D to 3-D geometry with an output, transposed or not."""
    rank, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups, c, k = (draw(st.integers(1, 3)) for _ in range(3))
    axes = []
    for _ in range(rank):
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        padding, reach = draw(st.integers(0, 3)), dilation * (kernel - 1) + 1
        if transposed:
            extra = draw(st.integers(0, max(stride, dilation) - 1))
            least = max(1, -(-(2 * padding + 1 - reach - extra) // stride) + 1)
        else:
            extra, least = 0, max(1, reach - 2 * padding)
        axes.append(
            (draw(st.integers(least, least + (6 if rank < 3 else 3))), kernel, stride, padding, dilation, extra)
        )
    size, kernels, stride, padding, dilation, extra = zip(*axes, strict=True)
    kwargs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x = (draw(st.integers(1, 2)), groups * c, *size)
    if transposed:
        w = (groups * c, k, *kernels)
        return Case(f"conv_transpose{rank}d", x, w, {**kwargs, "output_padding": extra}, draw(st.booleans()))
    return Case(f"conv{rank}d", x, (groups * k, c, *kernels), kwargs, draw(st.booleans()))


@given(any_case())
@settings(max_examples=90)
def test_any_geometry(case: Case) -> None:
    tensors = case.tensors()
    ours, theirs = case.ours(*tensors), case.theirs(*tensors)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(theirs)
    for one, other in zip(*(torch.autograd.grad(y, tensors, dy) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


# ---- on a GPU


ON_A_GPU = {
    "conv1d": CASES["conv1d"],
    "conv1d, more than a tile": Case("conv1d", (1, 9, 150), (33, 9, 7), {"padding": 6, "dilation": 2}),
    "transposed 1d, vocoder": CASES["transposed 1d, vocoder"],
    "transposed 2d, output padding": CASES["transposed 2d, output padding"],
    "transposed 2d, more than a tile": Case(
        "conv_transpose2d", (1, 16, 9, 10), (16, 24, 4, 4), {"stride": 2, "padding": 1}
    ),
    "conv3d": CASES["conv3d"],
    "conv3d, strided and dilated": CASES["conv3d, strided and dilated"],
    "conv3d, more padding than kernel": CASES["conv3d, more padding than kernel"],
    "conv3d, more images than depth": CASES["conv3d, more images than depth"],
    "conv3d, more than a tile": Case("conv3d", (1, 16, 3, 12, 14), (20, 16, 3, 3, 3), {"padding": 1}),
    "transposed 3d, output padding": CASES["transposed 3d, output padding"],
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_as_machine_code(name: str) -> None:
    """Every element of the output and all gradients, executed as GPU machine code, against float64."""
    run_in_virtual_gpu(_as_machine_code, ON_A_GPU[name])


def any_case(name: str, seed: int) -> Case:
    """A small convolution of that name: the emulator runs every thread."""
    choose = random.Random(f"{name} {seed}")
    rank, transposed = int(name[-2]), "transpose" in name
    groups = choose.choice([1, 1, 1, 2, 3])
    inputs, outputs = choose.choice([1, 2, 3, 8, 12]), choose.choice([1, 2, 5, 8, 20])
    kernel = [choose.choice([1, 2, 3, 3, 4, 5, 7, *([11, 16] if rank == 1 else [])]) for _ in range(rank)]
    stride = [choose.choice([1, 1, 2, 3, 5]) for _ in range(rank)]
    dilation = [choose.choice([1, 1, 2, 3]) for _ in range(rank)]
    padding = [choose.randrange(reach * (taps - 1) + 1) for reach, taps in zip(dilation, kernel, strict=True)]
    kwargs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    least = [max(1, reach * (taps - 1) + 1 - 2 * p) for reach, taps, p in zip(dilation, kernel, padding, strict=True)]
    channels = (inputs * groups, outputs) if transposed else (outputs * groups, inputs)
    if transposed:
        kwargs["output_padding"] = [choose.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)]
        spans = [reach * (taps - 1) - 2 * p for reach, taps, p in zip(dilation, kernel, padding, strict=True)]
        least = [max(1, 1 - span // step) for span, step in zip(spans, stride, strict=True)]
    size = [extent + choose.randrange(40 if rank == 1 else 9) for extent in least]
    x = (choose.choice([1, 2, 3]), inputs * groups, *size)
    return Case(name, x, (*channels, *kernel), kwargs, bias=choose.random() < 0.5)


@pytest.mark.parametrize("part", range(20 if NIGHTLY else 1))
@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
def test_any_as_machine_code(name: str, part: int) -> None:
    """Output and all gradients of ten geometries; nightly of two hundred."""
    cases = [any_case(name, seed) for seed in range(10 * part, 10 * part + 10)]
    run_in_virtual_gpu(_as_machine_code, *cases, timeout=600.0)


def _as_machine_code(*cases: Case) -> None:
    for case in cases:
        _one_as_machine_code(case)


def _one_as_machine_code(case: Case) -> None:
    from polyconv.backend import override

    torch.manual_seed(0)
    tensors = case.tensors(torch.float32)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y = case.theirs(*exact)
    dy = torch.randn_like(y)
    expected = [y, *torch.autograd.grad(y, exact, dy)]
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        z = case.ours(*tensors)
        found = [z, *torch.autograd.grad(z, tensors, dy.float())]
        # If no tap overlaps the input, nothing is launched and the result is zero.
        assert gpu.launches or not any(map(torch.any, expected))
    for one, other in zip(found, expected, strict=True):
        allowed = 1e-4 * (other.square().mean().sqrt() + other.abs())
        assert ((one.double() - other).abs() <= allowed).all(), case
