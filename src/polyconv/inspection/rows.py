"""One row per kernel launch: what it takes of a multiprocessor, and what a V100 or an A100 would spend on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from .. import settings
from ..cuda.cache import KernelCache
from ..cuda.compile import in_threads
from ..cuda.cubin import KernelInfo, is_cubin, kernel_info
from ..measure.workloads import Workload
from ..plan import DEVICES, CudaDevice, KernelSpec, Launch, Plan, plan_cuda
from ..plan.cost import bound_us
from ..plan.occupancy import blocks_per_sm
from ..problem import Pass
from .counting import COUNTED, Counted, count_plan


class Listener(Protocol):
    """Is told how much work there is, and after each piece what it was; from several threads."""

    def expect(self, pieces: int) -> None: ...

    def step(self, what: str) -> None: ...


class InspectionError(RuntimeError):
    """What was asked for cannot be inspected; the message says what can."""


@dataclass(frozen=True, slots=True)
class Row:
    """One launch of one workload's pass, or one kernel on its own (then the fields of a launch are ``None``)."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    """Per block: what the kernel declares, and what the launch adds."""
    blocks_per_sm: int | None
    workload: str | None = None
    id: str | None = None
    kind: str | None = None
    """The pass."""
    launch: int | None = None
    """Its place among the launches of the plan, the first one's where several do the same."""
    times: int | None = None
    """Launches of the plan that do the same on other data; the times below are those of one."""
    main: bool = False
    """This launch multiplies; the others prepare or finish."""
    grid: tuple[int, int, int] | None = None
    threads: int | None = None
    binding: str | None = None
    fp32_share: float | None = None
    bound_ms: float | None = None
    pass_bound_ms: float | None = None
    """Sum over all launches of the pass."""
    ffma_share: float | None = None
    """Share of the issued instructions that are FFMA."""
    blocks_counted: int | None = None
    resources_ms: Mapping[str, float] | None = None
    """Resource -> the least time that it needs; the largest is ``bound_ms``."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the pass under its own name."""
        return {"pass" if name == "kind" else name: value for name, value in asdict(self).items()}


def device_of(arch: str) -> CudaDevice:
    """The GPU that plans for an architecture are made for."""
    for device in DEVICES.values():
        if device.arch == arch:
            return device
    known = ", ".join(dict.fromkeys(device.arch for device in DEVICES.values()))
    raise InspectionError(f"no GPU is described for {arch}, so no plan can be made; there are {known}")


def main_kernel(plan: Plan) -> KernelSpec:
    """The kernel that takes most of the modelled time, all its launches together."""
    took: dict[KernelSpec, float] = {}
    for launch in plan.launches:
        took[launch.kernel] = took.get(launch.kernel, 0.0) + bound_us(launch, DEVICES["v100"])
    return max(took, key=lambda spec: took[spec])


def inspect_kernels(specs: Sequence[KernelSpec], arch: str, cache: KernelCache, listener: Listener) -> list[Row]:
    """Kernels on their own. Shared memory that is sized at launch (the depthwise kernels') is not in these rows."""
    cubins = compile_all(specs, arch, cache, listener)
    return [_row(arch, spec, kernel_info(cubins[spec], spec.symbol), spec.threads, 0) for spec in specs]


def inspect_workloads(
    workloads: Sequence[Workload],
    passes: Sequence[Pass],
    arch: str,
    cache: KernelCache,
    listener: Listener,
    gpu: Any = None,
) -> list[Row]:
    """Every launch of every pass, the main launch of a pass first. ``gpu_emulator``: the emulator, if there is one."""
    device = device_of(arch)
    limit = settings.current().workspace_bytes
    asked = [(w, kind, plan_cuda(w.problem(kind).as_picture(), device, limit)) for w in workloads for kind in passes]
    cubins = compile_all(list(dict.fromkeys(s for _, _, plan in asked for s in plan.kernels)), arch, cache, listener)
    counted: Iterable[list[Counted] | None] = [None] * len(asked)
    if gpu is not None and arch in COUNTED:

        def count_one(job: tuple[Workload, Pass, Plan]) -> list[Counted]:
            workload, kind, plan = job
            found = count_plan(gpu, plan, cubins, main_kernel(plan))
            listener.step(f"counted {workload.name} {kind}")
            return found

        listener.expect(len(asked))
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="polyconv-count") as pool:
            counted = list(pool.map(count_one, asked))
    rows: list[Row] = []
    for (workload, kind, plan), counts in zip(asked, counted, strict=True):
        named = [
            replace(row, workload=workload.name, id=workload.id, kind=str(kind))
            for row in _plan_rows(plan, arch, cubins, counts)
        ]
        rows += sorted(named, key=lambda row: not row.main)
    return rows


def compile_all(
    specs: Sequence[KernelSpec], arch: str, cache: KernelCache, listener: Listener
) -> dict[KernelSpec, bytes]:
    """Cubins of some kernels, from the cache or compiled on all cores."""
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
    plan: Plan, arch: str, cubins: Mapping[KernelSpec, bytes], counts: Sequence[Counted] | None
) -> list[Row]:
    main = main_kernel(plan)
    main_blocks = sum(_blocks(launch) for launch in plan.launches if launch.kernel == main)
    total = sum(c.bound_ms for c in counts) if counts else None
    alike: dict[object, list[int]] = {}
    for place, launch in enumerate(plan.launches):  # slabs of a large problem repeat a launch
        alike.setdefault((launch.kernel, launch.grid, launch.dynamic_shared, launch.work), []).append(place)
    rows = []
    for places in alike.values():
        launch, times = plan.launches[places[0]], len(places)
        spec = launch.kernel
        row = _row(arch, spec, kernel_info(cubins[spec], spec.symbol), spec.threads, launch.dynamic_shared)
        row = replace(row, launch=places[0], times=times, main=spec == main, grid=launch.grid, threads=spec.threads)
        if counts:
            # A batch too large for one launch is cut: each piece does its share of the multiplications.
            share = _blocks(launch) / main_blocks if spec == main else 0.0
            row = _with_counts(row, counts[places[0]], share * plan.problem.multiplications, total)
        rows.append(row)
    return rows


def _row(arch: str, spec: KernelSpec, info: KernelInfo, threads: int, dynamic_shared: int) -> Row:
    shared = info.static_shared + dynamic_shared
    return Row(
        kernel=spec.symbol,
        arch=arch,
        registers=info.registers,
        spill_bytes=info.stack,
        shared_bytes=shared,
        blocks_per_sm=blocks_per_sm(arch, info.registers, threads, shared),
        threads=threads,
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
    x, y, z = launch.grid
    return x * y * z
