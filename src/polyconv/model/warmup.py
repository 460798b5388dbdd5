"""``warmup``: plan and compile in advance, in parallel, what the first step of a model needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..autotune import preferences
from ..backend import Backend, PrepareReport, PrepareRequest, backend_for
from ..util.console import Progress, progress
from .dry_run import dry_run
from .example_run import Loss, refuse_lazy


@dataclass(frozen=True, slots=True)
class Warmup:
    """Preparation per device, with counts and times. Prints as text."""

    devices: dict[str, PrepareReport]

    def __str__(self) -> str:
        return "\n".join(f"{device}: {_in_words(ready)}" for device, ready in self.devices.items())

    __repr__ = __str__


def warmup(
    model: nn.Module,
    *inputs: Any,
    backward: bool | None = None,
    loss: Loss | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Warmup:
    """Prepare everything that a model's convolutions need before its first step: plans, and on a GPU kernels.

    Examples::

        polyconv.replace(model)
        print(polyconv.warmup(model, images))  # cuda:0: 68 problems planned in …; 28 kernels, 28 of them compiled in …
        polyconv.warmup(model, (32, 3, 224, 224))  # the shape is enough

    Otherwise each convolution is planned, and its kernels are compiled, when it first runs: the first step of a large
    model may stop dozens of times. Here the kernels of all passes are compiled in parallel, one per core, and loaded,
    so the step can be captured in a CUDA graph at once. For other shapes, call it again; existing kernels are reused.

    The model is called on fake tensors: parameters, buffers, gradients and random generators do not change, and no
    device memory is used except for the kernels. Side effects of the model's Python code do happen. On the CPU, whose
    kernels are already compiled, only the plans are made.

    Args:
        model: any module on a CPU or a CUDA device.
        inputs, kwargs: arguments of the call; a tuple of integers in the place of an input is a shape.
        backward: prepare the backward pass, too. Default: if the model is in training mode.
        loss: maps the output to the number whose gradient is computed; by default every output has a dense gradient.
        quiet: show no progress on standard error.

    Raises:
        ValueError: if no convolution of polyconv's runs, or the model cannot be called without data.
    """
    refuse_lazy(model, "warm it up")
    asked = _asked(model, inputs, kwargs, backward=model.training if backward is None else backward, loss=loss)
    with progress(quiet=quiet) as shown:
        return Warmup({str(device): _prepared(backend_for(device), ones, shown) for device, ones in asked.items()})


def _prepared(backend: Backend[Any], asked: Sequence[PrepareRequest], shown: Progress) -> PrepareReport:
    began = time.perf_counter()
    plans = [preferences.plan(backend, problem, inference=inference) for problem, inference in asked]
    planned = time.perf_counter() - began
    report = backend.prepare_all(plans, shown)
    return replace(report, problems=len({problem for problem, _ in asked}), planning=report.planning + planned)


_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def _asked(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, backward: bool, loss: Loss | None
) -> dict[torch.device, list[PrepareRequest]]:
    try:
        asked = dry_run(model, inputs, kwargs, backward=backward, loss=loss)
    except _NEEDS_DATA as error:
        raise ValueError(
            f"what this model computes depends on the values of its tensors, and warmup has none ({error}). Run one "
            "step of it instead: that makes ready what it needs, one convolution after another"
        ) from error
    if not asked:
        raise ValueError(
            "no convolution of polyconv's runs in this model, so there is nothing to make ready: call "
            "polyconv.replace(model) first, and see polyconv.explain(model, x)"
        )
    return asked


def _in_words(ready: PrepareReport) -> str:
    text = f"{ready.problems} problems planned in {ready.planning:.1f} s"
    if not ready.kernels:
        return f"{text}; its kernels come compiled"
    text += f"; {ready.kernels} kernels, "
    if ready.compiled:
        text += (
            f"{ready.compiled} of them compiled in {ready.compiling:.1f} s on {ready.cores} core"
            f"{'' if ready.cores == 1 else 's'} (the longest: {ready.longest}, {ready.longest_compiling:.1f} s)"
        )
    else:
        text += "all found"
    return f"{text}, loaded in {ready.loading:.1f} s; the cache is {ready.cache or 'nowhere'}"
