"""Networks of kinds that the packages of others lack, reduced: images from images, from noise, spectrograms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def srcnn() -> nn.Module:
    """Super-resolution of one channel in three layers: 9x9, 5x5, 5x5."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 9, padding=4),
        nn.ReLU(),
        nn.Conv2d(64, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 1, 5, padding=2),
    )


def edsr(blocks: int = 8, width: int = 64) -> nn.Module:
    """Super-resolution by residual blocks without normalisation, twice the size by shuffled channels."""
    body = [Residual(_conv(width, width), nn.ReLU(), _conv(width, width)) for _ in range(blocks)]
    ends = (_conv(width, 4 * width), nn.PixelShuffle(2), _conv(width, 3))
    return nn.Sequential(_conv(3, width), *body, *ends)


def large_kernels(width: int = 96, blocks: int = 4, kernel: int = 31) -> nn.Module:
    """As RepLKNet: depthwise 31x31 between 1x1 layers, on patches."""
    block = [
        Residual(
            nn.Conv2d(width, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )
        for _ in range(blocks)
    ]
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 4), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
    )


def audio(width: int = 32, classes: int = 50) -> nn.Module:
    """Tags spectrograms: kernels that are longer in time than in frequency, some of them dilated."""

    def layer(c: int, k: int, dilation: tuple[int, int]) -> list[nn.Module]:
        padding = (2 * dilation[0], 4 * dilation[1])
        conv = nn.Conv2d(c, k, (5, 9), padding=padding, dilation=dilation, bias=False)
        return [conv, nn.BatchNorm2d(k), nn.ReLU()]

    return nn.Sequential(
        *layer(1, width, (1, 1)),
        *layer(width, width, (1, 2)),
        nn.MaxPool2d(2),
        *layer(width, 2 * width, (1, 1)),
        *layer(2 * width, 2 * width, (2, 3)),
        nn.MaxPool2d(2),
        *layer(2 * width, 4 * width, (1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def vae_decoder(width: int = 64, latent: int = 4) -> nn.Module:
    """From a latent image to one of eight times its size: residual blocks, nearest-neighbour doubling."""
    parts: list[nn.Module] = [_conv(latent, 4 * width), ResidualBlock(4 * width, 4 * width)]
    c = 4 * width
    for k in (4 * width, 2 * width, width):
        parts += [ResidualBlock(c, k), nn.Upsample(scale_factor=2), _conv(k, k)]
        c = k
    return nn.Sequential(*parts, nn.GroupNorm(8, c), nn.SiLU(), _conv(c, 3))


class Residual(nn.Sequential):
    """Layers around which the input is added."""

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = super().forward(x)
        return x + inner


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after a normalisation and an activation, as in diffusion models."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), _conv(c, k))
        self.second = nn.Sequential(nn.GroupNorm(8, k), nn.SiLU(), _conv(k, k))
        self.shortcut = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.second(self.first(x))
        return y


class DiffusionUNet(nn.Module):
    """The convolutional part of a denoising network: two blocks per level on the way down, two on the way up."""

    def __init__(self, width: int = 64, levels: tuple[int, ...] = (1, 2, 4), channels: int = 4) -> None:
        super().__init__()
        widths = [width * level for level in levels]
        self.first = _conv(channels, width)
        self.down, self.halve, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        c = width
        for k in widths:
            self.down.append(nn.Sequential(ResidualBlock(c, k), ResidualBlock(k, k)))
            self.halve.append(nn.Conv2d(k, k, 3, stride=2, padding=1))
            c = k
        self.middle = nn.Sequential(ResidualBlock(c, c), ResidualBlock(c, c))
        for k in reversed(widths):
            self.up.append(nn.Sequential(ResidualBlock(c + k, k), ResidualBlock(k, k), _conv(k, k)))
            c = k
        self.last = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), _conv(c, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for down, halve in zip(self.down, self.halve, strict=True):
            x = down(x)
            skipped.append(x)
            x = halve(x)
        x = self.middle(x)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([x, skipped.pop()], 1))
        y: Tensor = self.last(x)
        return y


def _conv(c: int, k: int) -> nn.Conv2d:
    return nn.Conv2d(c, k, 3, padding=1)
