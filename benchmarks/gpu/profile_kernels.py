"""Counts what every kernel spends per block, tile and step, and writes ``src/polyconv/cuda/planner/profiles.json``.

    python benchmarks/gpu/profile_kernels.py            # all kernels, some minutes
    python benchmarks/gpu/profile_kernels.py _mma,_1x1  # only those whose symbol has one of these words; others stay

Every way of every family runs some small problems as machine code in tools/gpu_emulator, whole launches, and the counts
are fitted to the launches' own numbers of blocks, tiles and steps, with no negative part. The code is that of sm_70; of
kernels that sm_70 has not, that of sm_80, in the same unit: cycles of a V100. Kernels with matrix instructions that
both have are counted on both.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, Plan
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import AMPERE, COUNTED_L2_BYTES, COUNTED_PRODUCTS, SINGLY, Spent
from polyconv.cuda.planner.depthwise import line, strip
from polyconv.cuda.planner.plan import KernelSpec, Launch, Schedule
from polyconv.cuda.planner.planner import all_kernels, candidates
from polyconv.problem import HALF_DTYPES, PaddingMode, Pass, Problem
from polyconv.tools.inspect.emulated_cost import empty_buffers, emulator, execute

V100, A100 = DEVICES["v100"], DEVICES["a100"]
COUNTED_TENSOR_RATES = {"F16": COUNTED_PRODUCTS // 4}
"""Of a V100's sub-partition."""
RESOURCES = Spent("fp32 (fma pipe)", "alu pipe", "issue slots", "lsu / L1", "L2", "tensor pipe")  # type: ignore[arg-type]
FILE = Path(__file__).resolve().parents[2] / "src/polyconv/cuda/planner/profiles.json"
MOST_INSTRUCTIONS = 15_000_000
SMS = 2
ENOUGH = 8
"""Number of launches of a kernel after which the search stops."""


