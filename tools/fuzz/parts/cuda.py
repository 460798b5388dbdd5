"""CUDA plans of any problem, for any known device; a few are executed, as the machine code of a V100."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import torch

from fuzz.case import Case, Failure
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.lowering.border import Cropped
from polyconv.problem import Problem

ABOUT = "random problems planned for known GPUs; a few run as sm_70 machine code by the emulator"

EMULATED = 100
"""One case in this many is executed."""


@dataclass(frozen=True)
class Planned(Case):
    """One pass, by its numbers."""

    kind: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    bias: bool = False
    aligned: bool = True
    tolerance: float = 1e-4
    workspace: int = 64 * 2**20
    device: str = "v100"
    executed: bool = False
    limit = 600.0

    @property
    def options(self) -> dict[str, Any]:
        names = ("stride", "padding", "dilation", "groups", "padding_mode", "bias", "tolerance")
        return {**{name: getattr(self, name) for name in names}, "vector_aligned": self.aligned}

    @property
    def is_cropped(self) -> bool:
        return self.padding_mode != "zeros" and min(self.padding) < 0

    @property
    def problem(self) -> Problem:
        """The problem that a GPU runs: of the part that negative padding leaves, if a border follows."""
        return self.asked.problems[0] if self.is_cropped else self.asked.problem

    @property
    def asked(self) -> Cropped:
        return Cropped(Problem.make(self.kind, self.x, self.w, **self.options))

    @property
    def is_valid(self) -> bool:
        """As in ``polyconv.conv2d``: a border is made of the image after cropping by negative sides."""
        for extent, pair in zip(self.x[2:], (self.padding[:2], self.padding[2:]), strict=True):
            left, widest = extent - sum(max(-side, 0) for side in pair), max(*pair, 0)
            least = {"zeros": 0, "reflect": widest + 1, "circular": max(widest, 1)}.get(self.padding_mode, 1)
            if left < least:
                return False
        return min(self.problem.out_size) > 0

    def run(self) -> None:
        problem, device = self.problem, DEVICES[self.device]
        plan = plan_cuda(problem, device, self.workspace)
        if plan.expected_error > problem.tolerance and not plan.algorithm.startswith("direct"):
            raise Failure(f"a fast algorithm that exceeds the tolerance\n{plan.explain()}")
        for launch in plan.launches:
            if prod(launch.block) > 1024 or min(launch.block) < 1:
                raise Failure(f"a block that no GPU takes\n{launch.block}: {plan.explain()}")
            if launch.grid[0] > 2**31 - 1 or max(launch.grid[1:]) > 65535 or min(launch.grid) < 1:
                raise Failure(f"a grid that no GPU takes\n{launch.grid}: {plan.explain()}")
            if launch.dynamic_shared > device.shared_per_block_optin:
                raise Failure(f"more shared memory than there is\n{launch.dynamic_shared:,}: {plan.explain()}")
        if self.executed:
            self._execute(problem)

    def _execute(self, problem: Problem) -> None:
        import emulate  # here, because only this builds the emulator

        g = torch.Generator().manual_seed(0)
        x, w = torch.randn(self.x, generator=g), torch.randn(self.w, generator=g)
        for dim, kept in enumerate(self.asked.ranges if self.is_cropped else (), start=2):
            x = x.narrow(dim, kept.start, len(kept))
        dy, bias = torch.randn(problem.y_shape, generator=g), torch.randn(self.w[0], generator=g)
        try:
            emulate.check(problem, x, w, bias if self.bias and self.kind == "fprop" else None, dy)
        except AssertionError as error:
            raise Failure(f"the machine code strays, or changes what it reads\n{error}") from None

    def smaller(self) -> Iterator[Case]:
        for candidate in self._candidates():
            if candidate != self and candidate.is_valid:
                yield candidate

    def _candidates(self) -> Iterator[Planned]:
        yield replace(self, executed=False)
        yield replace(self, bias=False)
        yield replace(self, padding_mode="zeros")
        yield replace(self, stride=(1, 1))
        yield replace(self, dilation=(1, 1))
        yield replace(self, padding=(0, 0, 0, 0))
        yield replace(self, aligned=True, tolerance=1e-4, workspace=64 * 2**20)
        if self.groups > 1:
            yield replace(self, groups=1, x=(self.x[0], self.w[1], *self.x[2:]))
        for axis in (0, 2, 3):
            x = [*self.x]
            x[axis] = max(1, x[axis] // 2)
            yield replace(self, x=(x[0], x[1], x[2], x[3]))
        for axis in (2, 3):
            w = [*self.w]
            w[axis] = max(1, w[axis] - 1)
            yield replace(self, w=(w[0], w[1], w[2], w[3]))

    def script(self) -> str:
        lower = '(problem,) = lowered(problem, "cuda")' if self.is_cropped else ""
        return f"""from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.lowering.lower import lowered
from polyconv.problem import Problem

problem = Problem.make({self.kind!r}, {self.x}, {self.w}, **{self.options})
{lower}
plan = plan_cuda(problem, DEVICES[{self.device!r}], {self.workspace})
print(plan.explain())
for launch in plan.launches:
    print(launch.kernel.symbol, launch.grid, launch.block, launch.dynamic_shared)
# executed by the emulator: {self.executed} (tests/emulate.py: check)
"""


def case(seed: int, index: int) -> Planned:
    random = Random(f"cuda {seed} {index}")
    executed = index % EMULATED == EMULATED - 1
    for _ in range(1000):
        found = _drawn(random, executed)
        if found.is_valid:
            return found
    raise AssertionError("no valid problem in a thousand")


def _drawn(random: Random, executed: bool) -> Planned:
    groups = random.choice([1, 1, 1, 2, 3, 16])
    per_group = random.choice([1, 1, 2, 3, 4, 8] if executed else [1, 1, 2, 3, 4, 8, 16, 64, 130])
    out = groups * random.choice([1, 2, 4, 5] if executed else [1, 2, 4, 8, 32, 100, 256])
    extent = 24 if executed else random.choice([9, 40, 300, 1100])
    return Planned(
        kind=random.choice(["fprop", "dgrad", "wgrad"]),
        x=(random.choice([1, 2] if executed else [1, 2, 7, 32]), groups * per_group, *_pair(random, 1, extent)),
        w=(out, per_group, *random.choice([(1, 1), (3, 3), (3, 3), (5, 9), _pair(random, 1, 7), _pair(random, 1, 13)])),
        stride=random.choice([(1, 1), (1, 1), (2, 2), (1, 3), (4, 4)]),
        padding=random.choice([(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 4, 4), (0, 3, 1, 2), (-1, 2, 0, -1)]),
        dilation=random.choice([(1, 1), (1, 1), (2, 2), (2, 3), (1, 7)]),
        groups=groups,
        padding_mode=random.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]),
        bias=random.choice([True, False]),
        aligned=random.choice([True, True, False]),
        tolerance=random.choice([1e-4, 1e-4, 0.0, 1e-6, 1e-2]),
        workspace=random.choice([64 * 2**20, 64 * 2**20, 0, 2**20]),
        device="v100" if executed else random.choice([*DEVICES]),
        executed=executed,
    )


def _pair(random: Random, least: int, most: int) -> tuple[int, int]:
    return random.randint(least, most), random.randint(least, most)
