"""Text of the exported Python file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from ...activation import Activation
from ...cuda.planner.device import CudaDevice
from ...cuda.planner.winograd_fp16x3.nonfused import M16N8K16
from ...measure.workloads import TRANSPOSED
from ...problem import PaddingMode, Pass
from ...util.gpu_arch import capability
from ...version import __version__
from .device_code import WORKSPACE, CudaSource, cuda_source
from .host_code import NAMES
from .models import ExportError, Layer, Model
from .python_text import default_arch, filled, module_parts, source_name, with_class_name, wrapped

TEMPLATES = Path(__file__).resolve().parent / "templates"
_BACKWARD = """\
    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("this file has first derivatives, not those of derivatives: leave out create_graph=True")
"""
_NO_BACKWARD = """\
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this file was exported for the forward direction alone: export it without --forward-only")
"""
_BORDERS = f"BORDERS = {[str(mode) for mode in PaddingMode]}  # by their numbers in that text\n".replace("'", '"')


def exported_file(
    model: Model,
    device: CudaDevice,
    *,
    forward_only: bool = False,
    tensor_cores: bool | None = None,
    arch: str = "",
    class_name: str = "ModelNew",
) -> str:
    """Text of a self-contained Python file: a module and its kernels, importing only torch.

    With ``tensor_cores``, passes use them, at FP32 accuracy, where the plan does, and the direct kernels on GPUs that
    lack the instruction. The default is yes from compute capability 8.0 on, and no for a V100, whose instruction no
    other GPU has. ``arch`` is the default of ``TORCH_CUDA_ARCH_LIST``; if both are empty, the file compiles for the
    GPUs of the machine that imports it.
    """
    tensor_cores = tensor_cores_of(device) if tensor_cores is None else tensor_cores
    for layer in model.layers:
        if layer.problem.residual:
            raise ExportError(
                f"{layer.attribute} would add a residual ({layer.problem}): an exported file has convolutions with "
                "bias and activation; leave the sum, and an activation behind it, to the module around it"
            )
    borders = any("padding_mode" in parameter for parameter in model.signature) or any(
        layer.problem.padding_mode is not PaddingMode.ZEROS for layer in model.layers
    )
    kinds: tuple[Pass, ...] = () if forward_only else tuple(Pass)
    flagged = not forward_only and any(layer.problem.activation is not Activation.NONE for layer in model.layers)
    pairs = [
        (layer, cuda_source(layer.picture, device, kinds or (layer.problem.kind,), borders, tensor_cores))
        for layer in model.layers
    ]
    modules = [layer.module for layer in model.layers]
    parts = {
        **module_parts(model, sourced=True),
        "TITLE": wrapped(f"{model.title}, on CUDA kernels of its own."),
        "HOW": "\n".join(described(layer, source) for layer, source in pairs),
        "WRITTEN": wrapped(f"Written by polyconv {__version__} for a {device.name}: polyconv export {model.command}"),
        "SOURCES": "\n".join(
            [*(source_text(*pair, borders, flagged) for pair in pairs), *([_BORDERS] if borders else [])]
        ),
        "BORDER": "constexpr int kBorder = {13};\nconstexpr int kPadBottom = {10}, kPadRight = {12};\n"
        if borders
        else "",
        "MAP": _MAP,
        "ARCH": default_arch(arch),
        "WORKSPACE": WORKSPACE,
        "REST": ", _" if flagged else "",
        "FLAG": ", activates=False" if flagged else "",
        "NUMBER": ", activates" if flagged else "",
        "MODULES": "\n\n".join(_module(module, borders, forward_only, flagged) for module in dict.fromkeys(modules)),
        "NN": "from torch import nn\n",
        "QUEUE": ", torch.cuda.current_stream().cuda_stream",
        "BUILD": "\n".join(f"    _kernels({source_name(layer)}, {source_name(layer)}[2])" for layer in model.layers),
    }
    parts["LIBRARY"] = _filled("library", parts).rstrip("\n")
    return _mapped(with_class_name(TEMPLATES / "model.txt", parts, class_name))


def tensor_cores_of(device: CudaDevice) -> bool:
    """Whether a file for a device has tensor-core kernels unless told otherwise."""
    return capability(device.arch) >= M16N8K16.generations[0]


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """A template of ``templates/``."""
    return filled(TEMPLATES / f"{name}.txt", parts)


def _module(module: str, borders: bool, forward_only: bool, flagged: bool) -> str:
    """Class that replaces a torch convolution, with its autograd function, on the kernels of ``Layer.picture``.

    ``flagged``: in a call that is differentiated, PyTorch applies the activation of the layer, if it has one.
    """
    rank, transposed = int(module[-2]), "Transpose" in module
    signal, volume = rank == 1, rank == 3
    sides = ("front, back", "top, bottom", "left, right")[-rank:]
    parts = {
        "MODULE": module,
        "FUNCTION": _function(transposed, volume, forward_only, flagged),
        **(_FLAGGED if flagged else _UNFLAGGED),
        "BORDER_OF": ", BORDERS.index(self.padding_mode)" if borders else "",
        "SIDES": ", ".join(sides),
        "SIDES_IN_WORDS": "front, back, top, ..., right" if volume else ", ".join(sides),
        "REVERSED": ", ".join(reversed(sides)),
        "ONE": "1, " if signal else "",
        "ZEROS": "0, 0, " if signal else "",
        "UNBATCHED": str(rank + 1),
        "BATCHED": str(rank + 2),
        "X": "x.unsqueeze(2)" if signal else "x",
        "WEIGHT": "self.weight.unsqueeze(2)" if signal else "self.weight",
        "SIZE": "[1, *size]" if signal else "size",
        "SIGNAL": ".squeeze(2)" if signal else "",
        "BIAS": ":, None, None, None" if volume else ":, None, None",
        **(_TRANSPOSED_VOLUME if volume and transposed else _VOLUME if volume else _IMAGE),
    }
    return _filled("transposed" if transposed else "convolution", parts).rstrip("\n") + "\n"


_IMAGE = {"DEPTH": "", "STACKED": "", "FLAT": "", "FLAT_SIDES": "", "SLICES": ""}
"""Placeholders of the module templates that differ for volumes, here for signals and 2-D convolutions."""
_VOLUME = {
    "DEPTH": "        self.firsts = [tap * self.dilation[0] - self.sides[0] for tap in range(self.kernel_size[0])]\n",
    "STACKED": " * self.kernel_size[0]",
    "FLAT": "[1:]",
    "FLAT_SIDES": "[2:]",
    "SLICES": ", self.firsts, self.stride[0]",
}
_TRANSPOSED_VOLUME = {
    **_VOLUME,
    "DEPTH": "        self.phases = _phases(self.kernel_size[0], self.stride[0], self.dilation[0], self.padding[0])\n",
    "STACKED": " * len(self.phases[0][1])",
    "SLICES": ", self.phases",
}


_UNFLAGGED = {"ACTIVATES": "", "RESULT": "return ", "FLAG": "", "ACTIVATION": ""}
"""Placeholders of the module template, without an activation or gradients."""
_FLAGGED = {
    "ACTIVATES": """\
        activation = self.source[-1]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *self.parameters()))
        activates = activation is not None and not wanted
