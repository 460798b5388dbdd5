"""The kernel of files written by ``polyconv export --simple``, executed as machine code on CPU tensors."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from math import ceil, prod

import torch
from cuda.core import Program, ProgramOptions
from torch import Tensor

import gpu_emulator
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem
from polyconv.tools.export import named_model
from polyconv.tools.export.simple_model import CONSTANTS, GEMM, geometry_of

SYMBOLS = {Pass.FPROP: "_Z4gemmI7ForwardEvT_", Pass.DGRAD: "_Z4gemmI13InputGradientEvT_"}
SYMBOLS[Pass.WGRAD] = "_Z4gemmI14WeightGradientEvT_"
TOLERANCE = 1e-5
"""Largest error of an element, in units of its map's scale."""
NAN = float("nan")


class _Images(ctypes.Structure):
    """``Images`` of the kernel's source."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("image_stride", "channel_stride")),
        *((name, ctypes.c_int) for name in ("row_stride", "column_stride", "batch", "height", "width")),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> _Images:
        batch, _, height, width = tensor.shape
        return cls(tensor.data_ptr(), *tensor.stride(), batch, height, width)


class _Forward(ctypes.Structure):
    _fields_ = [("x", _Images), ("y", _Images), ("w", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _InputGradient(ctypes.Structure):
    _fields_ = [("dx", _Images), ("dy", _Images), ("w", ctypes.c_void_p)]


class _WeightGradient(ctypes.Structure):
    _fields_ = [("x", _Images), ("dy", _Images), ("slices", ctypes.c_void_p), ("slice_pixels", ctypes.c_int)]


def constant(name: str) -> int:
    """A number of the kernel's source."""
    return int(re.findall(rf"\bk{name} = (\d+)\b", GEMM.read_text(encoding="utf-8"))[0])


@cache
def compiled(geometry: tuple[int, ...], arch: str = "sm_70") -> bytes:
    """Machine code of the three passes."""
    lines = [CONSTANTS.format(*geometry) + GEMM.read_text(encoding="utf-8")]
    lines += [f"template __global__ void gemm({job});" for job in ("Forward", "InputGradient", "WeightGradient")]
    options = ProgramOptions(arch=arch, std="c++17", fma=True)
    return bytes(Program("\n".join(lines), "c++", options).compile("cubin").code)


@dataclass
class Run:
    """The kernel for one problem's geometry, as ``launch`` of the file would start it."""

    problem: Problem
    arch: str = "sm_70"
    blocks: int = 0
    """Number of blocks to execute, the last ones; 0 for all, and with checks of global memory."""
    reports: list[gpu_emulator.Report] = field(default_factory=list)

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
        job = _Forward(_Images.of(x), _Images.of(y), w.data_ptr(), None if bias is None else bias.data_ptr())
        buffers = [x, w, y] + ([] if bias is None else [bias])
        self._launch(Pass.FPROP, job, y[:, 0].numel(), w.shape[0], 1, buffers)

    def input_gradient(self, dy: Tensor, w: Tensor, dx: Tensor) -> None:
        job = _InputGradient(_Images.of(dx), _Images.of(dy), w.data_ptr())
        self._launch(Pass.DGRAD, job, dx[:, 0].numel(), dx.shape[1], 1, [dy, w, dx])

    def weight_gradient(self, x: Tensor, dy: Tensor, slices: Tensor) -> None:
        """``slices``: as many weights, whose sum is the gradient."""
        slice_pixels = ceil(dy[:, 0].numel() / len(slices))
        job = _WeightGradient(_Images.of(x), _Images.of(dy), slices.data_ptr(), slice_pixels)
        self._launch(Pass.WGRAD, job, slices[0, 0].numel(), dy.shape[1], len(slices), [x, dy, slices])

    def _launch(
        self, kind: Pass, job: ctypes.Structure, columns: int, rows: int, slices: int, buffers: list[Tensor]
    ) -> None:
        if columns == 0:
            return
        groups, threads = self.problem.groups, constant("Threads")
        rows //= groups
        tile_rows = 64 if rows > 32 else 32 if rows > 16 else 16
        grid = (ceil(columns / constant("N")) * ceil(rows / tile_rows), groups, slices)
        code = compiled(geometry_of(self.problem), self.arch)
        last = [(grid[0] - 1 - i, groups - 1, slices - 1) for i in range(self.blocks)] or None
        report = gpu_emulator.run(
            *(code, SYMBOLS[kind], grid, threads, bytes(job)),
            extra_buffers=buffers,
            blocks=last,
            check_global=not self.blocks,
        )
        self.reports.append(report.scaled(prod(grid)) if last else report)


def check(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, slices: int, arch: str) -> Run:
    """Output and gradients against float64. Inputs may have any strides."""
    run = Run(problem, arch)
    y, dx = torch.full(problem.y_shape, NAN), torch.empty_like(x).fill_(NAN)
    parts = torch.full((slices, *problem.w_shape), NAN)
    run.forward(x, w, bias, y)
    run.input_gradient(dy, w, dx)
    run.weight_gradient(x, dy, parts)
    dw, _ = reference.wgrad(problem, x, dy, w.shape)
    expected = {
        Pass.FPROP: ("y", y, reference.fprop(problem, x, w, bias)),
        Pass.DGRAD: ("x", dx, reference.dgrad(problem, dy, w, x.shape)),
        Pass.WGRAD: ("dw", parts.sum(0), dw),
    }
    operands = {"x": x, "w": w, "y": dy} | ({} if bias is None else {"bias": bias})
    for kind, (name, got, want) in expected.items():
        if got.numel():
            error = largest((got.double() - want).abs(), scales(problem.for_pass(kind), operands)[name])
            assert error <= TOLERANCE, f"{name} is off by {error:.1e} of its scale: {problem}"
    return run


def count(problem: Problem) -> list[gpu_emulator.Report]:
    """Reports of the three passes on a V100, from the last two blocks of each, on zeros."""
    x, y = (torch.from_numpy(gpu_emulator.sparse(shape)) for shape in (problem.x_shape, problem.y_shape))
    w, run = torch.zeros(problem.w_shape), Run(problem, blocks=2)
    run.forward(x, w, None, y)
    run.input_gradient(y, w, x)
    slices = max(1, min(y[:, 0].numel() // 2048, 2**24 // w.numel()))  # as weight_gradient of the file
    run.weight_gradient(x, y, torch.from_numpy(gpu_emulator.sparse((slices, *problem.w_shape))))
    return run.reports


if __name__ == "__main__":
    for _report in count(named_model(sys.argv[1]).layers[0].problem):
        print(_report.speed_of_light())
