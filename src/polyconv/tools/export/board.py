"""Submission to gpu-mode's public board of convolutions: one file for all its sizes.

The board compares with PyTorch to 1e-3 + 1e-3 |y|, where y is a sum of up to 131,072 products of scale 362. Near y = 0
that is 3e-6 of the scale, which long FP32 sums exceed. So a kernel is cut into parts, which are summed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ...cuda.planner.device import CudaDevice
from ...problem import Pass, Problem
from ...util.gpu_arch import capability
from ...version import __version__
from .device_code import WORKSPACE, cuda_source
from .model_file import TEMPLATES, described, source_text, tensor_cores_of
from .models import ExportError, Layer
from .python_text import default_arch, filled, source_name, wrapped

BOARD = "conv2d_v2"
_TOLERANCE = 3e-5
"""Limit of the predicted error of a part, several times what executed parts have (tools/export_check). It keeps
F(4,5) from the parts of 32 columns, whose sums are the longest."""


class Part(NamedTuple):
    """Kernels for the parts of some of the board's sizes."""

    layer: str
    channels: int
    taps: tuple[int, int]
    sizes: tuple[int, ...]
    """Taps per axis of the board's kernels with these channels."""
    image: int
    """Batch 1 of this height and width has the plan of the board's largest."""


PARTS = (
    Part("c64", 64, (8, 8), (8, 16), 128),
    Part("c128", 128, (8, 8), (16,), 256),
    Part("c128_long", 128, (2, 32), (32,), 256),
)


def board_file(device: CudaDevice, *, arch: str = "") -> str:
    """Text of a submission. ``arch`` is the default of ``TORCH_CUDA_ARCH_LIST``; if empty, it is the GPU present."""
    if capability(device.arch) < 80:
        raise ExportError(f"the board has no {device.name}: choose one of its GPUs, as in --device h100")
    layers = {part: layer_of(part) for part in PARTS}
    pairs = [
        (layer, cuda_source(layer.problem, device, (Pass.FPROP,), tensor_cores=tensor_cores_of(device)))
        for layer in layers.values()
    ]
    (first, direct), *others = pairs
    sources = source_text(first, direct)
    for layer, source in others:
        assert source.direct == direct.direct
        planned = source_text(layer, source).partition('"""\n\n')[2]
        sources += f"\n{source_name(layer)}_DIRECT = {source_name(first)}_DIRECT\n\n{planned}"
    rows = (
        f"    ({part.channels}, {size}): ({source_name(layer)}, {part.taps[0]}, {part.taps[1]}),"
        for part, layer in layers.items()
        for size in part.sizes
    )
    parts = {
        "BOARD": BOARD,
        "HOW": "\n".join(described(*pair) for pair in pairs),
        "WRITTEN": wrapped(f"Written by polyconv {__version__} for a {device.name}: polyconv export --board"),
        "SOURCES": sources,
        "PARTS": "\n".join(rows),
        "FIRST": source_name(first),
        "ARCH": default_arch(arch),
        "WORKSPACE": WORKSPACE,
        **dict.fromkeys(("NN", "BORDER", "REST", "FLAG", "NUMBER", "QUEUE"), ""),
    }
    parts["LIBRARY"] = filled(TEMPLATES / "library.txt", parts).rstrip("\n")
    return _in_default_order(filled(TEMPLATES / "submission.txt", parts))


def layer_of(part: Part) -> Layer:
    image, weight = (1, part.channels, part.image, part.image), (part.channels, part.channels, *part.taps)
    problem = Problem.make("fprop", image, weight, bias=False, tolerance=_TOLERANCE)
    return Layer(part.layer, "Conv2d", "", problem)


def _in_default_order(text: str) -> str:
    """Launches without a stream: the board refuses the word, because it times PyTorch's default one."""
    text = re.sub(r",\s+c\.stream(?=>>>|\})", "", text).replace("  cudaStream_t stream;\n", "")
    assert "stream" not in text.lower()
    return text
