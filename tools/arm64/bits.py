"""Results of direct kernels, by NEON in the emulated process and by SSE4 on this machine: the same bits.

SSE4 has NEON's lanes but no fused multiply-add, which skips the rounding of the product. So operands have 11
significant bits: then each product is exact in float32, and equal bits show that both sum in the same order. Fast
algorithms multiply transformed operands, whose products are not exact: they are not compared. Nor are depthwise weight
gradients in NCHW, which at last add the lanes of a vector, in the order of the processor's own instruction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from polyconv.cpu import native
from polyconv.cpu.engines import channel_lanes, depthwise, pointwise, signals, tile_lanes
from polyconv.cpu.planner import here, offered, plan_cpu
from polyconv.problem import RESULTS, Pass, Problem, dense_strides
from polyconv.selection import Preference

PROBLEMS = 24
_OWN = {engine.NAME for engine in (tile_lanes, channel_lanes, pointwise, depthwise, signals)}
_ANY = 1e30
"""A tolerance that accepts every candidate."""


def digests() -> dict[str, str]:
    """Hashes of all results, by problem and candidate."""
    torch.set_num_threads(1)
    found = {}
    for index in range(PROBLEMS):
        for problem in _drawn(Random(f"bits {index}")):
            tensors = {name: _operand(shape, strides) for name, shape, strides in _operands(problem)}
            for one in offered(problem, here(), own_kernels=True):
                adds_lanes = one.engine == depthwise.NAME and problem.kind is Pass.WGRAD and problem.x_strides[1] != 1
                if one.refusal is None and one.direct and one.engine in _OWN and not adds_lanes:
                    result = _run(problem, one.name, tensors).contiguous().numpy()
                    found[f"{index}, {problem}, {one.name}"] = hashlib.sha256(result.tobytes()).hexdigest()
    return found


def compare(emulated: str) -> int:
    """Compares with the hashes in a file, where there are kernels for this machine. Returns the exit status."""
    if why_not := native.why_absent():
        print(f"not compared with SSE4: {why_not}")
        return 0
    assert native.instruction_set() == "sse4"
    there, these = json.loads(Path(emulated).read_text()), digests()
    both = there.keys() & these.keys()
    others = sorted(name for name in both if there[name] != these[name])
    print(f"{len(both)} results of direct kernels, {len(others)} with other bits than by SSE4", *others, sep="\n  ")
    return 0 if both and not others else 1


def write(path: Path) -> None:
    path.write_text(json.dumps(digests()))


def _drawn(random: Random) -> Iterator[Problem]:
    """A small convolution in all passes."""
    groups, kernel = random.choice([(1, 1), (1, 3), (1, 3), (1, 5), (2, 3), (16, 3)])
    c, k = (1, 1) if groups == 16 else (random.choice([3, 8, 20, 33]), random.choice([4, 8, 17, 24]))
    size = random.randint(kernel, 20), random.randint(kernel, 30)
    x, w = (random.choice([1, 2]), groups * c, *size), (groups * k, c, kernel, random.choice([1, kernel]))
    stride, pad, last = random.choice([1, 1, 2]), random.randint(0, kernel // 2), random.random() < 0.5
    make = partial(Problem.make, stride=(stride, stride), padding=(pad,) * 4, groups=groups, tolerance=_ANY)
    for kind in Pass:
        y_strides = dense_strides(make(kind, x, w).y_shape, last)
        yield make(kind, x, w, x_strides=dense_strides(x, last), w_strides=dense_strides(w, last), y_strides=y_strides)


def _operands(problem: Problem) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    yield "x", problem.x_shape, problem.x_strides
    yield "w", problem.w_shape, problem.w_strides
    yield "y", problem.y_shape, problem.y_strides


def _operand(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    numbers = torch.randint(-2047, 2048, shape, generator=torch.Generator().manual_seed(sum(shape))) / 512
    return torch.empty_strided(shape, strides).copy_(numbers)


def _run(problem: Problem, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    result = RESULTS[problem.kind]
    like = tensors["w" if problem.kind is Pass.WGRAD else result]
    outputs = {**tensors, result: torch.full_like(like, torch.nan)}
    plan_cpu(problem, prefer=Preference(name)).prepared(None)(outputs)
    return outputs[result]
