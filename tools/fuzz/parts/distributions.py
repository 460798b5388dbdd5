"""Known weights of every distribution: the error stays below the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from fuzz.case import Case, Failure
from fuzz.tensors import FILTERS, IMAGES, Operand, Shape, sources
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.planner import CpuPlan
from polyconv.numerics.scale import largest, scales

ABOUT = "weights in one tap, causal, decaying, sparse, of many scales: known, and so the error is as predicted"

NORMAL_PEAK = 6.0
"""The largest output of even data, in units of its map's scale. Inputs are not known before the call: if they make
larger outputs (such as an offset under weights of one sign), errors grow in proportion."""


def fast_ones(names: Sequence[str]) -> Sequence[str]:
    """The transforming candidates, if there are any: direct summation is insensitive to the weights."""
    return [name for name in names if name.startswith("F(")] or names


@dataclass(frozen=True)
class Distribution(Case):
    """A module with such weights, in inference, and such an input."""

    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    x: Operand
    w: Operand
    frozen: bool = True
    """If not frozen, weights are known when their transform is cached."""
    tolerance: float | None = None
    trial: int | None = None
    """Index of the candidate that runs; None: the planner's choice."""
    limit = 120.0

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        return (1, self.channels[0], *self.size), (self.channels[1], self.channels[0], *self.kernel)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Drawn as 2-D problems: a signal has height 1."""
        x, w = (
            operand.make((*shape[:2], *((1,) if self.rank == 1 else ()), *shape[2:]), torch.float32)
            for operand, shape in zip((self.x, self.w), self.shapes, strict=True)
        )
        return x.reshape(self.shapes[0]), w.reshape(self.shapes[1])

    def module(self, w: Tensor) -> Any:
        made = polyconv.Conv1d if self.rank == 1 else polyconv.Conv2d
        module: Any = made(*self.channels, self.kernel, bias=False, tolerance=self.tolerance)
        with torch.no_grad():
            module.weight.copy_(w)
        return module.eval()

    def run(self) -> None:
        torch.set_num_threads(1)
        (x, w), backend = self.tensors(), backend_for(torch.device("cpu"))
        module = self.module(w)
        if self.frozen:
            polyconv.freeze(module)
        with torch.no_grad(), preferences.watched() as seen:
            module(x)
        forced = {}
        for decision in seen if self.trial is not None else ():
            names = fast_ones(candidate_names(backend, decision.problem, inference=decision.inference))
            forced[decision.key] = names[(self.trial or 0) % len(names)]
        with preferences.Forced(forced):
            with torch.no_grad():
                found = [module(x) for _ in range(2)][-1]
            report = polyconv.audit(module, x, quiet=True)
            plans: list[Any] = [preferences.plan(backend, d.problem, inference=d.inference) for d in seen]
        plan: CpuPlan = plans[-1]
        row = report.rows[0]
        images = (x, w) if self.rank == 2 else (x.unsqueeze(2), w.unsqueeze(2))
        convolve = F.conv1d if self.rank == 1 else F.conv2d
        exact = convolve(x.double(), w.double())
        scale = scales(plan.problem, dict(zip(("x", "w"), images, strict=True)))["y"].reshape(1, -1, *(1,) * self.rank)
        off = (found.double() - exact).abs()
        error = largest(off, scale)
        prominent = max(1.0, largest(exact.abs(), scale) / NORMAL_PEAK)
        known = self.frozen or plan.keeps_weights
        predicted = row.predicted * row.concentration  # for the actual weights
        said = (
            f"by {row.plan}: {error:.2e} of the scale, predicted {predicted:.2e}, tolerance {row.tolerance:.0e}, "
            f"outputs up to {prominent * NORMAL_PEAK:.1f} times the scale; audit says {row.error:.2e}"
        )
        if not row.plan.startswith("F("):  # the plan that ran: weights may rule out the one made without them
            sizes = convolve(x.double().abs(), w.double().abs())
            rigorous = 2 * (self.channels[0] * prod(self.kernel) + 4) * 2.0**-24 * sizes + 1e-36
            if bool((off > rigorous).any()):
                raise Failure(f"a direct sum strays more than its roundings\n{said}")
        elif known and error > predicted * prominent:
            beyond = " and the tolerance" if error > row.tolerance * prominent else ""
            raise Failure(f"y strays more than predicted{beyond}, for {self.w.fill} weights\n{said}")
        elif known and error > row.tolerance * prominent:
            raise Failure(f"y strays more than the tolerance, for {self.w.fill} weights\n{said}")

    def smaller(self) -> Iterator[Case]:
        for plain in (replace(self, trial=None), replace(self, tolerance=None), replace(self, frozen=True)):
            if plain != self:
                yield plain
        for name in ("x", "w"):
            for simpler in getattr(self, name).simpler():
                yield replace(self, **{name: simpler})
        for name in ("channels", "size", "kernel"):
            now = getattr(self, name)
            for axis, extent in enumerate(now):
                for less in sorted({extent // 2, extent - 1}):
                    changed: dict[str, Any] = {name: (*now[:axis], less, *now[axis + 1 :])}
                    tinier = replace(self, **changed)
                    if less > 0 and all(n >= k for n, k in zip(tinier.size, tinier.kernel, strict=True)):
                        yield tinier

    def script(self) -> str:
        one = "1, " if self.rank == 1 else ""
        x_shape, w_shape = (f"({shape[0]}, {shape[1]}, {one}{', '.join(map(str, shape[2:]))})" for shape in self.shapes)
        x = f"{self.x.place}({x_shape}, {self.x.fill}, torch.Generator().manual_seed({self.x.seed}), torch.float32)"
        w = f"{self.w.place}({w_shape}, {self.w.fill}, torch.Generator().manual_seed({self.w.seed}), torch.float32)"
        forced = "forced = {}\n"
        if self.trial is not None:
            forced = f"""with torch.no_grad(), preferences.watched() as seen:
    module(x)
