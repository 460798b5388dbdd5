"""CUDA graphs: capture with and without a warm-up call, and replay on other data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from ....cuda import CudaError
from ....functional import conv2d
from ..check import Part, Result, failed, not_here, passed
from ..device_under_test import GpuUnderTest
from .layer import Layer


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    return {
        "without a run before": lambda: without_a_run_before(subject),
        "after a run": lambda: after_a_run(subject),
        "reduce-overhead": lambda: reduce_overhead(subject),
    }


def after_a_run(subject: GpuUnderTest) -> Result:
    layer = Layer.make()
    placed = layer.on(subject.device)
    with torch.cuda.stream(torch.cuda.Stream(subject.device)), torch.no_grad():
        conv2d(placed.x, placed.w, placed.bias, **layer.arguments)
        subject.wait()
        return _captured(subject, placed)


def without_a_run_before(subject: GpuUnderTest) -> Result:
    """Capture must work or raise an error with advice. First part, so that the process is fresh."""
    layer = Layer.make()
    placed = layer.on(subject.device)
    subject.wait()
    try:
        with torch.no_grad():
            return _captured(subject, placed)
    except CudaError as error:
        if "before" in str(error):
            return passed(f"refused, and the error says what to do: {error}")
        return failed(f"refused without a word of what to do: {error}")


def _captured(subject: GpuUnderTest, placed: Layer) -> Result:
    """Capture a call, then replay it on other data in the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(placed.x, placed.w, placed.bias, **placed.arguments)
    answers = []
    for factor in (1.0, -2.0):
        placed.x.mul_(factor)
        graph.replay()
        subject.wait()
        answers.append(placed.judge({"y": y}, {"y": placed.exact()["y"]}))
    return max(answers, key=lambda answer: answer.figures["error"])


def reduce_overhead(subject: GpuUnderTest) -> Result:
    if find_spec("triton") is None:
        return not_here("torch.compile needs triton")
    layer = Layer.make()
    placed = layer.on(subject.device)
    compiled = torch.compile(
        lambda x: torch.relu(conv2d(x, placed.w, placed.bias, **layer.arguments)), mode="reduce-overhead"
    )
    with torch.no_grad():
        for _ in range(4):  # recorded in the second call, replayed from the third on
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(placed.x).clone()
        subject.wait()
    exact = torch.relu(layer.exact()["y"])
    return layer.judge({"y": y}, {"y": exact})