def problems() -> list[Problem]:
    """Small images with the channels, kernels and strides of real layers; first a larger one, for kernels that request
    many elements at once."""

    def make(
        n: int, c: int, size: tuple[int, ...], k: int, kernel: tuple[int, ...], groups: int = 1, **more
    ) -> Problem:
        return Problem.make(Pass.FPROP, (n, c, *size), (k, c // groups, *kernel), groups=groups, bias=True, **more)

    found = [
        make(1, 32, (200, 260), 32, (3, 3), padding=(1, 1, 1, 1)),
        make(1, 32, (14, 300), 64, (5, 9), padding=(2, 2, 4, 4)),
        make(1, 32, (40, 66), 64, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
        make(1, 16, (40, 66), 128, (3, 3)),
        make(2, 64, (28, 28), 64, (3, 3), padding=(1, 1, 1, 1)),
        make(1, 64, (24, 40), 128, (5, 7)),
        make(1, 128, (14, 14), 128, (3, 3), padding=(1, 1, 1, 1)),
        make(1, 3, (63, 63), 96, (11, 11), stride=(4, 4), padding=(2, 2, 2, 2)),
        make(1, 64, (28, 28), 64, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
        make(1, 64, (32, 64), 128, (1, 1)),
        make(1, 256, (16, 16), 64, (1, 1)),
        make(1, 24, (20, 32), 20, (1, 9)),
        make(1, 24, (20, 32), 20, (9, 1)),
        make(2, 16, (40, 130), 16, (3, 3), groups=16),
        make(1, 8, (64, 96), 8, (5, 5), groups=8, padding=(2, 2, 2, 2)),
        make(1, 8, (64, 96), 8, (3, 3), groups=8, dilation=(2, 2)),
        make(1, 3, (31, 31), 3, (31, 31), groups=3, padding=(15, 15, 15, 15)),
        make(1, 64, (20, 40), 21, (15, 1), padding=(7, 7, 0, 0)),
        make(1, 32, (20, 36), 40, (3, 3), padding=(1, 1, 1, 1), padding_mode=PaddingMode.REFLECT),
        make(1, 8, (24, 36), 24, (3, 3), padding=(1, 1, 1, 1), padding_mode=PaddingMode.REPLICATE),
    ]
    found.append(_channels_last(make(2, 64, (14, 14), 64, (3, 3), padding=(1, 1, 1, 1))))
    found.append(_channels_last(make(1, 32, (20, 20), 48, (3, 3), padding=(1, 1, 1, 1))))
    for r in (1, 3, 5, 9, 13):
        for s in (3, 5, 9, 13):
            pad = (r // 2, r // 2, s // 2, s // 2)
            found += [make(1, 32, (16, 260), 64, (r, s), padding=pad), make(1, 64, (26, 34), 64, (r, s), padding=pad)]
            found.append(make(1, 16, (30, 60), 64, (2 * r - 1, 2 * s - 1), stride=(2, 2), padding=pad))
    for (lanes, stride), kernels in strip.KERNELS.items():
        for taps in kernels:
            for rows in (30, 70):
                pad = (taps[0] // 2, taps[0] // 2, taps[1] // 2, taps[1] // 2)
                p = make(1, 32, (rows, 75), 32, taps, groups=32, stride=(stride, stride), padding=pad)
                found.append(p if lanes == strip.COLUMNS else _channels_last(p))
    for taps, (batch, rows) in product((5, 7), ((24, 9), (24, 30))):  # several tiles per block
        pad = (taps // 2,) * 4
        p = make(batch, 16, (rows, 56), 16, (taps, taps), groups=16, padding=pad, dtype="float16")
        found.append(_channels_last(p))
    for taps, columns in product(line.TAPS, (300, 2000)):
        more = {"groups": 16, "padding": (0, 0, taps - 1, 0), "dtype": "float16"}
        found.append(make(1, 16, (2, columns), 16, (1, taps), **more))
    for c, size, k, taps in (
        (64, (32, 48), 128, 3),
        (128, (28, 28), 128, 1),
        (256, (16, 32), 256, 1),
        (32, (30, 40), 64, 5),
    ):
        p = make(1, c, size, k, (taps, taps), padding=(taps // 2,) * 4, dtype="float16")
        found.append(_channels_last(p))
    for c, size, k, taps in (
        (64, (6, 16, 24), 128, (3, 3, 3)),
        (32, (8, 20, 24), 64, (3, 3, 3)),
        (128, (4, 14, 14), 128, (1, 3, 3)),
        (256, (4, 12, 16), 64, (1, 1, 1)),
    ):
        padding = tuple(taps[axis // 2] // 2 for axis in range(6))
        volume = make(1, c, size, k, taps, padding=padding)
        found += [volume, replace(volume, dtype="float16").channels_last()]
    return found


def _channels_last(p: Problem) -> Problem:
    def strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        _, c, h, w = shape
        return (c * h * w, 1, c * w, c)

    return replace(p, x_strides=strides(p.x_shape), y_strides=strides(p.y_shape))


def counted_on(kernel: KernelSpec) -> dict[str, str]:
    """Architectures on which a kernel is counted, by the key of the profile."""
    if not kernel.runs_on(V100.arch):
        return {kernel.symbol: A100.arch}
    newer = {kernel.symbol + AMPERE: A100.arch} if kernel.dtype in HALF_DTYPES and kernel.runs_on(A100.arch) else {}
    return {kernel.symbol: V100.arch, **newer}


def observe(gpu, way: CudaCandidate, problem: Problem, schedule: Schedule, cache: KernelCache, wanted: str):
    """(symbol, (blocks, tiles, steps), cycles by resource) of every launch whose symbol contains one of the words."""
    plan = Plan(problem, V100.name, way.name, schedule.launches, schedule.workspace_bytes, 0.0, 0.0, ())
    buffers = empty_buffers(gpu, plan)
    for launch in plan.launches:
        if not _has_one(launch.kernel.symbol, wanted):
            continue
        if not launch.work.blocks:
            raise SystemExit(f"{launch.kernel.symbol} does not say how much work it is")
        for key, arch in counted_on(launch.kernel).items():
            run = partial(execute, gpu, cache.get(launch.kernel, arch), launch, buffers)
            one = run([(launch.grid[0] // 2, 0, 0)]).issue_slots
            if one * launch.work.blocks > MOST_INSTRUCTIONS:
                continue
            light = run().speed_of_light(sms=1, l2_bytes_per_clk=COUNTED_L2_BYTES, tensor_rates=COUNTED_TENSOR_RATES)
            features = launch.work.blocks, launch.work.tiles, launch.work.steps
            counted = zip((light.row(name).cycles for name in RESOURCES), stated(launch), strict=True)
            yield key, features, [max(0.0, cycles - apart) for cycles, apart in counted]


def stated(launch: Launch) -> Spent:
    """Cycles that the cost model charges beside the profile: lines and sectors that are not adjacent, single stores."""
    work, singly = launch.work, SINGLY[launch.kernel.dtype in HALF_DTYPES]
    apart = Spent(*(work.stored_singly * each for each in singly))
    return apart._replace(
        l1=apart.l1 + work.scattered_lines, l2=apart.l2 + work.scattered_sectors * 32 / COUNTED_L2_BYTES
    )


def _has_one(symbol: str, words: str) -> bool:
    return any(word in symbol for word in words.split(","))


def fit(rows: list[tuple[tuple[int, int, int], list[float]]]) -> list[list[float]]:
    """Cycles per block, tile and step, by resource: non-negative least squares of relative deviations."""
    features = np.array([f for f, _ in rows], dtype=float)
    counts = np.array([c for _, c in rows], dtype=float)
    parts = np.zeros((3, counts.shape[1]))
    for resource in range(counts.shape[1]):
        target = counts[:, resource]
        if not target.any():
            continue
        scale = 1 / np.maximum(target, 1e-9 + target.max() * 1e-6)
        active = [0, 2] if (features[:, 0] == features[:, 1]).all() else [0, 1, 2]
        active = [i for i in active if features[:, i].any()]
        while active:
            found, *_ = np.linalg.lstsq(features[:, active] * scale[:, None], target * scale, rcond=None)
            if (found >= 0).all():
                parts[active, resource] = found
                break
            active.pop(int(np.argmin(found)))
    return [[float(f"{value:.5g}") for value in part] for part in parts]


def main(wanted: str = "") -> None:
    gpu = emulator()
    assert gpu is not None, "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator"
    cache = KernelCache()
    seen: dict[str, list] = defaultdict(list)
    for forward in problems():
        for kind, dtype in product(Pass, ("float32", "float16") if forward.dtype == "float32" else (forward.dtype,)):
            problem = replace(forward, kind=kind, dtype=dtype)
            for way in candidates(problem):
                if way.refusal(problem) is None:
                    schedule = way.schedule(problem, SMS, 2**26)
                    launched = {launch.kernel.symbol for launch in schedule.launches}
                    symbols = {symbol for symbol in launched if _has_one(symbol, wanted)}
                    if all(len(seen[symbol]) >= ENOUGH for symbol in symbols):
                        continue
                    for symbol, features, cycles in observe(gpu, way, problem, schedule, cache, wanted):
                        seen[symbol].append((features, cycles))
    kernels = json.loads(FILE.read_text())["kernels"] if wanted and FILE.exists() else {}
    kernels.update({symbol: fit(rows) for symbol, rows in seen.items()})
    known = {kernel.symbol for kernel in all_kernels() if not kernel.twin}  # twins: cuda/planner/cost.py
    kernels = {key: parts for key, parts in sorted(kernels.items()) if key.removesuffix(AMPERE) in known}
    about = "Cycles of one V100 multiprocessor per block, tile and step, by resource; benchmarks/gpu/profile_kernels.py"
    lines = ",\n".join(f"    {json.dumps(symbol)}: {json.dumps(parts)}" for symbol, parts in kernels.items())
    FILE.write_text(
        f'{{\n  "about": "{about}",\n  "resources": {json.dumps(Spent._fields)},\n  "kernels": {{\n{lines}\n  }}\n}}\n'
    )
    print(f"{len(seen)} kernels counted; {len(kernels)} of {len(known)} known")
    for symbol in sorted(known - kernels.keys()):
        print(f"not counted: {symbol}")


if __name__ == "__main__":
    main(*sys.argv[1:])
