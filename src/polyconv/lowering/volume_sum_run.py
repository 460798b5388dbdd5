"""Execution of :mod:`polyconv.lowering.volume_sum`: 2-D problems on views, summed in place."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from math import prod

from torch import Tensor

from ..backend import Run
from ..problem import RESULTS, Activation, Pass, Problem, Shape, Strides
from .epilogue import apply_epilogue, begun, summed_per_channel
from .volume_sum import Cut, Sheets, result_shape


def summed(cut: Cut, runs: Mapping[Problem, Run]) -> Run:
    """Run of a 3-D problem from the runs of its 2-D problems. Separate results share one buffer: each is added before
    the next is computed."""
    name, activation = RESULTS[cut.problem.kind], cut.problem.activation
    steps = [(sheets, runs[sheets.problem], _views(sheets)) for sheets in cut.sheets]
    room = max((prod(result_shape(sheets.problem)) for sheets in cut.sheets if sheets.apart), default=0)

    def run_all(tensors: MutableMapping[str, Tensor]) -> None:
        for gap in cut.gaps:
            _begin(cut, gap, name, tensors)
        apart = tensors[name].new_empty(room)
        for sheets, run, views in steps:
            shape, strides, begins = views[name]
            result = _seen(tensors[name], shape, sheets.result_strides, begins)
            given = {key: _seen(tensors[key], *view) for key, view in views.items() if key != name}
            given[name] = apart.as_strided(shape, strides) if sheets.apart else result
            if sheets.problem.bias:
                given["bias"] = tensors["bias"]
            if sheets.adds and not sheets.apart:
                given["residual"] = result
            run(given)
            if sheets.apart:
                result.add_(given[name])
            elif given[name] is not result:  # the backend returned a result buffer of its own
                result.copy_(given[name])
        if cut.activates_apart:
            apply_epilogue(tensors[name], None, activation)
        if "db" in tensors:
            tensors["db"].copy_(summed_per_channel(tensors["y"]))

    return run_all


_View = tuple[Shape, Strides, int]
"""Shape, strides, and offset in the tensor [elements]."""


def _views(sheets: Sheets) -> dict[str, _View]:
    """Views of the 3-D tensors that a 2-D problem uses, by name."""
    problem = sheets.problem
    w = (problem.w_shape, problem.w_strides, sheets.w)
    y = (problem.y_shape, problem.y_strides, sheets.y)
    views = {
        "x": (problem.x_shape, problem.x_strides, sheets.x),
        "dw" if problem.kind is Pass.WGRAD else "w": w,
        "y": y,
    }
    return views | ({"residual": y} if problem.residual and not sheets.adds else {})


def _seen(tensor: Tensor, shape: Shape, strides: Strides, begins: int) -> Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + begins)


def _begin(cut: Cut, gap: range, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill slices of the result with an empty sum: zeros, or in a forward pass bias, residual and activation."""
    result, residual = tensors[name], tensors.get("residual")
    dim = 2 + cut.axis
    added = None if residual is None else residual.narrow(dim, gap.start, len(gap))
    activation = Activation.NONE if cut.activates_apart else cut.problem.activation
    begun(result.narrow(dim, gap.start, len(gap)), tensors.get("bias"), added, activation)
