"""Origin of a call: a side stream, a fresh thread, another GPU, a backward pass before any forward pass."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from .... import dispatch
from ....arguments import Geometry
from ..check import Check, Needs, Result, failed
from ..device_under_test import GpuUnderTest
from .layer import Layer, on_the_gpu

AHEAD = 40
"""Large matrix products queued on the side stream, so that a launch on another stream runs too early."""
PADDING = 1


def side_stream(subject: GpuUnderTest) -> Result:
    """The input is produced late on a busy side stream: a launch on any other stream reads NaN."""
    layer = Layer.make()
    placed = layer.on(subject.device)
    busy, late = torch.randn(4096, 4096, device=subject.device), torch.full_like(placed.x, torch.nan)
    stream = torch.cuda.Stream(subject.device)
    subject.wait()
    with torch.cuda.stream(stream):
        for _ in range(AHEAD):
            busy = torch.nn.functional.normalize(busy @ busy)
        late.copy_(placed.x)
        found = replace(placed, x=late).run()
    stream.synchronize()
    return layer.judge(found)


def fresh_thread(subject: GpuUnderTest) -> Result:
    answers: list[Result] = []

    def run() -> None:
        try:
            answers.append(on_the_gpu(subject, Layer.make()))
        except Exception as error:  # would be lost with the thread
            answers.append(failed(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


def another_gpu(subject: GpuUnderTest) -> Result:
    """Run on the next GPU while this one is torch's current device."""
    return on_the_gpu(subject.beside((subject.index + 1) % subject.gpus), Layer.make())


def backward_first(subject: GpuUnderTest) -> Result:
    layer = Layer.make(padding=PADDING)
    geometry = Geometry(padding=(PADDING,) * 4)
    placed = layer.on(subject.device)
    with subject.at_work(), torch.no_grad():
        dx = dispatch.input_gradient(placed.dy, placed.w, placed.x, geometry)
        dw, db = dispatch.weight_gradient(placed.dy, placed.x, placed.w, True, geometry)
        subject.wait()
    assert dw is not None
    assert db is not None
    exact = layer.exact()
    return layer.judge({"dx": dx, "dw": dw, "db": db}, {name: exact[name] for name in ("dx", "dw", "db")})


SIDE_STREAM = Check(
    "side stream",
    "launches go to torch's current stream",
    lambda subject: {"": lambda: side_stream(subject)},
    blocking=False,
)
FRESH_THREAD = Check(
    "fresh thread",
    "a thread that has used no GPU before can convolve",
    lambda subject: {"": lambda: fresh_thread(subject)},
    Needs.TENSORS,
)
BACKWARD_FIRST = Check(
    "backward first",
    "a gradient can be the first thing that a process computes",
    lambda subject: {"": lambda: backward_first(subject)},
    Needs.TENSORS,
)
ANOTHER_GPU = Check(
    "another GPU",
    "tensors on a GPU that is not the current one are computed there",
    lambda subject: {"": lambda: another_gpu(subject)},
    Needs.TENSORS,
    gpus=2,
)
