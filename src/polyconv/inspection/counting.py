"""What a V100 or an A100 would spend on a launch, counted: its machine code is executed, block by block, without a GPU.

The emulator is a package of its own (``pip install -e tools/gpu_emulator`` in a source checkout). It counts every warp
instruction, bank conflict and memory sector of the blocks that it runs; from the counts follows the least time that
each resource of the GPU needs. The largest of these bounds the kernel: no schedule of the same instructions is faster.
Latencies are not in it, so a real launch takes longer.

A full-size launch has tens of thousands of blocks that all do the same, so only a sample of them is executed
(:func:`sample`), on tensors of full size that take memory only where they are touched. Small launches run whole.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..plan import DEVICES, CudaDevice, KernelSpec, Launch, Plan
from ..plan.plan import Dim3
from ..problem import Shape, Strides

V100 = DEVICES["v100"]
COUNTED = {device.arch: device for device in (V100, DEVICES["a100"])}
"""The GPUs whose machine code the emulator executes, by their architecture."""
WHOLE = 20_000_000
"""Warp instructions up to which a launch runs whole; the emulator does about ten million a second."""
WHOLE_BESIDE = 10 * WHOLE
"""The same for launches beside the main one. What they write steers the main one (a table of offsets)."""
SAMPLED = 12_000_000
"""Warp instructions that a sample of a larger launch is about."""
FEWEST_BLOCKS, MOST_BLOCKS = 4, 64
"""Blocks that a sample has, however long or short they are."""

_GOLDEN = (math.sqrt(5) - 1) / 2
_DRAM = "DRAM"


class CountingError(RuntimeError):
    """A kernel could not be counted: the emulator found a fault in it, or does not know one of its instructions."""


class EmulatorError(CountingError):
    """The emulator cannot work on this machine: a tool that it needs is missing."""


def emulator() -> ModuleType | None:
    """The emulator, if it is installed: it is a package of its own, in ``tools/gpu_emulator`` of the sources."""
    try:
        return importlib.import_module("gpu_emulator")
    except ImportError:
        return None


def sample(grid: Dim3, most: int, behind: int = 0) -> list[tuple[Dim3, float]]:
    """Which blocks to execute, at most about ``most``, and how many blocks each one stands for.

    The last blocks along x, ``behind`` of them, do other work than those before: they have a sample of their own.

    The z dimension often holds different work (a phase of a strided gradient with its own number of taps), so each z
    has a sample of its own where ``most`` allows. Within it the very last block, the only one that may be cut off at
    the end of the pixels, stands for itself; the others are represented by blocks spread over the whole range at
    distances of the golden ratio. Such positions meet every remainder of every small period about equally often, so
    tiles at the edges of the image and in each channel tile appear in the sample as often as in the launch.
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
    """One launch: cycles per resource, all blocks together."""

    cycles: Mapping[str, float]
    """Resource -> cycles in which the whole device could do that part of the work, everything else being free."""
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
        """Share of the issued instructions that are multiply-adds."""
        return self.issued_ffma / self.issued if self.issued else 0.0

    def fp32_share(self, useful: float) -> float:
        """``useful`` multiply-adds as a share of what the FP32 lanes could do within the bound."""
        lanes = self.device.fp32_per_clock * self.device.sms
        return useful / (lanes * self.bound_cycles) if self.bound_cycles else 0.0


Execute = Callable[[list[Dim3]], Any]
"""Runs these blocks of a launch and returns the emulator's report."""


def count(
    grid: Dim3,
    execute: Execute,
    *,
    dram_bytes: float,
    whole: int = WHOLE,
    device: CudaDevice = V100,
    behind: int = 0,
) -> Counted:
    """Count a launch: whole if it is about ``whole`` warp instructions or less, else by a sample of its blocks.

    Of these the last ``behind`` along x do other work than those before.

    ``dram_bytes`` is the traffic that memory sees if everything is read and written once. A sample cannot tell it (its
    blocks share sectors with neighbours that are not run); a launch that runs whole counts its own.
    """
    total = math.prod(grid)
    middle: Dim3 = ((grid[0] - behind) // 2, grid[1] // 2, grid[2] // 2)
    each = max(1, execute([middle]).issue_slots)
    most = total if total * each <= whole else min(MOST_BLOCKS, max(FEWEST_BLOCKS, SAMPLED // each))
    by_weight: dict[float, list[Dim3]] = {}
    for block, weight in sample(grid, most, behind):
        by_weight.setdefault(weight, []).append(block)
    cycles: dict[str, float] = {}
    issued = ffma = 0.0
    for weight, blocks in by_weight.items():
        report = execute(blocks)
        light = report.speed_of_light(sms=device.sms, clock_mhz=device.clock_mhz, dram_gbs=device.dram_gbs)
        # Each resource's time is linear in the counts, so the parts add up.
        for row in light.rows:
            cycles[row.name] = cycles.get(row.name, 0.0) + weight * row.cycles
        issued += weight * report.issue_slots
        ffma += weight * report.opcode_counts().get("FFMA", 0)
    if most < total:
        cycles[_DRAM] = dram_bytes / (device.dram_gbs * 1e9) * device.clock_mhz * 1e6
    return Counted(cycles, issued, ffma, sum(map(len, by_weight.values())), device)


def count_plan(gpu: Any, plan: Plan, cubins: Mapping[KernelSpec, bytes], main: KernelSpec) -> list[Counted]:
    """Count every launch of a plan, in order, on zero tensors of full size.

    Slabs of a large problem repeat a launch with other addresses: equal work is counted once.
    """
    buffers = empty_buffers(gpu, plan)
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
            device = COUNTED[gpu.resources(cubins[launch.kernel], launch.kernel.symbol).chip.arch]
            moved, behind = launch.work.dram_bytes, launch.work.behind
            known[same] = count(launch.grid, some, dram_bytes=moved, whole=whole, device=device, behind=behind)
        except gpu.ToolchainError as error:
            raise EmulatorError(str(error)) from error
        except (gpu.Fault, gpu.LaunchError) as error:
            raise CountingError(f"{launch.kernel.symbol} could not be counted: {error}") from error
        found.append(known[same])
    return found


def empty_buffers(gpu: Any, plan: Plan) -> dict[str, Any]:
    """Tensors of full size for a plan's launches, which take memory only where they are touched."""
    return {name: gpu.sparse(size // 4 + 1) for name, size in buffer_bytes(plan).items()}


def execute(
    gpu: Any, cubin: bytes, launch: Launch, buffers: Mapping[str, Any], blocks: list[Dim3] | None = None
) -> Any:
    """Some blocks of a launch, or all; the emulator's report."""
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
    """Sizes of the buffers that a plan's launches point into."""
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
