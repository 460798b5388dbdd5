"""Text of an exported file that is short enough to be read: one implicit GEMM for all passes, ``export --simple``."""

from __future__ import annotations

from pathlib import Path

from ...activation import Activation
from ...problem import PaddingMode, Pass, Problem
from ...version import __version__
from .models import ExportError, Layer, Model
from .python_text import default_arch, module_parts, with_class_name, wrapped

SOURCES = Path(__file__).resolve().parent / "simple"
GEMM = SOURCES / "gemm.cuh"
"""The device code. It includes nothing."""


CONSTANTS = """\
constexpr int kInChannels = {}, kOutChannels = {}, kGroups = {}, kKernelH = {}, kKernelW = {};
constexpr int kStrideH = {}, kStrideW = {}, kDilationH = {}, kDilationW = {}, kPadTop = {}, kPadLeft = {};
"""
"""Text before the device code, for :func:`geometry_of`."""


def simple_file(model: Model, *, arch: str = "", class_name: str = "ModelNew") -> str:
    """Text of a self-contained Python file of at most 350 lines: Conv2d layers on one readable kernel.

    ``arch`` is the default of ``TORCH_CUDA_ARCH_LIST``.
    """
    for layer in model.layers:
        _check(layer)
    words = f"Written by polyconv {__version__}: polyconv export {model.command} --simple"
    parts = {
        **module_parts(model, sourced=False),
        "TITLE": wrapped(f"{model.title}, on a CUDA kernel of its own."),
        "WRITTEN": wrapped(words),
        "ARCH": default_arch(arch),
        "CONSTANTS": CONSTANTS,
        "GEMM": GEMM.read_text(encoding="utf-8"),
        "LAUNCH": (SOURCES / "launch.cuh").read_text(encoding="utf-8"),
        "BUILD": "\n".join(f"    compiled({geometry_of(layer.problem)})" for layer in model.layers),
    }
    return with_class_name(SOURCES / "model.txt", parts, class_name)


def geometry_of(problem: Problem) -> tuple[int, ...]:
    """Numbers of a convolution that are constants of the kernel."""
    channels = (problem.in_channels, problem.out_channels, problem.groups)
    return (*channels, *problem.kernel, *problem.stride, *problem.dilation, *problem.padding[::2])


def _check(layer: Layer) -> None:
    problem, asked = layer.problem, f"{layer.attribute} is"
    if layer.module != "Conv2d" or problem.kind is not Pass.FPROP:
        raise ExportError(f"{asked} a {layer.module}: a file of --simple has Conv2d alone; leave out --simple")
    if problem.padding_mode is not PaddingMode.ZEROS:
        mode = str(problem.padding_mode)
        raise ExportError(f"{asked} padded by padding_mode={mode!r}: a file of --simple pads with zeros")
    if problem.activation is not Activation.NONE or problem.residual:
        raise ExportError(f"{asked} followed by an activation or a residual: a file of --simple has neither")
