"""Where a call comes from: another stream, another thread, another GPU, a backward pass that comes first of all."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from ... import ops
from ...arguments import Geometry
from ..examination import Answer, Examination, Needs, wrong
from ..subject import Subject
from .layer import Layer, on_the_gpu

AHEAD = 40
"""Products of large matrices that a stream has before it, so that what does not wait for it comes too early."""
PADDING = 1


def side_stream(subject: Subject) -> Answer:
    """What the layer reads is made on a stream that is busy: a launch on any other one reads NaN."""
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


def fresh_thread(subject: Subject) -> Answer:
    """The first call of a thread that has used no GPU before."""
    answers: list[Answer] = []

    def run() -> None:
        try:
            answers.append(on_the_gpu(subject, Layer.make()))
        except Exception as error:  # which would die with its thread
            answers.append(wrong(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


def another_gpu(subject: Subject) -> Answer:
    """The one after this, while this one is torch's current one."""
    return on_the_gpu(subject.beside((subject.index + 1) % subject.gpus), Layer.make())


def backward_first(subject: Subject) -> Answer:
    """The gradients of an input and a weight, in a process that has made no call before."""
    layer = Layer.make(padding=PADDING)
    geometry = Geometry(padding=(PADDING,) * 4)
    placed = layer.on(subject.device)
    with subject.at_work(), torch.no_grad():
        dx = ops.input_gradient(placed.dy, placed.w, placed.x, geometry)
        dw, db = ops.weight_gradient(placed.dy, placed.x, placed.w, True, geometry)
        subject.wait()
    assert dw is not None
    assert db is not None
    exact = layer.exact()
    return layer.judge({"dx": dx, "dw": dw, "db": db}, {name: exact[name] for name in ("dx", "dw", "db")})


SIDE_STREAM = Examination(
    "side stream",
    "launches go to torch's current stream",
    lambda subject: {"": lambda: side_stream(subject)},
    blocking=False,
    quick=True,
)
FRESH_THREAD = Examination(
    "fresh thread",
    "a thread that has used no GPU before can convolve",
    lambda subject: {"": lambda: fresh_thread(subject)},
    Needs.TENSORS,
)
BACKWARD_FIRST = Examination(
    "backward first",
    "a gradient can be the first thing that a process computes",
    lambda subject: {"": lambda: backward_first(subject)},
    Needs.TENSORS,
)
ANOTHER_GPU = Examination(
    "another GPU",
    "tensors on a GPU that is not the current one are computed there",
    lambda subject: {"": lambda: another_gpu(subject)},
    Needs.TENSORS,
    gpus=2,
)
