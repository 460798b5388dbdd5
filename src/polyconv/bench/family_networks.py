"""Networks of convolutions over one axis and three, and of transposed ones: audio, volumes, images from noise.

By default at the size at which people use them; the tests train them narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Vocoder(nn.Module):
    """As HiFi-GAN's generator: a spectrogram becomes a signal, stage by stage, by kernels of many reaches."""

    def __init__(self, mels: int = 80, width: int = 512, steps: Sequence[int] = (8, 8, 2, 2)) -> None:
        super().__init__()
        self.read = nn.Conv1d(mels, width, 7, padding=3)
        self.longer, self.blocks = nn.ModuleList(), nn.ModuleList()
        c = width
        for step in steps:
            self.longer.append(nn.ConvTranspose1d(c, c // 2, 2 * step, step, step // 2))
            c //= 2
            self.blocks.append(Mean(DilatedResiduals(c, kernel) for kernel in (3, 7, 11)))
        self.write = nn.Conv1d(c, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for longer, blocks in zip(self.longer, self.blocks, strict=True):
            x = blocks(longer(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.write(F.leaky_relu(x)))


class Mean(nn.ModuleList):
    """Of what modules make of the same input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in self]).mean(0)


class DilatedResiduals(nn.Module):
    """Pairs of convolutions, the first of each dilated, around which the input is added."""

    def __init__(self, c: int, kernel: int, dilations: Sequence[int] = (1, 3, 5)) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(c, c, kernel, padding="same", dilation=d) for d in dilations)
        self.dense = nn.ModuleList(nn.Conv1d(c, c, kernel, padding="same") for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, dense in zip(self.dilated, self.dense, strict=True):
            x = x + dense(F.leaky_relu(dilated(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Demucs(nn.Module):
    """As Demucs without its recurrent middle: a mix goes down by strides of 4, and its sources come up the same way."""

    def __init__(self, width: int = 48, depth: int = 4, channels: int = 2, sources: int = 4) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        c, back = channels, sources * channels
        for level in range(depth):
            k = width * 2**level
            self.down.append(
                nn.Sequential(nn.Conv1d(c, k, 8, 4, 2), nn.ReLU(), nn.Conv1d(k, 2 * k, 1), nn.GLU(1)),
            )
            ends: list[nn.Module] = [nn.ConvTranspose1d(k, back, 8, 4, 2), *([nn.ReLU()] if level else [])]
            self.up.insert(0, nn.Sequential(nn.Conv1d(k, 2 * k, 3, padding=1), nn.GLU(1), *ends))
            c = back = k

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for down in self.down:
            x = down(x)
            seen.append(x)
        for up in self.up:
            x = up(x + seen.pop())
        return x


def dcgan(width: int = 64, noise: int = 100) -> nn.Module:
    """DCGAN's generator: from noise to an image of 64 x 64, by transposed convolutions of stride 2."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(noise, 8 * width, 4, bias=False)]
    for c in (8 * width, 4 * width, 2 * width):
        layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.ConvTranspose2d(c, c // 2, 4, 2, 1, bias=False)]
    ends = (nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
    return nn.Sequential(*layers, *ends)


class UNet(nn.Module):
    """Labels of pixels or of voxels: the way up is transposed, and sees what the way down saw."""

    def __init__(self, axes: int, channels: int, width: int, levels: int, classes: int) -> None:
        super().__init__()
        self.axes = axes
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(self._twice(c, k) for c, k in zip([channels, *widths[:-1]], widths, strict=True))
        self.pool = self._made("MaxPool", 2)
        self.up = nn.ModuleList(self._made("ConvTranspose", 2 * k, k, 2, 2) for k in reversed(widths[:-1]))
        self.after = nn.ModuleList(self._twice(2 * k, k) for k in reversed(widths[:-1]))
        self.last = self._made("Conv", width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            seen.append(x)
        seen.pop()
        for up, after in zip(self.up, self.after, strict=True):
            x = after(torch.cat([up(x), seen.pop()], 1))
        y: Tensor = self.last(x)
        return y

    def _twice(self, c: int, k: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs in (c, k):
            convolution = self._made("Conv", inputs, k, 3, padding=1, bias=False)
            layers += [convolution, self._made("BatchNorm", k), nn.ReLU()]
        return nn.Sequential(*layers)

    def _made(self, name: str, *sizes: int, **options: Any) -> nn.Module:
        module: nn.Module = getattr(nn, f"{name}{self.axes}d")(*sizes, **options)
        return module


def unet(width: int = 32) -> nn.Module:
    """Over pictures: five levels."""
    return UNet(2, channels=3, width=width, levels=5, classes=21)


def volume_unet(width: int = 16) -> nn.Module:
    """Over volumes: three levels."""
    return UNet(3, channels=1, width=width, levels=3, classes=3)
