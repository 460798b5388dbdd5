"""Convolutions against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import torch

import polyconv
from campaign import case as cases

ABOUT = "any convolution, any data, any layout: against float64, within the error that was predicted"


@dataclass(frozen=True)
class Convolution(cases.Case):
    size: int
    seed: int
    limit = 60.0

    def run(self) -> None:
        torch.manual_seed(self.seed)
        x, w = torch.randn(1, 2, self.size, self.size), torch.randn(3, 2, 3, 3)
        error = (polyconv.conv2d(x, w) - torch.nn.functional.conv2d(x.double(), w.double())).abs().max().item()
        if error > 1e-4:
            raise cases.Failure(f"strays by {error}")

    def script(self) -> str:
        return f"import torch, polyconv\n# {self}\n"

    def smaller(self) -> Iterator[cases.Case]:
        if self.size > 3:
            yield replace(self, size=self.size - 1)


def case(seed: int, index: int) -> Convolution:
    random = Random(f"{seed} {index}")
    return Convolution(random.randint(3, 12), random.randrange(2**31))