forced = {{}}
for d in seen:  # let another candidate run
    names = candidate_names(backend_for(torch.device("cpu")), d.problem, inference=d.inference)
    names = [name for name in names if name.startswith("F(")] or names
    forced[d.key] = names[{self.trial} % len(names)]
"""
        return f"""import torch

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names

{sources((self.x, self.w))}

x = {x}.reshape({self.shapes[0]})
w = {w}.reshape({self.shapes[1]})
module = polyconv.Conv{self.rank}d(*{self.channels}, {self.kernel}, bias=False, tolerance={self.tolerance}).eval()
with torch.no_grad():
    module.weight.copy_(w)
{"polyconv.freeze(module)" if self.frozen else ""}
{forced}with preferences.Forced(forced):
    print(polyconv.audit(module, x, quiet=True))  # predicted, and observed
# the case: {self}
"""


def case(seed: int, index: int) -> Distribution:
    random = Random(f"distributions {seed} {index}")
    channels = random.choice([4, 8, 16, 32, 64]), random.choice([4, 8, 16])
    if random.random() < 0.25:
        kernel: tuple[int, ...] = (random.choice([3, 5, 7, 9, 15, 31]),)
        size: tuple[int, ...] = (random.choice([100, 1000]),)
    else:
        both = random.choice([3, 3, 3, 5, 5, 7, 9])
        kernel = random.choice([(both, both), (both, both), (5, 9), (1, 7), (7, 3)])
        size = random.randint(20, 80), random.randint(20, 80)
    fills = [fill.__name__ for fill in (*FILTERS, FILTERS[0], FILTERS[1])]
    return Distribution(
        channels,
        size,
        kernel,
        Operand(random.choice([fill.__name__ for fill in IMAGES]), "contiguous", random.randrange(2**31)),
        Operand(random.choice(fills), "contiguous", random.randrange(2**31)),
        random.random() < 0.6,
        random.choice([None, None, None, 1e-5, 1e-3]),
        random.choice([None, random.randrange(40), random.randrange(40)]),
    )
