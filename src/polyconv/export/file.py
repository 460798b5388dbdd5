"""Writes the exported file."""

from __future__ import annotations

import re
import textwrap

from ..plan import gather
from ..plan.device import CudaDevice
from ..plan.direct import DepthwiseWay, DepthwiseWgradWay, GatherWay, WgradWay
from ..plan.tiles import GemmTile, PlaneTile
from ..plan.ways import Way
from ..version import __version__
from .bundle import bundle
from .choice import Ways, choose, kernels_of
from .kernels import cuda_source
from .models import Model

_DROPPED = (
    "polyconv.plan.plan.KernelSpec.source",  # the instances are in the CUDA source already
    "polyconv.plan.plan.Launch.__str__",
    # what the planner asks, before the file is written
    "polyconv.plan.toom.ToomAxis.text",
    "polyconv.plan.toom.ToomAxis.scheme",
    "polyconv.plan.toom.ToomAxis.__str__",
)


def exported_file(model: Model, device: CudaDevice) -> str:
    """The text of a self-contained Python file: ``ModelNew``, its kernels, and nothing imported but torch."""
    ways = choose((layer.problem for layer in model.layers), device)
    source = cuda_source(kernels_of(ways))
    replaced = {
        "polyconv.export.cuda_source": f'"""CUDA kernels."""\n\nCUDA_SOURCE = r"""\n{source}"""\n',
        "polyconv.export.chosen": _chosen(model, ways, device),
    }
    return bundle(_entry(model, device), package="polyconv", replaced=replaced, dropped=_DROPPED)


def _chosen(model: Model, ways: Ways, device: CudaDevice) -> str:
    used = {type(way).__name__ for each in ways.values() for way in each}
    lines = [
        '"""What runs, by pass, in order of preference: the first that does not refuse the tensors at hand is taken.',
        "",
        '"""',
        "from ..plan.gather import " + ", ".join(_loader_names()),
        "from ..plan.tiles import GemmTile, PlaneTile",
        "from ..problem import Pass",
        f"from ..plan.direct import {', '.join(sorted(used))}",
        "",
        f'EXPORTED = "{"; ".join(str(layer.problem).removeprefix("fprop ") for layer in model.layers)}"',
        f"# Chosen by polyconv's cost model for a {device.name}.",
        "WAYS = {",
    ]
    for kind, each in ways.items():
        if len(each) == 1:
            lines.append(f"    Pass.{kind.name}: [{_way(each[0])}],")
        else:
            lines += [f"    Pass.{kind.name}: [", *(f"        {_way(way)}," for way in each), "    ],"]
    return "\n".join([*lines, "}", ""])


def _way(way: Way) -> str:
    if isinstance(way, GatherWay):
        loader = next(name for name, loader in _loader_names().items() if loader is way.loader)
        return f"GatherWay({_tile(way.tile)}, {loader})"
    if isinstance(way, WgradWay):
        return f"WgradWay({_tile(way.tile)}, vector={way.vector}, bordered={way.bordered})"
    if isinstance(way, DepthwiseWay):
        return f"DepthwiseWay({_tile(way.tile)})"
    assert isinstance(way, DepthwiseWgradWay)
    return f"DepthwiseWgradWay({_tile(way.tile)}, taps={way.taps})"


def _loader_names() -> dict[str, gather.LoaderKind]:
    return {name: value for name, value in vars(gather).items() if isinstance(value, gather.LoaderKind)}


def _tile(tile: GemmTile | PlaneTile) -> str:
    if isinstance(tile, PlaneTile):
        return f"PlaneTile({tile.height}, {tile.width}, {tile.threads})"
    return f"GemmTile({tile.warps_m}, {tile.warps_n}, {tile.lanes_m}, {tile.thread_m}, {tile.thread_n})"


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
