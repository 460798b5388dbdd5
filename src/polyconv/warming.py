"""``warmup``: all that the first step of a model would stop for, made beforehand and all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from .backends import backend_for
from .console import progress
from .dry_run import dry_run
from .readiness import Asked, Ready
from .rehearsal import Loss, refuse_lazy


@dataclass(frozen=True, slots=True)
class Warmup:
    """What was made ready on each device, and what it took. Prints as text."""

    devices: dict[str, Ready]

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
    """Make everything that a model's convolutions need, before its first step: plans, and on a GPU kernels.

    Examples::

        polyconv.replace(model)
        print(polyconv.warmup(model, images))  # cuda:0: 68 problems planned in …; 28 kernels, 28 of them compiled in …
        polyconv.warmup(model, (32, 3, 224, 224))  # the shape is enough

    Without it each convolution is planned, and its kernels are compiled, when it first runs: a first step of a large
    model may stop dozens of times. Here all kernels of all passes are compiled side by side, one per core, and loaded.
    Then the step can also be captured in a CUDA graph at once. For other shapes, call it again; kernels that are there
    are found.

    The model is called on tensors without data, so nothing of it changes: parameters, buffers, gradients and random
    generators stay what they are, and no memory of the device is taken but for the kernels. What the model's own Python
    does when it is called, it does. On the CPU, whose kernels come compiled, the plans are made.

    Args:
        model: any module on a CPU or a CUDA device.
        inputs, kwargs: what it is called with; a tuple of integers in the place of an input is a shape.
        backward: make ready for the backward pass, too. By default that of a model in training mode.
        loss: from the output to the number whose gradient is computed; by default every output has a dense gradient.
        quiet: show no progress on standard error.

    Raises:
        ValueError: where no convolution of polyconv's runs, or the model cannot be called without data.
    """
    refuse_lazy(model, "warm it up")
    asked = _asked(model, inputs, kwargs, backward=model.training if backward is None else backward, loss=loss)
    with progress(quiet=quiet) as shown:
        return Warmup({str(device): backend_for(device).prepare_all(ones, shown) for device, ones in asked.items()})


_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def _asked(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, backward: bool, loss: Loss | None
) -> dict[torch.device, list[Asked]]:
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


def _in_words(ready: Ready) -> str:
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
