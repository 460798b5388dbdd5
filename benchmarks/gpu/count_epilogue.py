"""Counts what an epilogue adds to a forward kernel, per element of the result and by resource: ``FINISHED`` of cost.py.

    python benchmarks/gpu/count_epilogue.py

Each family of kernels runs a small problem as sm_70 machine code in tools/gpu_emulator, without and with an epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from polyconv.cuda.cache import KernelCache
from polyconv.inspection.counting import empty_buffers, emulator, execute
from polyconv.plan import DEVICES, Plan, fused, gather, separable, strips
from polyconv.plan.candidates import CudaCandidate
from polyconv.plan.cost import COUNTED_L2_BYTES
from polyconv.plan.depthwise import DepthwiseCandidate
from polyconv.plan.gather import GatherCandidate
from polyconv.plan.tiles import PLANE_TILES, TALL
from polyconv.problem import Activation, Pass, Problem, channels_last_strides

V100 = DEVICES["v100"]
SMS = 2
RESOURCES = {
    "fp32": "fp32 (fma pipe)",
    "integer": "alu pipe",
    "issue": "issue slots",
    "L1": "lsu / L1",
    "L2": "L2",
    "special": "xu pipe",
}
EPILOGUES = ((Activation.RELU, False), (Activation.NONE, True), (Activation.SILU, True))


def examples() -> Iterator[tuple[str, CudaCandidate, Problem]]:
    pad = (1, 1, 1, 1)
    pointwise = Problem.make(Pass.FPROP, (2, 64, 16, 32), (64, 64, 1, 1), bias=True)
    quads = Problem.make(Pass.FPROP, (1, 16, 32, 64), (64, 16, 3, 3), padding=pad, bias=True)
    uneven = Problem.make(Pass.FPROP, (1, 16, 31, 63), (64, 16, 3, 3), padding=pad, bias=True)
    depthwise = Problem.make(Pass.FPROP, (1, 32, 64, 64), (32, 1, 3, 3), padding=pad, groups=32, bias=True)
    chain = separable.SeparableCandidate(separable.F43, separable.F43, 64)
    yield "pointwise", GatherCandidate(TALL, gather.POINTWISE), pointwise
    yield "taps", GatherCandidate(TALL, gather.TAPS), quads
    yield "taps, channels_last", GatherCandidate(TALL, gather.TAPS), _channels_last(quads)
    yield "taps, one at a time", GatherCandidate(TALL, gather.TAPS), uneven
    yield "depthwise", DepthwiseCandidate(PLANE_TILES[0]), depthwise
    yield "strip", strips.StripCandidate((3, 3), 1, strips.COLUMNS, False), depthwise
    yield "strip, channels_last", strips.StripCandidate((3, 3), 1, strips.CHANNELS, False), _channels_last(depthwise)
    yield "fused", fused.CANDIDATES[0], quads
    yield "fused, resident", fused.CANDIDATES[-1], quads
    yield "separable", chain, quads
    yield "separable, one at a time", chain, uneven


def _channels_last(p: Problem) -> Problem:
    return replace(p, x_strides=channels_last_strides(p.x_shape), y_strides=channels_last_strides(p.y_shape))


def count(gpu, way: CudaCandidate, problem: Problem, cache: KernelCache) -> list[float]:
    """Cycles of one multiprocessor, by resource, of the launches that store the result."""
    schedule = way.schedule(problem, SMS, 2**26)
    plan = Plan(problem, V100.name, way.name, schedule.launches, schedule.workspace_bytes, 0.0, 0.0, ())
    buffers = empty_buffers(gpu, plan)
    total = [0.0] * len(RESOURCES)
    for launch in plan.launches:
        report = execute(gpu, cache.get(launch.kernel, "sm_70"), launch, buffers)
        if any(slot.buffer == "y" for slot in launch.pointers):
            light = report.speed_of_light(sms=1, l2_bytes_per_clk=COUNTED_L2_BYTES)
            total = [
                sum(pair) for pair in zip(total, (light.row(name).cycles for name in RESOURCES.values()), strict=True)
            ]
    return total


def main() -> None:
    gpu = emulator()
    assert gpu is not None, "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator"
    cache = KernelCache()
    print(f"{'cycles per element':42}" + "".join(f"{name:>9}" for name in RESOURCES))
    for name, way, problem in examples():
        plain = count(gpu, way, problem, cache)
        for activation, residual in EPILOGUES:
            finished = count(gpu, way, replace(problem, activation=activation, residual=residual), cache)
            added = [(b - a) / prod(problem.y_shape) for a, b in zip(plain, finished, strict=True)]
            title = f"{name}: {activation}{' and a residual' if residual else ''}"
            print(f"{title:42}" + "".join(f"{cycles:9.3f}" for cycles in added), flush=True)


if __name__ == "__main__":
    main()
