"""A small kernel of the tests, described as the planner describes its kernels."""

from __future__ import annotations

import struct
from pathlib import Path

from polyconv.cuda.planner.plan import KernelSpec, Launch, Plan, PointerSlot
from polyconv.problem import Problem

KERNELS = Path(__file__).resolve().parent / "kernels"
THREADS = 128


def axpy_spec(
    threads: int = THREADS, function: str = "axpy", *, min_blocks: int = 1, value: int | None = None
) -> KernelSpec:
    """``y += a x``, or another function of ``kernels/axpy.cuh``."""
    value = threads if value is None else value
    return KernelSpec(
        stem="axpy",
        symbol=f"{function}_{value}",
        body=f"example::{function}<{value}>(params);",
        params="example::AxpyParams",
        params_bytes=32,
        threads=threads,
        min_blocks=min_blocks,
    )


def axpy_launch(count: int, a: float, *, spec: KernelSpec | None = None, shared: int = THREADS * 4) -> Launch:
    """The launch of :func:`axpy_spec` on ``count`` elements, with ``shared`` bytes of dynamic shared memory."""
    spec = spec or axpy_spec()
    return Launch(
        kernel=spec,
        grid=(-(-count // spec.threads), 1, 1),
        block=(spec.threads, 1, 1),
        dynamic_shared=shared,
        params=struct.pack("<QQqfi", 0, 0, count, a, shared // 4),
        pointers=(PointerSlot(0, "x"), PointerSlot(8, "y")),
    )


def axpy_plan(problem: Problem, launches: tuple[Launch, ...], workspace_bytes: int = 0) -> Plan:
    """A plan made of given launches."""
    return Plan(
        problem=problem,
        device="virtual",
        algorithm="axpy",
        launches=launches,
        workspace_bytes=workspace_bytes,
        expected_error=0.0,
        cost_us=1.0,
        candidates=(),
    )
