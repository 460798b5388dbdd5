"""Headline workloads next to PyTorch's convolution on the same device, under PyTorch's current flags."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from ....measure import workloads
from ....measure.accuracy import scale
from ....measure.batch_limits import cut_batch, with_batch
from ....measure.operands import NCHW, OURS, Call, Operands, ours, pytorch
from ....measure.timing import current, interleaved
from ....numerics.scale import largest
from ....problem import DEFAULT_TOLERANCE, Pass, Problem
from ....util import tf32
from ..check import Part, Result, failed, passed
from ..device_under_test import CPU, DeviceUnderTest

REPEATS = 3
ALLOWED = 2 * DEFAULT_TOLERANCE
"""Allowed deviation from PyTorch's result, relative to the scale of the output map. Twice, because both round."""
SPOT = 8
"""Compared channels of the last image; weight gradients are compared whole."""
IMAGES_ON_CPU = 1
"""Batch on the CPU, so that all workloads take about a minute."""


def parts(subject: DeviceUnderTest) -> Mapping[str, Part]:
    return {
        f"{workload.name}, {kind}": partial(compared, subject, workload, kind)
        for workload in workloads.find("headline")
        for kind in Pass
    }


def compared(subject: DeviceUnderTest, workload: workloads.Workload, kind: Pass) -> Result:
    """Time one pass next to PyTorch's, and compare a sample of the result with PyTorch's in float32."""
    whole, on_gpu = workload.input[0], subject.name != CPU
    batch = cut_batch(workload, whole if on_gpu else IMAGES_ON_CPU, subject.free_memory())
    problem = with_batch(workload, batch.images).problem(kind)
    operands = Operands.random(problem, device=subject.device)
    calls: dict[str, Call] = {OURS: ours(problem, operands), NCHW: pytorch(problem, operands)}
    if on_gpu:
        torch.backends.cudnn.benchmark = True  # for PyTorch's best time; this process does nothing else
    with torch.no_grad(), current(subject.device):
        with tf32.switched_off() if on_gpu else nullcontext():
            deviation = _deviation(problem, operands, calls)
        timings = interleaved(calls, REPEATS, subject.timer)
    mine, theirs = (timings[name].best * 1e3 for name in (OURS, NCHW))
    arithmetic = tf32.torchs_format(subject.device)
    figures = {
        "workload": workload.name,
        "pass": str(kind),
        "batch": batch.images,
        "whole_batch": whole,
        "ours_ms": mine,
        "torch_ms": theirs,
        "ratio": theirs / mine,
        "torch_computes_in": arithmetic,
        "deviation": deviation,
    }
    words = f"{theirs / mine:.2f} x PyTorch ({arithmetic}): {mine:.4g} ms, PyTorch {theirs:.4g} ms, {batch} images"
    if not deviation <= ALLOWED:
        words = f"deviates from PyTorch's result by {deviation:.1e}, allowed {ALLOWED:.0e}"
    result = (passed if deviation <= ALLOWED else failed)(words, **figures)
    return replace(result, row=f"{workload.name}, {kind}")


def _deviation(problem: Problem, operands: Operands, calls: dict[str, Call]) -> float:
    """Largest deviation on a sample of the result. Each full result is freed before the next is computed."""
    samples = []
    for call in (calls[OURS], calls[NCHW], lambda: scale(problem, operands)):
        result = call()
        sample = result if problem.kind is Pass.WGRAD else result[-1:, :SPOT]
        samples.append(sample.double().cpu())
        del result, sample
    found, expected, unit = samples
    return largest((found - expected).abs(), unit)
