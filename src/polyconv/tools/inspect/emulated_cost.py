"""Lower bound of a launch's time on a V100 or A100, by executing its machine code in an emulator, without a GPU.

The emulator is a separate package (``pip install -e tools/gpu_emulator`` in a source checkout). It counts the warp
instructions, bank conflicts and memory sectors of the blocks that it executes, which give the least time of each
resource of the GPU. The largest of these bounds the kernel: no schedule of the same instructions is faster. Latencies
are not modelled, so a real launch takes longer.

A full-size launch has tens of thousands of similar blocks, so only a sample is executed (:func:`sample`), on full-size
tensors that take memory only where they are touched. Small launches are executed in full.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...cuda.planner import DEVICES, CudaDevice, KernelSpec, Launch, Plan
from ...cuda.planner.cost import bound_us
from ...cuda.planner.plan import Dim3
from ...problem import Shape, Strides

V100 = DEVICES["v100"]
COUNTED = {device.arch: device for device in (V100, DEVICES["a100"])}
"""Architecture -> GPU, for those whose machine code the emulator executes."""
WHOLE = 20_000_000
"""Warp instructions up to which a launch is executed in full; the emulator does about ten million per second."""
WHOLE_BESIDE = 10 * WHOLE
"""As :data:`WHOLE`, for launches other than the main one. Their output (a table of offsets) steers the main one."""
SAMPLED = 12_000_000
"""Approximate warp instructions of a sample."""
FEWEST_BLOCKS, MOST_BLOCKS = 4, 64
"""Limits on the number of blocks in a sample, whatever their length."""
FEW_SLICES = 16
"""Blocks along x up to which the last ones are sampled separately: of a sum's slices, the last is often shorter."""

_GOLDEN = (math.sqrt(5) - 1) / 2
_DRAM = "DRAM"


class CountingError(RuntimeError):
    """The emulator found a fault in a kernel or does not support one of its instructions."""


class EmulatorError(CountingError):
    """The emulator lacks a tool that it needs on this machine."""


def emulator() -> ModuleType | None:
    """The emulator, or None if it is not installed."""
    try:
        return importlib.import_module("gpu_emulator")
    except ImportError:
        return None


