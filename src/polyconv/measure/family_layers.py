"""Layers of networks for audio and of decoders: convolutions over one axis, and transposed ones.

``layers.json`` has those of networks that classify pictures, which have no such layers: their kernels are square, and
their long maps are wide and high. A profile of a processor that had only these could say nothing about a signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .workloads import Workload


class _Layer(NamedTuple):
    """A convolution, the same along each axis of its input."""

    channels: int
    size: tuple[int, ...]
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False
    depthwise: bool = False


@lru_cache(maxsize=1)
def every() -> tuple[Workload, ...]:
    """All of them, one signal or image each: ``family/vocoder/4``."""
    networks = {
        "vocoder": _vocoder(),
        "demucs": _demucs(),
        "wavenet": _wavenet(),
        "tasnet": _tasnet(),
        "wav2vec": _wav2vec(),
        "dcgan": _dcgan(),
        "unet": _unet(),
    }
    return tuple(
        _workload(f"family/{network}/{number}", layer)
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
    """A second in stereo, and its four sources."""
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
    """Conv-TasNet: an encoder of two samples' stride, blocks of depthwise layers, a decoder."""
    yield _Layer(1, (16000,), 512, 16, 8)
    yield _Layer(128, (2000,), 512, 1)
    for dilation in (1, 8, 64):
        yield _Layer(512, (2000,), 512, 3, padding=dilation, dilation=dilation, depthwise=True)
    yield _Layer(512, (2000,), 1, 16, 8, transposed=True)


def _wav2vec() -> Iterator[_Layer]:
    """The features of half a second."""
    yield _Layer(1, (8000,), 512, 10, 5)
    yield _Layer(512, (1599,), 512, 3, 2)
    yield _Layer(512, (199,), 512, 3, 2)
    yield _Layer(512, (99,), 512, 2, 2)


def _dcgan() -> Iterator[_Layer]:
    """From noise to 64 x 64 pixels."""
    yield _Layer(100, (1, 1), 512, 4, transposed=True)
    for c, side, k in ((512, 4, 256), (256, 8, 128), (128, 16, 64), (64, 32, 3)):
        yield _Layer(c, (side, side), k, 4, 2, 1, transposed=True)


def _unet() -> Iterator[_Layer]:
    """The way up, to 128 x 128 pixels."""
    for c, side in ((512, 8), (256, 16), (128, 32), (64, 64)):
        yield _Layer(c, (side, side), c // 2, 2, 2, transposed=True)


def _workload(name: str, layer: _Layer) -> Workload:
    rank = len(layer.size)
    return Workload(
        name=name,
        id=name,
        suite="layers",
        input=(1, layer.channels, *layer.size),
        out_channels=layer.outputs,
        kernel=(layer.kernel,) * rank,
        stride=(layer.stride,) * rank,
        padding=(layer.padding,) * rank,
        dilation=(layer.dilation,) * rank,
        groups=layer.channels if layer.depthwise else 1,
        bias=rank == 1,
        transposed=layer.transposed,
        output_padding=(0,) * rank if layer.transposed else (),
    )
