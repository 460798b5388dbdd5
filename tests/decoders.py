"""Networks with convolutions over one to three axes and transposed ones, small: a vocoder, a generator, U-Nets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Vocoder(nn.Module):
    """As HiFi-GAN's generator: each stage transposes to a longer signal, then adds kernels of several dilations."""

    rate = 1e-2

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.read = nn.Conv1d(20, width, 7, padding=3)
        self.longer = nn.ModuleList(
            nn.ConvTranspose1d(width // 2**i, width // 2 ** (i + 1), 2 * step, step, step // 2)
            for i, step in enumerate((8, 4))
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Conv1d(c, c, kernel, padding="same", dilation=d) for kernel, d in ((3, 1), (7, 3), (11, 5))
            )
            for c in (width // 2, width // 4)
        )
        self.write = nn.Conv1d(width // 4, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for longer, block in zip(self.longer, self.blocks, strict=True):
            x = longer(F.leaky_relu(x, 0.1))
            for convolution in block:
                x = x + convolution(F.leaky_relu(x, 0.1))
        return torch.tanh(self.write(F.leaky_relu(x)))

    def example(self) -> Tensor:
        return torch.randn(2, 20, 24)


class DcGan(nn.Module):
    """DCGAN's generator: from noise to an image, by transposed convolutions of stride 2."""

    rate = 1e-2

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(24, 4 * width, 4, bias=False)]
        for c in (4 * width, 2 * width):
            layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.ConvTranspose2d(c, c // 2, 4, 2, 1, bias=False)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))

    def example(self) -> Tensor:
        return torch.randn(4, 24, 1, 1)


class UNet(nn.Module):
    """Two levels; the way up is transposed, and sees what the way down saw."""

    rate = 1e-2
    axes = 2

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = self._twice(3, width), self._twice(width, 2 * width)
        self.bottom = self._twice(2 * width, 4 * width)
        transpose = getattr(nn, f"ConvTranspose{self.axes}d")
        self.up = nn.ModuleList(transpose(c, c // 2, 2, 2) for c in (4 * width, 2 * width))
        self.after = nn.ModuleList(self._twice(c, c // 2) for c in (4 * width, 2 * width))
        self.last = getattr(nn, f"Conv{self.axes}d")(width, 2, 1)
        self.pool = getattr(nn, f"MaxPool{self.axes}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.first(x)]
        seen.append(self.second(self.pool(seen[0])))
        x = self.bottom(self.pool(seen[1]))
        for up, after in zip(self.up, self.after, strict=True):
            x = after(torch.cat([up(x), seen.pop()], 1))
        y: Tensor = self.last(x)
        return y

    def example(self) -> Tensor:
        return torch.randn(2, 3, 32, 32)

    def _twice(self, c: int, k: int) -> nn.Sequential:
        conv = getattr(nn, f"Conv{self.axes}d")
        return nn.Sequential(conv(c, k, 3, padding=1), nn.ReLU(), conv(k, k, 3, padding=1), nn.ReLU())


class VolumeUNet(UNet):
    """The same over three axes."""

    axes = 3

    def __init__(self) -> None:
        super().__init__(width=8)

    def example(self) -> Tensor:
        return torch.randn(1, 3, 8, 16, 16)
