"""Why a network's gradient can be far from float64's though every convolution is exact to six digits.

    python benchmarks/cpu/gradient_jumps.py                     # VGG-11, six seeds, 64 pixels, batch 4

Where two candidates of a max-pool are equal but for the last digits, or a value is next to zero before a ReLU, the last
digits decide which pixel the gradient flows through: it jumps, by as much as that pixel's gradient. The table has the
weight gradients of a training step against float64, the largest deviation of any layer relative to its largest
gradient: of PyTorch, of polyconv, and of float64 itself with noise of 1e-6 in the output of every convolution; how many
decisions of each differ from float64's; and the same deviations with float64's decisions, where nothing jumps.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv

VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


def vgg11(pixels: int, width: float = 1.0) -> nn.Sequential:
    """The features and one linear layer, with Kaiming-style initialisation."""
    layers: list[nn.Module] = []
    channels = 3
    for entry in VGG11:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
            continue
        filters = int(entry * width)
        conv = nn.Conv2d(channels, filters, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        layers += [conv, nn.ReLU()]
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (pixels // 32) ** 2, 10))


@dataclass
class Decisions:
    """Values that each ReLU passed and pixels that each max-pool chose, by layer."""

    made: list[Tensor] = field(default_factory=list)

    def differing(self, other: Decisions) -> int:
        return sum(int((a != b).sum()) for a, b in zip(self.made, other.made, strict=True))


def step(
    model: nn.Sequential, x: Tensor, target: Tensor, *, given: Decisions | None = None, noise: float = 0.0
) -> tuple[list[Tensor], Decisions]:
    """Weight gradients of all convolutions, and the decisions; given decisions are imposed."""
    made = Decisions()
    generator = torch.Generator().manual_seed(0)
    for layer in model:
        x_before, x = x, layer(x)
        if isinstance(layer, nn.Conv2d) and noise:
            drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x = x + noise * x.detach().square().mean().sqrt() * drawn
        if isinstance(layer, nn.ReLU):
            made.made.append(x_before > 0)
            if given is not None:
                x = x_before * given.made[len(made.made) - 1]
        if isinstance(layer, nn.MaxPool2d):
            made.made.append(F.max_pool2d(x_before, 2, return_indices=True)[1])
            if given is not None:
                winners = given.made[len(made.made) - 1]
                x = x_before.flatten(2).gather(2, winners.flatten(2)).view(winners.shape)
    model.zero_grad()
    F.cross_entropy(x, target).backward()
    weights = [layer.weight.grad for layer in model if isinstance(layer, nn.Conv2d)]
    return [w.double().clone() for w in weights if w is not None], made


def deviation(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


@dataclass(frozen=True)
class Outcome:
    own: float
    """With the network's own decisions."""
    differing: int
    """Number of those that differ in float64."""
    given: float
    """With float64's decisions."""


def outcomes(seed: int, pixels: int, batch: int, width: float = 1.0) -> dict[str, Outcome]:
    """PyTorch, polyconv, and float64 with noise."""
    torch.manual_seed(seed)
    model = vgg11(pixels, width)
    x, target = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 10, (batch,))
    double, ours = deepcopy(model).double(), deepcopy(model)
    polyconv.replace(ours)
    exact, decisions = step(double, x.double(), target)
    found = {}
    for name, network, given_x, noise in (
        ("PyTorch", model, x, 0.0),
        ("polyconv", ours, x, 0.0),
        ("float64 with noise", double, x.double(), 1e-6),
    ):
        own, made = step(network, given_x, target, noise=noise)
        given, _ = step(network, given_x, target, given=decisions, noise=noise)
        found[name] = Outcome(deviation(own, exact), made.differing(decisions), deviation(given, exact))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    asked = parser.parse_args()
    print(f"{'seed':4}" + "".join(f"  {name:>34}" for name in ("PyTorch", "polyconv", "float64 with noise of 1e-6")))
    print(" " * 4 + f"  {'off':>9} {'decisions':>10} {'off, given':>13}" * 3)
    for seed in range(asked.seeds):
        found = outcomes(seed, asked.pixels, asked.batch).values()
        print(f"{seed:4}" + "".join(f"  {o.own:9.1e} {o.differing:10} {o.given:13.1e}" for o in found), flush=True)


if __name__ == "__main__":
    main()
