"""Counts the cost that an epilogue adds to a forward kernel, per output element and resource: ``FINISHED`` of cost.py;
and what an implicit GEMM adds if it stores one element at a time, not four pixels: ``SINGLY``.

    python benchmarks/gpu/count_epilogue.py

Each kernel family runs a small problem as sm_70 machine code in tools/gpu_emulator, without and with an epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, Plan
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import COUNTED_L2_BYTES
from polyconv.cuda.planner.depthwise import strip
from polyconv.cuda.planner.depthwise.halo import PLANE_TILES, HaloCandidate
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import ImplicitGemmCandidate
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad_mma import ImplicitGemmMmaCandidate
from polyconv.cuda.planner.implicit_gemm.tiles import MATRIX_SMALL, MATRIX_SQUARE, MATRIX_TALL, SMALL, SQUARE, TALL
from polyconv.cuda.planner.winograd import fused, nonfused
from polyconv.problem import Activation, Pass, Problem, channels_last_strides
from polyconv.tools.inspect.emulated_cost import empty_buffers, emulator, execute

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
    chain = nonfused.NonfusedCandidate(nonfused.F43, nonfused.F43, 64)
    yield "pointwise", ImplicitGemmCandidate(TALL, fprop_dgrad.POINTWISE), pointwise
    yield "taps", ImplicitGemmCandidate(TALL, fprop_dgrad.TAPS), quads
    yield "taps, channels_last", ImplicitGemmCandidate(TALL, fprop_dgrad.TAPS), _channels_last(quads)
    yield "taps, one at a time", ImplicitGemmCandidate(TALL, fprop_dgrad.TAPS), uneven
    yield "depthwise", HaloCandidate(PLANE_TILES[0]), depthwise
    yield "strip", strip.StripCandidate((3, 3), 1, strip.COLUMNS, False), depthwise
    yield "strip, channels_last", strip.StripCandidate((3, 3), 1, strip.CHANNELS, False), _channels_last(depthwise)
    yield "fused", fused.CANDIDATES[0], quads
    yield "fused, resident", fused.CANDIDATES[-1], quads
    yield "separable", chain, quads
    yield "separable, one at a time", chain, uneven


def stores() -> Iterator[tuple[str, CudaCandidate, Problem]]:
    problem = Problem.make(Pass.FPROP, (1, 32, 16, 66), (128, 32, 1, 3))
    for tile in (SQUARE, TALL, SMALL):
        yield f"taps_{tile.name}", ImplicitGemmCandidate(tile, fprop_dgrad.TAPS), problem
    for matrix in (MATRIX_SQUARE, MATRIX_TALL, MATRIX_SMALL):
        way = ImplicitGemmMmaCandidate(matrix.of("float16"), fprop_dgrad.TAPS)
        yield f"mma_taps_{matrix.name}", way, replace(problem, dtype="float16")


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
    for name, way, problem in stores():
        _, c, h, w = problem.y_shape
        odd = h * w + 1
        alone = count(gpu, way, replace(problem, y_strides=(c * odd, odd, w, 1)), cache)
        added = [(b - a) / prod(problem.y_shape) for a, b in zip(count(gpu, way, problem, cache), alone, strict=True)]
        print(f"{name + ', stored singly':42}" + "".join(f"{cycles:9.3f}" for cycles in added), flush=True)


if __name__ == "__main__":
    main()
