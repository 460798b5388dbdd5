"""Rows of ``polyconv inspect``: per kernel launch, its resources on an SM and its lower bound on a V100 or A100."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from ... import settings
from ...cuda.jit.cache import KernelCache
from ...cuda.jit.compile import in_threads
from ...cuda.jit.cubin import is_cubin, kernel_info
from ...cuda.planner import DEVICES, CudaDevice, KernelSpec, Launch, Plan, plan_cuda
from ...cuda.planner.occupancy import blocks_per_sm
from ...measure.workloads import Workload
from ...problem import Pass
from ...util.console import Progress
from .emulated_cost import COUNTED, Counted, count_plan, main_kernel


class InspectionError(RuntimeError):
    """A kernel or architecture cannot be inspected; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One launch of a workload's pass, or a kernel on its own (the fields of a launch are then ``None``)."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    """Per block, static plus dynamic."""
    blocks_per_sm: int | None
    workload: str | None = None
    id: str | None = None
    kind: str | None = None
    """The pass."""
    launch: int | None = None
    """Index in the plan; of identical launches, that of the first."""
    times: int | None = None
    """Number of identical launches, on other data; the times below are of one of them."""
    main: bool = False
    """The kernel is the plan's main kernel (:func:`~.emulated_cost.main_kernel`); the others prepare or finish."""
    grid: tuple[int, int, int] | None = None
    threads: int | None = None
    binding: str | None = None
    fp32_share: float | None = None
    bound_ms: float | None = None
    pass_bound_ms: float | None = None
    """Sum of the bounds of all launches of the pass."""
    ffma_share: float | None = None
    """Share of FFMA among the issued warp instructions."""
    blocks_counted: int | None = None
    resources_ms: Mapping[str, float] | None = None
    """Resource -> its least time [ms]; the largest is ``bound_ms``."""

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON, with ``kind`` renamed to ``pass``."""
        return {"pass" if name == "kind" else name: value for name, value in asdict(self).items()}


def device_of(arch: str) -> CudaDevice:
    """The GPU to plan for, given an architecture."""
    for device in DEVICES.values():
        if device.arch == arch:
            return device
    known = ", ".join(dict.fromkeys(device.arch for device in DEVICES.values()))
    raise InspectionError(f"no GPU is described for {arch}, so no plan can be made; there are {known}")


def inspect_kernels(specs: Sequence[KernelSpec], arch: str, cache: KernelCache, listener: Progress) -> list[Row]:
    """Rows of kernels without a launch: they lack dynamic shared memory, such as that of the depthwise kernels."""
    cubins = compile_all(specs, arch, cache, listener)
    return [_row(arch, spec, cubins[spec]) for spec in specs]


def inspect_workloads(
    workloads: Sequence[Workload],
    passes: Sequence[Pass],
    arch: str,
    cache: KernelCache,
    listener: Progress,
    gpu: Any = None,
) -> list[Row]:
    """Rows of every launch of every pass, the main launch of a pass first. ``gpu``: the emulator, if there is one."""
    device = device_of(arch)
    limit = settings.current().workspace_bytes
    asked = [(w, kind, plan_cuda(w.problem(kind).as_2d(), device, limit)) for w in workloads for kind in passes]
    cubins = compile_all(list(dict.fromkeys(s for _, _, plan in asked for s in plan.kernels)), arch, cache, listener)
    counted: Iterable[list[Counted] | None] = [None] * len(asked)
    if gpu is not None and arch in COUNTED:

        def count_one(job: tuple[Workload, Pass, Plan]) -> list[Counted]:
            workload, kind, plan = job
            found = count_plan(gpu, plan, cubins, COUNTED[arch])
            listener.step(f"counted {workload.name} {kind}")
            return found

        listener.expect(len(asked))
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="polyconv-count") as pool:
            counted = list(pool.map(count_one, asked))
    rows: list[Row] = []
    for (workload, kind, plan), counts in zip(asked, counted, strict=True):
        named = [
            replace(row, workload=workload.name, id=workload.id, kind=str(kind))
            for row in _plan_rows(plan, device, cubins, counts)
        ]
        rows += sorted(named, key=lambda row: not row.main)
    return rows


def compile_all(
    specs: Sequence[KernelSpec], arch: str, cache: KernelCache, listener: Progress
) -> dict[KernelSpec, bytes]:
    """Cubins of kernels, from the cache or compiled on all cores."""
    listener.expect(len(specs))

    def compile_one(spec: KernelSpec) -> bytes:
        cubin = cache.get(spec, arch)
        if not is_cubin(cubin):
            raise InspectionError(
                f"this NVRTC is older than {arch}: of {spec.symbol} it makes PTX, and no machine code"
            )
        listener.step(f"compiled {spec.symbol} for {arch}")
        return cubin

    return dict(zip(specs, in_threads(compile_one, specs), strict=True))


def _plan_rows(
    plan: Plan, device: CudaDevice, cubins: Mapping[KernelSpec, bytes], counts: Sequence[Counted] | None
) -> list[Row]:
    main = main_kernel(plan, device)
    main_blocks = sum(_blocks(launch) for launch in plan.launches if launch.kernel == main)
    total = sum(c.bound_ms for c in counts) if counts else None
    alike: dict[object, list[int]] = {}
    for place, launch in enumerate(plan.launches):  # slabs of a large problem repeat launches
        alike.setdefault((launch.kernel, launch.grid, launch.dynamic_shared, launch.work), []).append(place)
    rows = []
    for places in alike.values():
        launch, times = plan.launches[places[0]], len(places)
        spec = launch.kernel
        row = _row(device.arch, spec, cubins[spec], launch.dynamic_shared)
        row = replace(row, launch=places[0], times=times, main=spec == main, grid=launch.grid)
        if counts:
            # A batch too large for one launch is split; each launch does its share of the multiplications.
            share = _blocks(launch) / main_blocks if spec == main else 0.0
            row = _with_counts(row, counts[places[0]], share * plan.problem.multiplications, total)
        rows.append(row)
    return rows


def _row(arch: str, spec: KernelSpec, cubin: bytes, dynamic_shared: int = 0) -> Row:
    info = kernel_info(cubin, spec.symbol)
    shared = info.static_shared + dynamic_shared
    return Row(
        kernel=spec.symbol,
        arch=arch,
        registers=info.registers,
        spill_bytes=info.stack,
        shared_bytes=shared,
        blocks_per_sm=blocks_per_sm(arch, info.registers, spec.threads, shared),
        threads=spec.threads,
    )


def _with_counts(row: Row, counted: Counted, useful: float, total: float | None) -> Row:
    return replace(
        row,
        binding=counted.binding,
        fp32_share=counted.fp32_share(useful),
        bound_ms=counted.bound_ms,
        pass_bound_ms=total,
        ffma_share=counted.ffma_share,
        blocks_counted=counted.blocks_run,
        resources_ms={name: counted.ms(name) for name in counted.cycles},
    )


def _blocks(launch: Launch) -> int:
    return prod(launch.grid)
