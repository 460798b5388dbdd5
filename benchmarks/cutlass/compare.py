"""CUTLASS's FP32 convolution and polyconv's, both counted on the same emulated V100. Needs no GPU.

    pip install --no-deps -r benchmarks/cutlass/requirements.txt
    python benchmarks/cutlass/compare.py                  # prints the table
    python benchmarks/cutlass/compare.py --write-readme   # and puts it into README.md

CUTLASS's kernel is compiled for sm_70 by the NVRTC that compiles polyconv's, checked against PyTorch on a small
problem, and counted on the full-size one by the same sampling as ``polyconv inspect``. Its tensors are NHWC.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cuda.core import Program, ProgramOptions

from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner.occupancy import blocks_per_sm
from polyconv.measure import workloads
from polyconv.numerics import reference
from polyconv.problem import Pass, Problem
from polyconv.tools.inspect import emulator, inspect_workloads
from polyconv.tools.inspect.emulated_cost import V100, count
from polyconv.util.console import Progress

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADERS = ("", "kernel", "registers", "shared B", "blocks/SM", "FFMA of issued", "bound by", "FP32", "ms", "other ms")
BESIDE = {"issue slots": "issue", "lsu / L1": "L1", "alu pipe": "ALU"}
"""Resources within this share of the bound are shown: latency must hide them."""


@dataclass(frozen=True)
class Tile:
    """An instance of CUTLASS's kernel: a threadblock tile and the warp tiles it is made of."""

    block: tuple[int, int]
    warp: tuple[int, int]
    stride: str
    """CUTLASS's instance for stride one: its general one, or the one for that stride only."""

    @property
    def name(self) -> str:
        return f"{self.block[0]}x{self.block[1]}x8, warps of {self.warp[0]}x{self.warp[1]}, {self.stride}"

    @property
    def macros(self) -> list[tuple[str, str]]:
        names, values = ("BLOCK_M", "BLOCK_N", "WARP_M", "WARP_N", "STRIDE"), (*self.block, *self.warp, self.stride)
        return [(name, str(value)) for name, value in zip(names, values, strict=True)]


TILES = (
    Tile((128, 64), (64, 32), "kStrided"),
    Tile((128, 64), (64, 32), "kUnity"),
    Tile((128, 64), (32, 64), "kStrided"),
    Tile((128, 128), (64, 32), "kStrided"),
)


class ProblemSize(ctypes.Structure):
    """``cutlass::conv::Conv2dProblemSize``."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("n", "h", "w", "c", "p", "q", "k", "r", "s"),
            *("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w"),
            *("mode", "split_k_slices", "groups"),
        )
    ]

    @classmethod
    def of(cls, p: Problem) -> ProblemSize:
        top, bottom, left, right = p.padding
        assert (top, left) == (bottom, right), "CUTLASS pads both sides alike"
        cross_correlation, slices = 0, 1
        window = (top, left, *p.stride, *p.dilation)
        return cls(p.batch, *p.in_size, p.in_channels, *p.out_size, p.out_channels, *p.kernel, *window)._with(
            mode=cross_correlation, split_k_slices=slices, groups=p.groups
        )

    def _with(self, **values: int) -> ProblemSize:
        for name, value in values.items():
            setattr(self, name, value)
        return self


class Cutlass:
    """One tile's kernel, compiled, and the kernel that prepares its launches."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.kernel = _compile(tile.macros)
        self.setup = _compile([*tile.macros, ("SETUP", "1")])
        self.info = kernel_info(self.kernel, "conv2d_fprop")

    def prepare(self, gpu: Any, problem: Problem, x: Any, w: Any, y: Any) -> Launch:
        """Let CUTLASS fill its parameters for these NHWC tensors."""
        params, out = gpu.sparse(4096, "uint8"), gpu.sparse(6, "int32")
        gpu.run(self.setup, "setup", 1, 1, [ProblemSize.of(problem), x, w, y, params, out])
        size, threads, shared, *grid = (int(value) for value in out)
        assert size == self.info.params_bytes
        return Launch(self, params[:size].tobytes(), threads, shared, (grid[0], grid[1], grid[2]), [x, w, y])


@dataclass(frozen=True)
class Launch:
    cutlass: Cutlass
    params: bytes
    threads: int
    shared: int
    grid: tuple[int, int, int]
    tensors: list[Any]

    def run(self, gpu: Any, blocks: Sequence[tuple[int, int, int]] | None = None, *, check: bool = False) -> Any:
        return gpu.run(
            self.cutlass.kernel,
            "conv2d_fprop",
            self.grid,
            self.threads,
            self.params,
            shared=self.shared,
            blocks=blocks,
            extra_buffers=self.tensors,
            check=check,
        )


def _compile(macros: list[tuple[str, str]]) -> bytes:
    chosen = ProgramOptions(
        arch="sm_70",
        std="c++17",
        define_macro=macros,
        include_path=[str(path) for path in _include_path()],
        device_as_default_execution_space=True,
        disable_warnings=True,
    )
    source = (HERE / "conv2d_fprop.cu").read_text(encoding="utf-8")
    return bytes(Program(source, "c++", chosen).compile("cubin").code)


