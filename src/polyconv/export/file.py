"""Writes the exported file."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from ..plan import gather
from ..plan.device import CudaDevice
from ..plan.epilogue import has_epilogue
from ..version import __version__
from .bundle import bundle
from .choice import Choice, choose
from .kernels import cuda_source
from .models import ExportError, Model

_DROPPED = (
    "polyconv.plan.plan.KernelSpec.source",  # the instances are in the CUDA source already
    "polyconv.plan.plan.Launch.__str__",
    # what the planner asks, before the file is written
    "polyconv.plan.toom.ToomAxis.text",
    "polyconv.plan.toom.ToomAxis.scheme",
    "polyconv.plan.toom.ToomAxis.__str__",
)

_NO_EPILOGUE = '''\
"""What runs after the sums: nothing but a bias."""


def has_epilogue(problem):
    return False


def task_with_epilogue(problem, task, elements, fewer_blocks=0):
    return task


def with_epilogue(problem, launch):
    return launch
'''
"""In place of plan/epilogue.py: an exported file holds plain convolutions."""


def exported_file(model: Model, device: CudaDevice) -> str:
    """The text of a self-contained Python file: ``ModelNew``, its kernels, and nothing imported but torch."""
    for layer in model.layers:
        if has_epilogue(layer.problem):
            raise ExportError(
                f"{layer.attribute} would have an activation or a residual of its own ({layer.problem}): "
                "an exported file holds plain convolutions; leave both to the module around it"
            )
    choice = choose((layer.problem for layer in model.layers), device)
    source = cuda_source(choice.kernels)
    replaced = {
        "polyconv.plan.epilogue": _NO_EPILOGUE,
        "polyconv.export.cuda_source": f'"""CUDA kernels."""\n\nCUDA_SOURCE = r"""\n{source}"""\n',
        "polyconv.export.chosen": _chosen(model, choice, device),
    }
    return bundle(_entry(model, device), package="polyconv", replaced=replaced, dropped=_DROPPED)


def _chosen(model: Model, choice: Choice, device: CudaDevice) -> str:
    imports: dict[str, set[str]] = {"..problem": {"Pass"}}
    spelled = {kind: [_spelled(way, imports) for way in each] for kind, each in choice.ways.items()}
    lines = [
        '"""What runs, by pass, in order of preference: the first that does not refuse the tensors at hand is taken.',
        "",
        '"""',
        *(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())),
        "",
        f'EXPORTED = "{"; ".join(str(layer.problem).removeprefix("fprop ") for layer in model.layers)}"',
        f"# Chosen by polyconv's cost model for a {device.name}.",
        "WAYS = {",
    ]
    for kind, each in spelled.items():
        lines += [f"    Pass.{kind.name}: [", *(f"        {way}," for way in each), "    ],"]
    return "\n".join([*lines, "}", ""])


def _spelled(value: Any, imports: dict[str, set[str]], indent: int = 8, before: int = 0) -> str:
    """A way, or a part of one, as Python text; the names that it needs are added to ``imports``, by module.

    Formatted as ruff would: on one line, else what is inside on one line, else one line for each part.
    """
    if isinstance(value, gather.LoaderKind):  # has long texts in it: called by its name
        name = next(name for name, loader in vars(gather).items() if loader is value)
        imports.setdefault("..plan.gather", set()).add(name)
        return name
    if is_dataclass(value):
        kind = type(value)
        module = kind.__module__.replace("polyconv.export.", ".").replace("polyconv.", "..")
        imports.setdefault(module, set()).add(kind.__name__)
        parts = [(f.name, getattr(value, f.name)) for f in fields(value)]
        plain = all(type(part) is int for _, part in parts)
        inside = [
            ("" if plain else f"{name}=") + _spelled(part, imports, indent + 4, len(name) + 1) for name, part in parts
        ]
        line = f"{kind.__name__}({', '.join(inside)})"
        if indent + before + len(line) < 120 and "\n" not in line:
            return line
        space, together = " " * indent, ", ".join(inside)
        if indent + 4 + len(together) <= 120 and "\n" not in together:
            return f"{kind.__name__}(\n{space}    {together}\n{space})"
        return f"{kind.__name__}(\n" + "".join(f"{space}    {part},\n" for part in inside) + f"{space})"
    if isinstance(value, tuple):
        return f"({', '.join(_spelled(each, imports) for each in value)}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


_ENTRY = '''\
# ruff: noqa: E501, UP006, UP035
"""{title}

    model = ModelNew().cuda()
    y = model(torch.rand({inputs}, device="cuda"))

{written}

Needs PyTorch 2.0.1 or newer and its CUDA compiler (nvcc 11.8 or newer), a GPU of compute capability 7.0 or higher, and
nothing else. The kernels are compiled by the first ModelNew() of a process. Any batch, image size and strides will do;
{tuned}
"""

import torch
from torch import Tensor

from polyconv.export.cuda_source import CUDA_SOURCE
from polyconv.export.runtime import Conv2d


class _Model(torch.nn.Module):
    def __init__({signature}):
        super().__init__()
{layers}

    def forward(self, x: Tensor) -> Tensor:
        return {forward}


class ModelNew(_Model):
    """Takes the arguments of the module it replaces; without any, it is the one that this file was exported for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*(args if args or kwargs else get_init_inputs()), **kwargs)


def get_inputs():
    return [torch.rand({inputs})]


def get_init_inputs():
    return {init_inputs}
'''


def _entry(model: Model, device: CudaDevice) -> str:
    forward = "x"
    for layer in model.layers:
        forward = f"self.{layer.attribute}({forward})"
    signature = ", ".join(("self", *model.signature))
    if len(signature) > 120 - len("    def __init__():"):
        signature = "\n        " + ",\n        ".join(("self", *model.signature)) + ",\n    "
    tuned = "the kernels were chosen for the input above and a "
    return _ENTRY.format(
        title=_wrapped(f"{model.title}, on CUDA kernels of its own."),
        written=_wrapped(f"Written by polyconv {__version__}: polyconv export {model.command}"),
        tuned=f"{tuned}{device.name}.",
        inputs=", ".join(map(str, model.inputs)),
        signature=signature,
        layers="\n".join(_layer(layer.attribute, layer.arguments) for layer in model.layers),
        forward=forward,
        init_inputs=model.init_inputs,
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 117, break_on_hyphens=False, break_long_words=False)


def _layer(attribute: str, arguments: str) -> str:
    line = f"        self.{attribute} = Conv2d({arguments})"
    if len(line) <= 120:
        return line
    if len(arguments) > 120 - 12:
        arguments = re.sub(r", (?![^(]*\))", ",\n            ", arguments) + ","
    return f"        self.{attribute} = Conv2d(\n            {arguments}\n        )"