""",
    "RESULT": "y = ",
    "FLAG": ", activates",
    "ACTIVATION": """\
        if activation is None or activates:
            return y
        name, parameters, options = activation
        return getattr(torch.ops.aten, name)(y, *parameters, **options)
""",
}


def _function(transposed: bool, volume: bool, forward_only: bool, flagged: bool) -> str:
    """The autograd function of a module, after the helpers that it calls."""
    name = "transposed_" * transposed + ("volumes" if volume else "images")
    needed = ["slices", *([] if forward_only else ["slices_backward"])] if volume else []
    flag = {"FLAG": ", activates" if flagged else "", "NONE": ", None" if flagged else ""}
    backward = _NO_BACKWARD if forward_only else _BACKWARD + _filled(f"{name}_backward", flag)
    texts = [*(_filled(one, {}) for one in needed), _filled(name, {"BACKWARD": backward, **flag})]
    return "\n\n\n".join(text.strip("\n") for text in texts) + "\n"


def source_text(layer: Layer, source: CudaSource, borders: bool = False, flagged: bool = False) -> str:
    """Python text of a layer's sources: both CUDA texts, the geometry of the second, and the entry points' calls;
    if ``flagged``, then its activation as PyTorch calls it, too."""
    name, p = source_name(layer), layer.picture
    geometry = (p.in_channels, p.out_channels, p.groups, *p.kernel, *p.stride, *p.dilation, *p.padding)
    geometry += (list(PaddingMode).index(p.padding_mode),) if borders else ()
    calls = "".join(f'        "{function}": {_literal(call)},\n' for function, call in source.calls.items())
    activation = None if p.activation is Activation.NONE else p.activation.aten
    last = f"    {activation},\n".replace("'", '"') if flagged else ""
    return (
        f'{name}_DIRECT = r"""\n{source.direct}"""\n\n{name}_PLANNED = r"""\n{source.planned}"""\n\n'
        f"{name} = (\n    {name}_DIRECT,\n    {name}_PLANNED,\n    {(*geometry, p.bias)},\n"
        f"    {{\n{calls}    }},\n{last})\n"
    )


def _literal(text: str) -> str:
    """A call as a string literal, on a line of its own or in two parts if it is long, as ruff formats it."""
    name, _, arguments = text.partition("(")
    parts = [name, f"({arguments}"] if len(text) > 106 else [text]
    quoted = [f"'{part}'" if '"' in part else f'"{part}"' for part in parts]
    lines = "".join(f"            {part}\n" for part in quoted)
    return f"(\n{lines}        )" if len(text) > 100 else quoted[0]


def described(layer: Layer, source: CudaSource) -> str:
    transposed, what = layer.problem.kind is Pass.DGRAD, str(layer.problem).partition(" ")[2]
    lines = [f"{layer.attribute}: {'the transpose of ' * transposed}{what}"]
    if layer.problem.rank == 3:
        channels = layer.picture.out_channels if transposed else layer.picture.in_channels
        lines.append(f"  {'stacked slices':<16} make 2-D images of {channels} channels of each volume")
    for own, name in NAMES.items():
        kind = TRANSPOSED[own] if transposed else own
        if kind in source.launching:
            head = f"  {name.replace('_', ' '):<16} "
            for about in source.launching[kind].about.split("\n"):
                lines.append(textwrap.fill(about, 117, initial_indent=head, subsequent_indent=" " * 21))
                head = " " * 19
    return "\n".join(lines)


_MAP = "<map>"
_HEADS = (
    (r"(\w+)_DIRECT = ", r"CUDA source \1: direct kernels, for any geometry"),
    (r"// ---- (\S+) -+$", r"\1"),
    (r"def _compiled\(", "Python: compilation"),
    (r"class \w+\(torch\.autograd\.Function\)", "autograd"),
    (r"class (\w+)\(nn\.", r"module \1"),
)
"""Patterns of the lines at which a part of the file begins, and the names of the parts in the map."""


def _mapped(text: str) -> str:
    """Replace ``_MAP`` in the file's docstring by a list of its parts with their line numbers."""
    lines = text.split("\n")
    parts: list[tuple[int, str]] = []
    launches = False  # whether the functions that launch kernels are still to come
    for number, line in enumerate(lines, 1):
        launches = launches or line.endswith('_PLANNED = r"""')
        if launches and line.startswith("static "):
            parts.append((number, "launches of these kernels"))
            launches = False
        for pattern, name in _HEADS:
            if found := re.match(pattern, line):
                summary = re.split(r"[.:,;(]", lines[number].removeprefix("// "))[0] if line.startswith("//") else ""
                summary = textwrap.shorten(summary, 80, placeholder=" ...")
                parts.append((number, f"{found.expand(name):<28} {summary}".rstrip()))
    return text.replace(_MAP, "\n".join(f"  {number + len(parts) - 1:>5}  {name}" for number, name in parts))
