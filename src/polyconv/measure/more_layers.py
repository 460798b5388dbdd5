"""Layers of networks that do not classify images, and so are not in ``layers.json``.

Audio networks and decoders have 1-D and transposed convolutions. Networks that label or restore every pixel, or read
spectrograms, have dilated, asymmetric and long kernels on large maps: polyconv's main use. A profile without such
layers would not cover them, and would choose ATen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .workloads import Workload


class _Layer(NamedTuple):
    """A convolution. A single number applies to every axis."""

    channels: int
    size: tuple[int, ...]
    outputs: int
    kernel: int | tuple[int, ...]
    stride: int = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    transposed: bool = False
    depthwise: bool = False


@lru_cache(maxsize=1)
def every() -> tuple[Workload, ...]:
    """All layers with batch 1: ``family/vocoder/4``, ``pixels/unet/2``, ``photographs/1``."""
    networks = {
        "family/vocoder": _vocoder(),
        "family/demucs": _demucs(),
        "family/wavenet": _wavenet(),
        "family/tasnet": _tasnet(),
        "family/wav2vec": _wav2vec(),
        "family/dcgan": _dcgan(),
        "family/unet": _unet_up(),
        "pixels/deeplab": _deeplab(),
        "pixels/drn": _drn(),
        "pixels/context": _context(),
        "pixels/erfnet": _erfnet(),
        "pixels/gcn": _gcn(),
        "pixels/unet": _unet_down(),
        "pixels/restoration": _restoration(),
        "pixels/spectrogram": _spectrogram(),
        "pixels/large-kernels": _large_kernels(),
        "photographs": _photographs(),
    }
    return tuple(
        _workload(f"{network}/{number}", layer)
        for network, layers in networks.items()
        for number, layer in enumerate(layers, 1)
    )


def _vocoder() -> Iterator[_Layer]:
    """HiFi-GAN's generator on 32 frames."""
    yield _Layer(80, (32,), 512, 7, padding=3)
    c, samples = 512, 32
    for step in (8, 8, 2, 2):
        yield _Layer(c, (samples,), c // 2, 2 * step, step, step // 2, transposed=True)
        c, samples = c // 2, samples * step
        for kernel in (3, 7, 11):
            for dilation in (1, 3, 5):
                yield _Layer(c, (samples,), c, kernel, padding=dilation * (kernel // 2), dilation=dilation)
    yield _Layer(c, (samples,), 1, 7, padding=3)


def _demucs() -> Iterator[_Layer]:
    """Demucs on one second of stereo, to four sources."""
    c, back, samples = 2, 8, 44032
    for k in (48, 96, 192, 384):
        yield _Layer(c, (samples,), k, 8, 4, 2)
        samples //= 4
        yield _Layer(k, (samples,), 2 * k, 1)
        yield _Layer(k, (samples,), 2 * k, 3, padding=1)
        yield _Layer(k, (samples,), back, 8, 4, 2, transposed=True)
        c = back = k


def _wavenet() -> Iterator[_Layer]:
    """Residual layers of growing dilation, on half a second."""
    for dilation in (1, 4, 16, 64, 256):
        yield _Layer(64, (8000,), 128, 2, dilation=dilation)
    yield _Layer(64, (8000,), 256, 1)


def _tasnet() -> Iterator[_Layer]:
    """Conv-TasNet: an encoder with stride 8, blocks of depthwise layers, a decoder."""
    yield _Layer(1, (16000,), 512, 16, 8)
    yield _Layer(128, (2000,), 512, 1)
    for dilation in (1, 8, 64):
        yield _Layer(512, (2000,), 512, 3, padding=dilation, dilation=dilation, depthwise=True)
    yield _Layer(512, (2000,), 1, 16, 8, transposed=True)


def _wav2vec() -> Iterator[_Layer]:
    """Feature encoder on half a second."""
    yield _Layer(1, (8000,), 512, 10, 5)
    yield _Layer(512, (1599,), 512, 3, 2)
    yield _Layer(512, (199,), 512, 3, 2)
    yield _Layer(512, (99,), 512, 2, 2)


def _dcgan() -> Iterator[_Layer]:
    """From noise to 64 x 64 pixels."""
    yield _Layer(100, (1, 1), 512, 4, transposed=True)
    for c, side, k in ((512, 4, 256), (256, 8, 128), (128, 16, 64), (64, 32, 3)):
        yield _Layer(c, (side, side), k, 4, 2, 1, transposed=True)


def _unet_up() -> Iterator[_Layer]:
    """Upsampling path, to 128 x 128 pixels."""
    for c, side in ((512, 8), (256, 16), (128, 32), (64, 64)):
        yield _Layer(c, (side, side), c // 2, 2, 2, transposed=True)


def _same(
    channels: int, size: tuple[int, int], outputs: int, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1)
) -> _Layer:
    """A 2-D layer that keeps the map's size."""
    padding = tuple(d * (taps // 2) for taps, d in zip(kernel, dilation, strict=True))
    return _Layer(channels, size, outputs, kernel, padding=padding, dilation=dilation)


def _deeplab() -> Iterator[_Layer]:
    """Atrous spatial pyramid pooling on features of several backbones."""
    for c, side in ((2048, 17), (512, 33), (320, 33), (256, 65)):
        for dilation in (6, 12, 18):
            yield _same(c, (side, side), 256, (3, 3), (dilation, dilation))


def _drn() -> Iterator[_Layer]:
    """Residual stages with dilation instead of stride."""
    for c, side, dilation in ((64, 112, 2), (128, 56, 2), (256, 28, 2), (512, 28, 2), (256, 56, 4), (512, 28, 4)):
        yield _same(c, (side, side), c, (3, 3), (dilation, dilation))


def _context() -> Iterator[_Layer]:
    """Modules of growing dilation, on labels or on few channels."""
    for c, side, dilations in ((21, 64, (1, 4, 16)), (32, 128, (2, 8)), (64, 128, (2, 4, 8, 16)), (128, 64, (2, 8))):
        for dilation in dilations:
            yield _same(c, (side, side), c, (3, 3), (dilation, dilation))


def _erfnet() -> Iterator[_Layer]:
    """Alternating kernels of one row and one column."""
    for c, size, dilations in ((16, (128, 256), (1,)), (64, (64, 128), (1, 2)), (128, (32, 64), (1, 2, 4, 8, 16))):
        for dilation in dilations:
            yield _same(c, size, c, (3, 1), (dilation, 1))
            yield _same(c, size, c, (1, 3), (1, dilation))


def _gcn() -> Iterator[_Layer]:
    """Large separable kernels before the labels."""
    for taps in (7, 11, 15):
        for c, side in ((256, 64), (512, 32), (64, 64), (21, 32)):
            yield _same(c, (side, side), 21, (taps, 1))
        yield _same(21, (64, 64), 21, (1, taps))
    yield _same(128, (17, 17), 192, (7, 1))
    yield _same(192, (17, 17), 192, (1, 7))


def _unet_down() -> Iterator[_Layer]:
    """Pairs of layers of both paths; the upsampling path has twice the channels."""
    for c, side in ((32, 256), (64, 128), (128, 64), (256, 32), (512, 16)):
        yield _same(c, (side, side), c, (3, 3))
        yield _same(c, (side // 2, side // 2), 2 * c, (3, 3))
        yield _same(2 * c, (side, side), c, (3, 3))


def _restoration() -> Iterator[_Layer]:
    """Super-resolution and denoising: few channels, no pooling."""
    for c, side in ((32, 96), (64, 48), (64, 96), (180, 64)):
        yield _same(c, (side, side), c, (3, 3))
    yield _same(3, (128, 128), 64, (9, 9))
    yield _same(64, (128, 128), 32, (5, 5))
    yield _same(32, (128, 128), 3, (5, 5))
    yield _same(64, (96, 96), 3, (9, 9))


def _spectrogram() -> Iterator[_Layer]:
    """Kernels that differ along frequencies and frames."""
    for c, size, k in ((16, (128, 128), 32), (32, (128, 128), 64), (64, (64, 64), 64)):
        yield _same(c, size, k, (5, 9), (2, 3))
        yield _same(c, size, k, (3, 5), (1, 4))
        yield _same(c, size, k, (5, 5))
    for dilation in (1, 2, 8, 32):
        yield _same(48, (64, 128), 48, (5, 5), (dilation, 1))
    for kernel in ((1, 7), (7, 1), (1, 15), (3, 9)):
        yield _same(48, (64, 128), 48, kernel)


def _large_kernels() -> Iterator[_Layer]:
    """Depthwise kernels as large as the map."""
    for c, side, kernel in ((128, 56, (31, 31)), (256, 28, (29, 29)), (512, 14, (27, 27)), (128, 56, (51, 5))):
        yield _same(c, (side, side), c, kernel)._replace(depthwise=True)
    yield _same(256, (28, 28), 256, (5, 51))._replace(depthwise=True)
    yield _same(128, (56, 56), 128, (13, 13))._replace(depthwise=True)


def _photographs() -> Iterator[_Layer]:
    """First and last layers of networks on whole photographs, which exceed every cache."""
    for c, side in (
        (16, 512),
        (16, 1024),
        (32, 512),
        (32, 1024),
        (48, 512),
        (64, 256),
        (64, 512),
        (96, 384),
        (128, 256),
    ):
        yield _same(c, (side, side), c, (3, 3))
    for c, side, k in ((64, 512, 32), (128, 256, 64), (3, 512, 32), (3, 512, 64), (64, 512, 3)):
        yield _same(c, (side, side), k, (3, 3))
    for c, side, dilation in ((32, 512, 2), (64, 256, 4), (64, 512, 8)):
        yield _same(c, (side, side), c, (3, 3), (dilation, dilation))
    for c, side, k, kernel in (
        (1, 512, 64, (9, 9)),
        (64, 512, 32, (5, 5)),
        (16, 512, 32, (5, 9)),
        (48, 512, 48, (3, 5)),
    ):
        yield _same(c, (side, side), k, kernel)
    for c, side in ((32, 512), (96, 256)):
        yield _same(c, (side, side), c, (3, 3))._replace(depthwise=True)


def _workload(name: str, layer: _Layer) -> Workload:
    rank = len(layer.size)

    def per_axis(number: int | tuple[int, ...]) -> tuple[int, ...]:
        return (number,) * rank if isinstance(number, int) else number

    return Workload(
        name=name,
        id=name,
        suite="layers",
        input=(1, layer.channels, *layer.size),
        out_channels=layer.outputs,
        kernel=per_axis(layer.kernel),
        stride=per_axis(layer.stride),
        padding=per_axis(layer.padding),
        dilation=per_axis(layer.dilation),
        groups=layer.channels if layer.depthwise else 1,
        bias=rank == 1,
        transposed=layer.transposed,
        output_padding=(0,) * rank if layer.transposed else (),
    )
