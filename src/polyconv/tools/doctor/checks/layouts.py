"""Memory layouts: misaligned addresses, channels last, views into larger tensors, expanded gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....cuda.planner.planner import plan_cuda
from ....problem import Problem
from ..check import Part, Result
from ..device_under_test import GpuUnderTest
from ..kernel_coverage import CASES
from ..verify import verify_plan
from .layer import Layer, on_the_gpu

OFF_BY = 4
"""Misalignment [bytes]: one float32 element."""


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    found: dict[str, Part] = {
        f"an address off by {OFF_BY} bytes, {name}, {kind}": partial(off_by_one, subject, case.problem(kind))
        for name, case in subject.some(list(CASES.items()), 1)
        for kind in case.passes
    }
    found["channels last"] = partial(on_the_gpu, subject, _channels_last)
    found["windows of larger tensors"] = partial(on_the_gpu, subject, _windows)
    found["the gradient of a sum"] = partial(on_the_gpu, subject, _gradient_of_a_sum)
    return found


def off_by_one(subject: GpuUnderTest, problem: Problem) -> Result:
    """Misaligned tensors: only kernels with scalar loads may run, none with loads of four elements."""
    plan = plan_cuda(replace(problem, vector_aligned=False), subject.description)
    return verify_plan(subject, plan, shift=OFF_BY)


def _channels_last(layer: Layer) -> Layer:
    x, w, dy = (t.to(memory_format=torch.channels_last) for t in (layer.x, layer.w, layer.dy))
    return replace(layer, x=x, w=w, dy=dy)


def _windows(layer: Layer) -> Layer:
    return replace(layer, x=_window(layer.x), w=_window(layer.w), dy=_window(layer.dy))


def _window(tensor: Tensor) -> Tensor:
    """Copy of a tensor as a view into a larger one filled with NaN."""
    around = torch.full([size + 3 for size in tensor.shape], torch.nan, device=tensor.device)
    window = around[tuple(slice(1, 1 + size) for size in tensor.shape)]
    window.copy_(tensor)
    return window


def _gradient_of_a_sum(layer: Layer) -> Layer:
    """Expanded ``dy``: all strides are zero."""
    return replace(layer, dy=torch.ones((), device=layer.dy.device).expand(layer.dy.shape))
