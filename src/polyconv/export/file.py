"""Writes the exported file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..measure.workloads import TRANSPOSED
from ..plan.device import CudaDevice
from ..plan.epilogue import has_epilogue
from ..problem import PaddingMode, Pass
from ..version import __version__
from .families import NAMES
from .models import ExportError, Layer, Model
from .source import WORKSPACE, CudaSource, cuda_source

_HERE = Path(__file__).resolve().parent
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
    tensor_cores: bool = False,
    arch: str = "",
    class_name: str = "ModelNew",
) -> str:
    """The text of a self-contained Python file: a module, its kernels, and nothing imported but torch.

    With ``tensor_cores`` passes are computed on them, at FP32 accuracy, where the plan for a GPU of compute capability
    7.0 is to; what runs on the others is in the file, too. ``arch`` is what ``TORCH_CUDA_ARCH_LIST`` is if the
    environment does not say; without it, the GPUs at hand.
    """
    for layer in model.layers:
        if has_epilogue(layer.problem):
            raise ExportError(
                f"{layer.attribute} would have an activation or a residual of its own ({layer.problem}): "
                "an exported file holds plain convolutions; leave both to the module around it"
            )
    if not class_name.isidentifier():
        raise ExportError(f"{class_name!r} is no name for a class")
    borders = any("padding_mode" in parameter for parameter in model.signature) or any(
        layer.problem.padding_mode is not PaddingMode.ZEROS for layer in model.layers
    )
    kinds: tuple[Pass, ...] = () if forward_only else tuple(Pass)
    pairs = [
        (layer, cuda_source(layer.problem, device, kinds or (layer.problem.kind,), borders, tensor_cores))
        for layer in model.layers
    ]
    modules = [layer.module for layer in model.layers]
    forward = "x"
    for layer in model.layers:
        forward = f"self.{layer.attribute}({forward})"
    parts = {
        "TITLE": _wrapped(f"{model.title}, on CUDA kernels of its own."),
        "HOW": "\n".join(_how(layer, source) for layer, source in pairs),
        "WRITTEN": _wrapped(f"Written by polyconv {__version__} for a {device.name}: polyconv export {model.command}"),
        "CLASS": class_name,
        "INPUTS": ", ".join(map(str, model.inputs)),
        "SOURCES": "\n".join([*(_source(*pair, borders) for pair in pairs), *([_BORDERS] if borders else [])]),
        "BORDER": "constexpr int kBorder = {13};\nconstexpr int kPadBottom = {10}, kPadRight = {12};\n"
        if borders
        else "",
        "ARCH": f'\nos.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{arch}")\n' if arch else "",
        "WORKSPACE": WORKSPACE,
        "MODULES": "\n\n".join(_module(module, borders, forward_only) for module in dict.fromkeys(modules)),
        "SIGNATURE": _signature(model),
        "LAYERS": "\n".join(_layer(layer) for layer in model.layers),
        "FORWARD": forward,
        "INIT": model.init_inputs,
        "BUILD": "\n".join(f"    _kernels({_name(layer)}, {_name(layer)}[2])" for layer in model.layers),
    }
    return _filled("model", parts)


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """The text of that name with its parts in their places."""
    text = (_HERE / f"{name}.txt").read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda found: parts[found.group(1)], text)


def _module(module: str, borders: bool, forward_only: bool) -> str:
    """One of torch's convolutions and its autograd function; to the kernels a signal is a picture of height 1."""
    rank, name = int(module[-2]), "transposed" if "Transpose" in module else "convolution"
    signal = rank == 1
    parts = {
        "MODULE": module,
        "BACKWARD": _NO_BACKWARD if forward_only else _filled(f"{name}_backward", {}),
        "BORDER_OF": ", BORDERS.index(self.padding_mode)" if borders else "",
        "SIDES": "left, right" if signal else "top, bottom, left, right",
        "REVERSED": "left, right" if signal else "left, right, top, bottom",
        "ONE": "1, " if signal else "",
        "ZEROS": "0, 0, " if signal else "",
        "UNBATCHED": str(rank + 1),
        "BATCHED": str(rank + 2),
        "FIRST": str(13 - 2 * rank),
        "SECOND": str(14 - 2 * rank),
        "X": "x.unsqueeze(2)" if signal else "x",
        "WEIGHT": "self.weight.unsqueeze(2)" if signal else "self.weight",
        "SIZE": "[1, *size]" if signal else "size",
        "SIGNAL": ".squeeze(2)" if signal else "",
    }
    return _filled(name, parts).rstrip("\n") + "\n"


def _name(layer: Layer) -> str:
    return layer.attribute.upper()


def _source(layer: Layer, source: CudaSource, borders: bool) -> str:
    """What is compiled for a layer: both texts, the geometry that the second is for, and what the functions do."""
    name, p = _name(layer), layer.problem
    geometry = (p.in_channels, p.out_channels, p.groups, *p.kernel, *p.stride, *p.dilation, *p.padding)
    geometry += (list(PaddingMode).index(p.padding_mode),) if borders else ()
    calls = "".join(f'        "{function}": {_literal(call)},\n' for function, call in source.calls.items())
    return (
        f'{name}_DIRECT = r"""\n{source.direct}"""\n\n{name}_PLANNED = r"""\n{source.planned}"""\n\n'
        f"{name} = (\n    {name}_DIRECT,\n    {name}_PLANNED,\n    {(*geometry, p.bias)},\n    {{\n{calls}    }},\n)\n"
    )


def _literal(text: str) -> str:
    """A call as a string, in two parts where it is long."""
    name, _, arguments = text.partition("(")
    parts = [name, f"({arguments}"] if len(text) > 100 else [text]
    quoted = [f"'{part}'" if '"' in part else f'"{part}"' for part in parts]
    return quoted[0] if len(quoted) == 1 else f"(\n            {quoted[0]}\n            {quoted[1]}\n        )"


def _how(layer: Layer, source: CudaSource) -> str:
    transposed, what = layer.problem.kind is Pass.DGRAD, str(layer.problem).partition(" ")[2]
    lines = [f"{layer.attribute}: {'the transpose of ' * transposed}{what}"]
    for own, name in NAMES.items():
        kind = TRANSPOSED[own] if transposed else own
        if kind in source.launching:
            head = f"  {name.replace('_', ' '):<16} "
            for about in source.launching[kind].about.split("\n"):
                lines.append(textwrap.fill(about, 117, initial_indent=head, subsequent_indent=" " * 21))
                head = " " * 19
    return "\n".join(lines)


def _signature(model: Model) -> str:
    head, tail = "    def _make(", "):"
    return _fitted(head, ("self", *model.signature), tail).removeprefix(head).removesuffix(tail)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 117, break_on_hyphens=False, break_long_words=False)


def _layer(layer: Layer) -> str:
    arguments = (_name(layer), *re.split(r", (?![^(]*\))", layer.arguments))
    return _fitted(f"        self.{layer.attribute} = {layer.module}(", arguments, ")")


def _fitted(opening: str, items: Iterable[str], closing: str) -> str:
    """As ruff would format it: all in one line, or the items in a line of their own, or in one each."""
    listed = list(items)
    joined = ", ".join(listed)
    indent = " " * (len(opening) - len(opening.lstrip()))
    if len(opening + joined + closing) <= 120:
        return opening + joined + closing
    if len(indent + joined) + 4 <= 120:
        return f"{opening}\n{indent}    {joined}\n{indent}{closing}"
    lines = "".join(f"{indent}    {item},\n" for item in listed)
    return f"{opening}\n{lines}{indent}{closing}"