def _include_path() -> list[Path]:
    cutlass, nvidia = find_spec("cutlass_library"), find_spec("nvidia")
    if cutlass is None or cutlass.origin is None or nvidia is None:
        sys.exit("CUTLASS's headers are missing: pip install --no-deps -r benchmarks/cutlass/requirements.txt")
    found = [Path(cutlass.origin).parent / "source" / "include"]
    for package in ("cuda_cccl", "cuda_runtime", "cuda_nvcc"):
        places = [Path(root) / package / "include" for root in nvidia.submodule_search_locations or ()]
        found += [place for place in places if place.is_dir()]
    return found


def verify(gpu: Any, cutlass: Cutlass) -> float:
    """Largest error on a small problem like W1, every block executed with every check; exits if it is too large."""
    problem = Problem.make(
        Pass.FPROP, (2, 32, 24, 40), (64, 32, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3), vector_aligned=True
    )
    torch.manual_seed(0)
    x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape)
    expected = reference.fprop(problem, x, w)
    y = torch.full((problem.batch, *problem.out_size, problem.out_channels), float("nan"))
    x, w = (tensor.permute(0, 2, 3, 1).contiguous() for tensor in (x, w))
    cutlass.prepare(gpu, problem, x, w, y).run(gpu, check=True)
    error = float((y.permute(0, 3, 1, 2) - expected).abs().max())
    if not error < 1e-3:
        sys.exit(f"CUTLASS {cutlass.tile.name} is off by {error}")
    return error


def cutlass_row(gpu: Any, cutlass: Cutlass, problem: Problem) -> tuple[float, list[str]]:
    """The bound [ms], and the row of the table."""
    n, c, h, w = problem.x_shape
    k, _, r, s = problem.w_shape
    tensors = [gpu.sparse(shape) for shape in ((n, h, w, c), (k, r, s, c), (n, *problem.out_size, k))]
    launch = cutlass.prepare(gpu, problem, *tensors)
    counted = count(launch.grid, lambda blocks: launch.run(gpu, blocks), dram_bytes=sum(t.nbytes for t in tensors))
    row = _row(
        f"CUTLASS 4.2, {cutlass.tile.name}",
        cutlass.info.registers,
        launch.shared,
        blocks_per_sm("sm_70", cutlass.info.registers, launch.threads, launch.shared),
        counted.ffma_share,
        counted.binding,
        counted.fp32_share(problem.multiplications),
        counted.bound_ms,
        {name: counted.ms(name) for name in counted.cycles},
    )
    return counted.bound_ms, row


def polyconv_row(gpu: Any, workload: workloads.Workload) -> list[str]:
    row = inspect_workloads([workload], [Pass.FPROP], "sm_70", KernelCache(), Progress(quiet=True), gpu)[0]
    assert row.main
    return _row(
        f"polyconv, {row.kernel}",
        row.registers,
        row.shared_bytes,
        row.blocks_per_sm,
        row.ffma_share or math.nan,
        row.binding or "",
        row.fp32_share or math.nan,
        row.pass_bound_ms or math.nan,
        row.resources_ms or {},
    )


def _row(
    kernel: str,
    registers: int,
    shared: int,
    resident: int | None,
    ffma: float,
    binding: str,
    share: float,
    bound_ms: float,
    resources_ms: Any,
) -> list[str]:
    beside = ", ".join(f"{short} {resources_ms[name]:.1f}" for name, short in BESIDE.items())
    figures = [f"{100 * ffma:.1f} %", binding, f"{100 * share:.1f} %", f"{bound_ms:.2f}", beside]
    return [kernel, str(registers), str(shared), str(resident), *figures]


def conversion_ms(problem: Problem) -> float:
    """Least time to convert x to NHWC and y back for NCHW tensors: each is read and written."""
    moved = 2 * 4 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
    return moved / (V100.dram_gbs * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default="W1,W3", help="named workloads, separated by commas (default: W1,W3)")
    parser.add_argument("--write-readme", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    gpu = emulator()
    if gpu is None:
        sys.exit("counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator")
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(Cutlass, TILES))
    for one in compiled:
        print(f"CUTLASS {one.tile.name}: right to {verify(gpu, one):.1e}", file=sys.stderr)
    lines = [f"| {' | '.join(HEADERS)} |", "| --- | --- " + "| ---: " * (len(HEADERS) - 3) + "| --- |"]
    for workload in workloads.find(args.workload):
        problem = workload.problem(Pass.FPROP)
        rows = [polyconv_row(gpu, workload)]
        rows += [row for _, row in sorted(cutlass_row(gpu, one, problem) for one in compiled)]
        lines += [f"| {' | '.join([workload.name, *row])} |" for row in rows]
        lines.append(
            f"| {workload.name} | NHWC from and to NCHW, if the tensors are NCHW | | | | | DRAM | "
            f"| {conversion_ms(problem):.2f} | |"
        )
    table = "\n".join(lines)
    print(table)
    if args.write_readme:
        readme = HERE / "README.md"
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