def sample(grid: Dim3, most: int, behind: int = 0) -> list[tuple[Dim3, float]]:
    """Blocks to execute, about ``most``, each with the number of blocks that it represents.

    The last ``behind`` blocks along x do different work and are sampled separately.

    Work often differs along z (phases of a strided gradient with their own number of taps), so each z is sampled
    separately if ``most`` allows. Its last block, the only one that may be cut off at the end of the pixels, represents
    itself; the others are represented by blocks at golden-ratio distances. These meet every remainder of every small
    period about equally often, so that image edges and channel tiles are as frequent as in the launch.
    """
    x, y, z = grid
    if behind:
        own = x - behind
        others = [((own + at, row, layer), weight) for (at, row, layer), weight in sample((behind, y, z), most)]
        return sample((own, y, z), most) + others
    layers = z if 2 * z <= most else 1
    blocks = x * y * z // layers
    chosen: list[tuple[Dim3, float]] = []
    for layer in range(layers):
        for index, weight in _positions(blocks, max(1, most // layers)):
            plane, row = divmod(index, x * y)
            chosen.append(((row % x, row // x, layer + plane), weight))
    return chosen


def _positions(count: int, most: int) -> Iterator[tuple[int, float]]:
    if count <= most:
        yield from ((index, 1.0) for index in range(count))
        return
    if most == 1:
        yield count // 2, float(count)
        return
    spread = {int((0.5 + i * _GOLDEN) % 1 * (count - 1)) for i in range(most - 1)}
    yield from ((index, (count - 1) / len(spread)) for index in sorted(spread))
    yield count - 1, 1.0


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of one launch, over all its blocks."""

    cycles: Mapping[str, float]
    """Resource -> cycles that the whole device needs for that part of the work if everything else is free."""
    issued: float
    """Warp instructions."""
    issued_ffma: float
    blocks_run: int
    device: CudaDevice = V100

    @property
    def binding(self) -> str:
        return max(self.cycles, key=lambda name: self.cycles[name])

    @property
    def bound_cycles(self) -> float:
        return self.cycles[self.binding]

    @property
    def bound_ms(self) -> float:
        return self.bound_cycles / self.device.clock_mhz / 1e3

    def ms(self, resource: str) -> float:
        return self.cycles[resource] / self.device.clock_mhz / 1e3

    @property
    def ffma_share(self) -> float:
        return self.issued_ffma / self.issued if self.issued else 0.0

    def fp32_share(self, useful: float) -> float:
        """``useful`` multiply-adds as a share of the FP32 peak within the bound."""
        lanes = self.device.fp32_per_clock * self.device.sms
        return useful / (lanes * self.bound_cycles) if self.bound_cycles else 0.0


Execute = Callable[[list[Dim3]], Any]
"""Executes blocks of a launch and returns the emulator's report."""


def count(
    grid: Dim3,
    execute: Execute,
    *,
    dram_bytes: float,
    whole: int = WHOLE,
    device: CudaDevice = V100,
    behind: int = 0,
) -> Counted:
    """Count a launch: in full up to about ``whole`` warp instructions, else by a sample of its blocks.

    The last ``behind`` blocks along x do different work. ``dram_bytes`` is the DRAM traffic if each element is read and
    written once. It is used for samples, whose blocks share sectors with neighbours that are not executed; a launch
    executed in full counts its own traffic.
    """
    total = math.prod(grid)
    sliced = not behind and 1 < grid[0] <= FEW_SLICES
    behind = int(sliced) or behind
    middle: Dim3 = ((grid[0] - behind) // 2, grid[1] // 2, grid[2] // 2)
    each = max(1, execute([middle]).issue_slots)
    most = total if total * each <= whole else min(MOST_BLOCKS, max(FEWEST_BLOCKS, SAMPLED // each))
    if sliced and most < total:
        most = max(FEWEST_BLOCKS, most // 2)  # twice
    by_weight: dict[float, list[Dim3]] = {}
    for block, weight in sample(grid, most, behind):
        by_weight.setdefault(weight, []).append(block)
    cycles: dict[str, float] = {}
    issued = ffma = 0.0
    for weight, blocks in by_weight.items():
        report = execute(blocks)
        light = report.speed_of_light(
            sms=device.sms,
            clock_mhz=device.clock_mhz,
            dram_gbs=device.dram_gbs,
            l2_bytes_per_clk=device.l2_gbs * 1e3 / device.clock_mhz,
        )
        # Each resource's time is linear in the counts, so times are additive.
        for row in light.rows:
            cycles[row.name] = cycles.get(row.name, 0.0) + weight * row.cycles
        issued += weight * report.issue_slots
        ffma += weight * report.opcode_counts().get("FFMA", 0)
    if most < total:
        cycles[_DRAM] = dram_bytes / (device.dram_gbs * 1e9) * device.clock_mhz * 1e6
    return Counted(cycles, issued, ffma, sum(map(len, by_weight.values())), device)


def main_kernel(plan: Plan, device: CudaDevice) -> KernelSpec:
    """The kernel whose launches together take the most modelled time on a device."""
    took: dict[KernelSpec, float] = {}
    for launch in plan.launches:
        took[launch.kernel] = took.get(launch.kernel, 0.0) + bound_us(launch, device)
    return max(took, key=lambda spec: took[spec])


def count_plan(gpu: Any, plan: Plan, cubins: Mapping[KernelSpec, bytes], device: CudaDevice) -> list[Counted]:
    """Count every launch of a plan, in order, on full-size tensors of zeros; slabs with equal work only once."""
    buffers, main = empty_buffers(gpu, plan), main_kernel(plan, device)
    found = []
    known: dict[object, Counted] = {}
    for launch in plan.launches:
        same = (launch.kernel, launch.grid, launch.work)
        if same in known:
            found.append(known[same])
            continue

        def some(blocks: list[Dim3], launch: Launch = launch) -> Any:
            return execute(gpu, cubins[launch.kernel], launch, buffers, blocks)

        whole = WHOLE if launch.kernel == main else WHOLE_BESIDE
        try:
            moved, behind = launch.work.dram_bytes, launch.work.behind
            known[same] = count(launch.grid, some, dram_bytes=moved, whole=whole, device=device, behind=behind)
        except gpu.ToolchainError as error:
            raise EmulatorError(str(error)) from error
        except (gpu.Fault, gpu.LaunchError) as error:
            raise CountingError(f"{launch.kernel.symbol} could not be counted: {error}") from error
        found.append(known[same])
    return found


def empty_buffers(gpu: Any, plan: Plan) -> dict[str, Any]:
    """Full-size tensors for a plan's launches, which take memory only where they are touched."""
    return {name: gpu.sparse(size // 4 + 1) for name, size in buffer_bytes(plan).items()}


def execute(
    gpu: Any, cubin: bytes, launch: Launch, buffers: Mapping[str, Any], blocks: list[Dim3] | None = None
) -> Any:
    """Execute the given blocks of a launch, or all; returns the emulator's report."""
    return gpu.run(
        cubin,
        launch.kernel.symbol,
        launch.grid,
        launch.block,
        launch.bind({name: int(buffer.ctypes.data) for name, buffer in buffers.items()}),
        shared=launch.dynamic_shared,
        max_dynamic_shared=launch.dynamic_shared,
        extra_buffers=list(buffers.values()),
        blocks=blocks,
        check=False,
    )


def buffer_bytes(plan: Plan) -> dict[str, int]:
    """Sizes of the buffers that a plan's launches use [bytes]."""
    p = plan.problem
    sizes = {
        "x": _extent(p.x_shape, p.x_strides),
        "w": _extent(p.w_shape, p.w_strides),
        "y": _extent(p.y_shape, p.y_strides),
        "dw": _extent(p.w_shape, p.w_strides),
        "bias": 4 * p.out_channels,
        "residual": _extent(p.y_shape, p.y_strides),
        "db": 4 * p.out_channels,
        "workspace": plan.workspace_bytes,
    }
    used = {slot.buffer for launch in plan.launches for slot in launch.pointers}
    return {name: size for name, size in sizes.items() if name in used}


def _extent(shape: Shape, strides: Strides) -> int:
    return 4 * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
