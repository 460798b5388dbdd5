"""The native depthwise kernels against float64: every pass, border, stride, multiplier and memory layout."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpu_passes import (
    IN_LAYOUTS,
    OUT_LAYOUTS,
    Layer,
    Run,
    close,
    instruction_sets,
    layers,
    load_native,
    on_instruction_set,
    poisoned,
    same_bits_for_any_threads,
)
from polyconv.cpu import native
from polyconv.cpu.engines import depthwise_volumes
from polyconv.problem import Problem

load_native()

TOLERANCE = 1e-4


def depthwise(
    batch: int,
    channels: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    *,
    multiplier: int = 1,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] | None = None,
    dilation: tuple[int, int] = (1, 1),
    border: str = "zeros",
) -> Layer:
    """Padding that keeps the size, by default."""
    h, w = (dilation[i] * (kernel[i] - 1) // 2 for i in range(2))
    x, out = (batch, channels, *size), channels * multiplier
    return Layer(x, out, kernel, padding or (h, h, w, w), dilation, stride, channels, border)


LAYERS = {
    "3x3": depthwise(2, 5, (13, 56), (3, 3)),
    "5x5, strided": depthwise(2, 3, (14, 56), (5, 5), stride=(2, 2)),
    "3x3, strided, odd": depthwise(1, 3, (15, 57), (3, 3), stride=(2, 2)),
    "7x7": depthwise(1, 3, (19, 70), (7, 7)),
    "31x31": depthwise(1, 2, (33, 35), (31, 31)),
    "3x1": depthwise(1, 3, (40, 80), (3, 1)),
    "3x7": depthwise(1, 3, (21, 130), (3, 7)),
    "1x1": depthwise(2, 3, (5, 19), (1, 1)),
    "1x1, strided": depthwise(2, 3, (6, 20), (1, 1), stride=(2, 2)),
    "dilated": depthwise(1, 3, (23, 45), (3, 5), dilation=(2, 3)),
    "dilated and strided": depthwise(1, 3, (23, 45), (5, 4), stride=(2, 3), dilation=(3, 2)),
    "stride past the kernel": depthwise(1, 3, (23, 45), (2, 2), stride=(5, 4)),
    "stride longer than the image": depthwise(1, 3, (3, 2), (2, 2), stride=(5, 4)),
    "long strides, dilated": depthwise(
        1, 3, (7, 5), (2, 2), padding=(3, 1024, 2, 1025), stride=(1024, 1024), dilation=(3, 1)
    ),
    "replicate, long strides": depthwise(
        1, 3, (7, 5), (3, 2), padding=(4, 2050, 2, 1025), stride=(1024, 1024), dilation=(3, 1), border="replicate"
    ),
    "three columns per channel": depthwise(2, 3, (9, 3), (3, 3), multiplier=3),
    "multiplier, strided": depthwise(1, 4, (17, 33), (5, 3), multiplier=2, stride=(2, 2)),
    "cropped": depthwise(1, 3, (19, 45), (3, 3), padding=(-2, -3, -4, 1)),
    "cropped, strided": depthwise(1, 3, (19, 45), (3, 3), padding=(-2, 1, -3, -1), stride=(2, 2)),
    "padding wider than the kernel": depthwise(1, 3, (7, 9), (3, 3), padding=(5, 7, 6, 20)),
    "taller than a band": depthwise(1, 2, (150, 20), (3, 3)),
    "reflect": depthwise(1, 3, (9, 21), (5, 5), border="reflect"),
    "reflect, strided": depthwise(1, 3, (9, 21), (5, 5), border="reflect", stride=(2, 2)),
    "replicate": depthwise(1, 3, (3, 2), (3, 3), padding=(1, 5, 3, 0), border="replicate"),
    "circular": depthwise(1, 3, (9, 21), (3, 7), border="circular", stride=(1, 3)),
    "7x7 pixels": depthwise(3, 11, (7, 7), (3, 3)),
    "7x7 pixels, strided": depthwise(3, 11, (7, 7), (5, 5), stride=(2, 2)),
    "rows of a vector and some": depthwise(2, 9, (5, 19), (5, 5), stride=(1, 2)),
    "small, dilated and strided": depthwise(2, 9, (14, 10), (3, 3), stride=(2, 1), dilation=(2, 2)),
    "pixels that a stride leaves over": depthwise(2, 9, (8, 10), (2, 2), padding=(0, 0, 0, 0), stride=(2, 2)),
    "a single column": depthwise(2, 9, (12, 1), (3, 3), stride=(2, 2)),
    "a vector of channels and some": depthwise(2, 37, (9, 11), (3, 3)),
    "many channels, strided": depthwise(1, 48, (9, 12), (5, 5), stride=(2, 2)),
    "many channels, tiles of pixels": depthwise(2, 151, (14, 15), (3, 3)),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_edges(instruction_set: str, layer: Layer, layout: str) -> None:
    run = Run.make(layer, torch.float32, layout, layout)
    run.check("depthwise", TOLERANCE, out_layout=layout, dgrad=layer.border == "zeros")


@given(
    layer=layers(depthwise=True),
    x_layout=st.sampled_from(IN_LAYOUTS),
    y_layout=st.sampled_from(IN_LAYOUTS),
    out_layout=st.sampled_from(OUT_LAYOUTS),
    name=instruction_sets,
    bias=st.booleans(),
)
def test_any_geometry(layer: Layer, x_layout: str, y_layout: str, out_layout: str, name: str, bias: bool) -> None:
    with on_instruction_set(name):
        run = Run.make(layer, torch.float32, x_layout, y_layout)
        run.check("depthwise", TOLERANCE, out_layout=out_layout, bias=bias, dgrad=layer.border == "zeros")


def test_long_strides_take_no_memory(instruction_set: str) -> None:
    """Of the lines between two outputs a thread keeps those of the image: seven here, of 3,000 that a block spans."""
    before = _resident_bytes()
    for name in ("long strides, dilated", "replicate, long strides"):
        layer = LAYERS[name]
        Run.make(layer, torch.float32, "contiguous", "contiguous").check("depthwise", TOLERANCE, dgrad=False)
    assert _resident_bytes() - before < 100 * 2**20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_outputs_are_streamed(layout: str) -> None:
    """Streaming stores: over 8 MB, at addresses with and without cache-line alignment."""
    for width in (56, 61):
        layer = depthwise(5, 144, (56, width), (3, 3))
        run = Run.make(layer, torch.float32, layout, layout)
        run.check("depthwise", TOLERANCE, out_layout=layout)
        assert run.expected["y"].numel() * 4 > 8 << 20


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "name",
    [
        "3x3",
        "5x5, strided",
        "7x7 pixels",
        "taller than a band",
        "multiplier, strided",
        "many channels, tiles of pixels",
    ],
)
def test_same_bits_whatever_the_number_of_threads(name: str, layout: str) -> None:
    run = Run.make(LAYERS[name], torch.float32, layout, layout)
    same_bits_for_any_threads(lambda: run.passes("depthwise"))


def test_weight_gradient_of_large_images_is_accurate() -> None:
    """All products are positive: the worst case for a float32 sum."""
    x, dy = torch.rand(1, 2, 300, 500) + 1, torch.rand(1, 2, 300, 500) + 1
    dw, db = torch.empty(2, 1, 3, 3), torch.empty(2)
    torch.ops.polyconv_cpu.depthwise_wgrad(x, dy, dw, db, [1, 1, 1, 1, 1, 1, 2, 0])
    expected = torch.nn.grad.conv2d_weight(x.double(), (2, 1, 3, 3), dy.double(), padding=1, groups=2)
    torch.testing.assert_close(dw.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(db.double(), dy.double().sum((0, 2, 3)), rtol=1e-6, atol=0)


TILED = [
    depthwise(2, channels, size, (kernel, kernel), stride=(stride, stride), dilation=(dilation, dilation))
    for kernel in (3, 5, 7)
    for stride in (1, 2)
    for dilation in (1, 2)
    for channels, size in ((16, (14, 15)), (37, (5, 4)), (48, (2, 9)), (151, (9, 23)))
] + [
    depthwise(1, 33, (9, 12), (2, 5), stride=(2, 1)),
    depthwise(1, 24, (11, 13), (4, 3), stride=(1, 2), dilation=(3, 1)),
    depthwise(1, 24, (11, 13), (3, 7), stride=(2, 4), dilation=(2, 2)),
    depthwise(1, 24, (13, 15), (5, 3), padding=(-1, 7, -2, 9)),
    depthwise(1, 24, (3, 5), (3, 3), padding=(9, 9, 12, 1)),
]
"""Kernels of 3, 5 and 7 columns in channels_last: channels and pixels that fill vectors and tiles, and that do not."""


@pytest.mark.parametrize("x_layout", ["channels_last", "channels of more"])
def test_tiles_of_pixels(instruction_set: str, x_layout: str) -> None:
    """Weights in any layout, among them contiguous channels, which are read in place; neighbours of y stay as they
    are, and the residual may be y itself."""
    assert native.instruction_set() == instruction_set
    for layer in TILED:
        run = Run.make(layer, torch.float32, "channels_last")

        def inside(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            n, c, h, w = shape
            more = 0 if x_layout == "channels_last" else 7
            whole = torch.full((n, h + more, w + more, c + more), torch.nan)
            return whole, whole[:, :h, :w, more // 2 : more // 2 + c].permute(0, 3, 1, 2)

        x, packed = inside(layer.x)[1].copy_(run.x), run.w.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        assert packed.stride(0) == 1
        for w, bias, activation in ((packed, run.bias.contiguous(), 1), (run.w, run.bias, 0), (packed, None, 2)):
            whole, y = inside(layer.y)
            torch.ops.polyconv_cpu.depthwise_fprop(x, w, bias, y, layer.geometry, None, activation)
            sums = run.expected["y"] if bias is not None else run.expected["y"] - run.bias.double()[:, None, None]
            close(y, (lambda t: t, F.relu, F.silu)[activation](sums), TOLERANCE)
            assert whole.isnan().sum() == whole.numel() - y.numel()
            y.copy_(run.dy)
            torch.ops.polyconv_cpu.depthwise_fprop(x, w, bias, y, layer.geometry, y, 0)
            close(y, sums + run.dy.double(), TOLERANCE)


def test_taps_beyond_the_border_are_not_multiplied(instruction_set: str) -> None:
    """Infinite weights that see only the border change nothing."""
    assert native.instruction_set() == instruction_set
    layer = depthwise(1, 32, (1, 4), (3, 3))
    x, w = torch.randn(layer.x).to(memory_format=torch.channels_last), torch.randn(layer.w)
    w[:, :, ::2] = torch.inf
    y = poisoned(layer.y, "channels_last")
    torch.ops.polyconv_cpu.depthwise_fprop(x, w, None, y, layer.geometry)
    close(y, F.conv2d(x.double(), w[:, :, 1:2].double(), padding=(0, 1), groups=32), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_empty_batch(dtype: torch.dtype) -> None:
    run = Run.make(depthwise(0, 3, (8, 8), (3, 3)), dtype)
    dw, db = run.wgrad("depthwise")
    assert db is not None
    assert dw.eq(0).all()
    assert db.eq(0).all()
    assert run.fprop("depthwise").numel() == run.dgrad("depthwise").numel() == 0


def test_what_is_not_depthwise_is_refused() -> None:
    x, w, y = torch.randn(1, 4, 8, 8), torch.randn(4, 2, 3, 3), torch.empty(1, 4, 6, 6)
    with pytest.raises(RuntimeError, match="one input channel per group"):
        torch.ops.polyconv_cpu.depthwise_fprop(x, w, None, y, [1, 1, 0, 0, 1, 1, 2, 0])


VOLUMES = [
    ((1, 8, 9, 10, 20), 5, 1, 2, 1),
    ((2, 3, 7, 33, 18), 3, 1, 1, 1),
    ((1, 4, 6, 9, 40), (3, 5, 3), (2, 1, 2), (1, 2, 1), 1),
    ((1, 2, 8, 8, 70), 3, 1, 2, 2),
    ((2, 5, 4, 6, 16), (1, 3, 3), 1, (0, 1, 1), 1),
    ((1, 3, 5, 5, 17), (4, 2, 3), 1, 0, 1),
    ((1, 2, 4, 40, 30), 7, 1, (9, 3, 3), 1),  # output slices without input
    ((1, 1, 12, 7, 9), (3, 3, 5), (4, 1, 1), (2, 1, 2), (6, 1, 1)),  # the taps along the depth span the volume
    ((1, 1, 9, 9, 9), 3, (2, 3, 1), 2, (2, 3, 4)),
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation"), VOLUMES)
@pytest.mark.parametrize("scale", [1.0, 1e-35])
def test_volumes_sum_over_all_depth_taps_at_once(shape, kernel, stride, padding, dilation, scale: float) -> None:
    channels = shape[1]
    conv = torch.nn.Conv3d(channels, channels, kernel, stride, padding, dilation, groups=channels)
    x, w, b = torch.randn(shape), conv.weight.detach() * scale, conv.bias.detach() * scale
    moves = {"stride": conv.stride, "dilation": conv.dilation, "groups": channels}
    moves["padding"] = tuple(pad for pad in conv.padding for _ in range(2))
    expected = F.conv3d(x.double(), w.double(), b.double(), conv.stride, conv.padding, conv.dilation, channels)
    y = torch.full(expected.shape, torch.nan)
    forward = Problem.make("fprop", shape, tuple(w.shape), bias=True, **moves)
    depthwise_volumes.prepare(None, forward, None)({"x": x, "w": w, "bias": b, "y": y})
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()
    backward = Problem.make("dgrad", shape, tuple(w.shape), **moves)
    if max(conv.stride) > 1 or conv.padding[0] > (conv.kernel_size[0] - 1) * conv.dilation[0]:
        assert depthwise_volumes.refusal(backward)
        return
    dy, dx = torch.randn(expected.shape), torch.full(shape, torch.nan)
    grad = torch.nn.grad.conv3d_input(
        shape, w.double(), dy.double(), conv.stride, conv.padding, conv.dilation, channels
    )
    depthwise_volumes.prepare(None, backward, None)({"y": dy, "w": w, "x": dx})
    assert (dx - grad).abs().max() <= 1e-5 * grad.abs().max()


def test_volumes_that_are_refused() -> None:
    def refusal(x=(1, 4, 8, 8, 8), w=(4, 1, 3, 3, 3), kind="fprop", groups=4, **moves) -> str | None:
        return depthwise_volumes.refusal(Problem.make(kind, x, w, groups=groups, **moves))

    assert refusal() is None
    assert refusal(kind="wgrad")
    assert refusal(w=(8, 1, 3, 3, 3))
    assert refusal(w=(4, 2, 3, 3, 3), groups=2)
    assert refusal(dtype="float64")
    assert refusal(padding=(3, 3, 0, 0, 0, 0)) is None
    assert refusal(padding=(-1, 0, 0, 0, 0, 0))
    assert refusal(padding=(1, 1, 1, 1, 1, 1), padding_mode="reflect")


def test_rows_and_slices_in_bands() -> None:
    """A volume whose slices do not fit a cache, and more threads than channels, give the same bits as one thread."""
    x, w = torch.randn(1, 2, 40, 90, 600), torch.randn(2, 1, 3, 3, 3)
    problem = Problem.make("fprop", x.shape, w.shape, padding=(1,) * 6, groups=2)
    expected = F.conv3d(x, w, padding=1, groups=2)
    threads, ys = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            ys.append(torch.full(expected.shape, torch.nan))
            depthwise_volumes.prepare(None, problem, None)({"x": x, "w": w, "y": ys[-1]})
    finally:
        torch.set_num_threads(threads)
    assert ys[0].equal(ys[1])
    assert (ys[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_volumes_of_wrong_sizes_are_refused() -> None:
    volumes = native.operator("depthwise_volumes")
    x, w, y = torch.zeros(2, 4, 3, 8, 8), torch.zeros(4, 3, 3, 3), torch.zeros(2, 4, 1, 6, 6)
    geometry = [1, 1, 1, 0, 0, 0, 1, 1, 1]
    volumes(x, w, None, y, geometry)
    for wrong in ((x[:1], w, y), (x[:, :2], w, y), (x, w[:3], y), (x, w.mT, y), (x.double(), w, y), (x, w, y[:, 0])):
        with pytest.raises(RuntimeError):
            volumes(wrong[0], wrong[1], None, wrong[2], geometry)
    for wrong_geometry in (geometry[:8], [0, *geometry[1:]], [*geometry[:3], -1, *geometry[4:]]):
        with pytest.raises(RuntimeError):
            volumes(x, w, None, y, wrong_geometry)
