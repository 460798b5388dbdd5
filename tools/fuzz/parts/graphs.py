"""Compiled networks of random layers, with drawn choices of kernels: results and gradients as in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from fuzz.case import Case
from fuzz.programs import Program
from fuzz.programs.graphs import STEPS
from polyconv.cpu import native
from polyconv.inductor import private

ABOUT = "torch.compile with polyconv's backend: whatever kernels run, results and gradients are the network's"


@dataclass(frozen=True)
class Compiled(Program):
    """The steps of a network, its input, and how it is compiled."""

    seed: int
    steps: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    batches: tuple[int, ...]
    training: bool
    last: bool
    dynamic: bool | None
    wrapper: bool

    head = "graphs"
    limit = 400.0
    patience = 300.0

    def call(self) -> str:
        given = self.seed, [*self.steps], self.channels, self.size, self.batches, self.training, self.last, self.dynamic
        return f"compiled({', '.join(map(repr, (*given, self.wrapper)))})"

    def smaller(self) -> Iterator[Case]:
        for place in range(len(self.steps)):
            yield replace(self, steps=self.steps[:place] + self.steps[place + 1 :])
        for simpler in (
            replace(self, wrapper=False),
            replace(self, dynamic=False),
            replace(self, training=False),
            replace(self, last=False),
            replace(self, batches=self.batches[:1]),
        ):
            if simpler != self:
                yield simpler


def why_not() -> str:
    asked = os.environ.get("POLYCONV_NIGHTLY") == "1"
    return private.missing() or native.why_absent() or ("" if asked else "a case compiles for 15 s: POLYCONV_NIGHTLY=1")


def case(seed: int, index: int) -> Compiled:
    chance = Random(f"graphs {seed} {index}")
    steps = tuple(chance.choice([*STEPS, "convolution", "residual", "branches"]) for _ in range(chance.randrange(2, 9)))
    size = chance.randrange(6, 34), chance.randrange(6, 34)
    dynamic = chance.choice([None, None, False, True])
    batches = (2, 2) if dynamic is False else chance.choice([(2, 2), (1, 1), (2, 3, 5)])
    return Compiled(
        chance.randrange(2**31),
        steps,
        chance.choice([1, 3, 3, 4, 8, 16, 17]),
        size,
        batches,
        chance.random() < 0.3,
        chance.random() < 0.4,
        dynamic,
        chance.random() < 0.15,
    )
