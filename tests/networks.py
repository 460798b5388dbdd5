"""Two networks to train: a residual classifier, and a DeepLab-like segmentation network.

``python tests/networks.py --time`` times a training step of the second with ``torch.nn.Conv2d`` and with polyconv's, in
turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv


def normalised(c: int, k: int, kernel: int | tuple[int, int], **conv: int | tuple[int, int]) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU; padded to keep the size at unit stride."""
    rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
    dilation = conv.get("dilation", 1)
    high, wide = (dilation, dilation) if isinstance(dilation, int) else dilation
    padding = (high * (rows - 1) // 2, wide * (columns - 1) // 2)
    return nn.Sequential(
        nn.Conv2d(c, k, kernel, padding=padding, bias=False, **conv),  # type: ignore[arg-type]
        nn.BatchNorm2d(k),
        nn.ReLU(),
    )


class Block(nn.Module):
    """Two 3x3 convolutions with a skip connection."""

    def __init__(self, c: int, k: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.first = normalised(c, k, 3, stride=stride, dilation=dilation)
        self.second = normalised(k, k, 3, dilation=dilation)[:2]
        changes = stride != 1 or c != k
        self.shortcut = normalised(c, k, 1, stride=stride)[:2] if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Eight blocks in four stages, as in ResNet-18; ``width`` channels in the first (64 in the original)."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(normalised(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        c = width
        for stage in range(4):
            k = width * 2**stage
            blocks += [Block(c, k, stride=1 if stage == 0 else 2), Block(k, k)]
            c = k
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.blocks(self.stem(x)).mean((2, 3)))
        return scores


class Pyramid(nn.Module):
    """DeepLab's atrous spatial pyramid: parallel kernels of growing dilation, and the mean."""

    def __init__(self, c: int, k: int, rates: tuple[int, ...] = (6, 12, 18)) -> None:
        super().__init__()
        self.branches = nn.ModuleList([normalised(c, k, 1), *(normalised(c, k, 3, dilation=rate) for rate in rates)])
        self.pooled = nn.Sequential(nn.Conv2d(c, k, 1), nn.ReLU())
        self.project = normalised((len(rates) + 2) * k, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        mixed: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), pooled], 1))
        return mixed


class DeepLab(nn.Module):
    """A residual trunk of ResNet-18's widths whose last stages dilate instead of shrinking, a pyramid, a decoder.

    The decoder refines at a quarter of the resolution with a 5x9 kernel, a dilated one, and a factorised 7x7: long
    kernels as in networks for wide images and spectrograms.
    """

    def __init__(self, width: int = 64, classes: int = 21) -> None:
        super().__init__()
        self.stem = nn.Sequential(normalised(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.shallow = nn.Sequential(Block(width, width), Block(width, width))
        self.deep = nn.Sequential(
            Block(width, 2 * width, stride=2),
            Block(2 * width, 2 * width),
            Block(2 * width, 4 * width, dilation=2),
            Block(4 * width, 4 * width, dilation=2),
            Block(4 * width, 8 * width, dilation=4),
            Block(8 * width, 8 * width, dilation=4),
        )
        self.pyramid = Pyramid(8 * width, 4 * width)
        self.decode = nn.Sequential(
            normalised(5 * width, width, (5, 9)),
            normalised(width, width, (5, 9), dilation=(2, 3)),
            normalised(width, width, (1, 7)),
            normalised(width, width, (7, 1)),
            nn.Conv2d(width, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.shallow(self.stem(x))
        deep = self.pyramid(self.deep(shallow))
        deep = F.interpolate(deep, shallow.shape[2:], mode="bilinear", align_corners=False)
        labels = self.decode(torch.cat([deep, shallow], 1))
        return F.interpolate(labels, x.shape[2:], mode="bilinear", align_corners=False)


def trainer(model: nn.Module, x: Tensor, target: Tensor, rate: float) -> Callable[[], float]:
    """One step of SGD with momentum; returns the loss before it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step() -> float:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def step_times(size: tuple[int, int, int, int], width: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of each training step of the DeepLab-like network, with torch's convolutions and with polyconv's."""
    torch.manual_seed(0)
    plain = DeepLab(width)
    replaced = deepcopy(plain)
    polyconv.replace(replaced)
    x, target = torch.randn(size), torch.randint(21, (size[0], *size[2:]))
    steps = [trainer(model, x, target, 0.01) for model in (plain, replaced)]
    for step in steps:
        step()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            began = time.perf_counter()
            steps[which]()
            times[which].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of a DeepLab-like network, with and without polyconv.")
    parser.add_argument("--time", action="store_true", required=True, help="measure")
    parser.add_argument("--size", type=int, nargs=4, default=(2, 3, 256, 256), metavar=("N", "C", "H", "W"))
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage (default: 64)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n, c, h, w = args.size
    plain, replaced = step_times((n, c, h, w), args.width, args.repeats)
    for name, times in (("torch.nn.Conv2d", plain), ("polyconv", replaced)):
        print(f"{name:<16} best {min(times) * 1e3:8.1f} ms, median {median(times) * 1e3:8.1f} ms per step")
    print(f"ratio            best {min(plain) / min(replaced):8.2f}x,  median {median(plain) / median(replaced):8.2f}x")


if __name__ == "__main__":
    main()
