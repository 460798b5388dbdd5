"""Origin of a call: a side stream, a fresh thread, another GPU, a backward pass before any forward pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from .... import dispatch
from ....arguments import Geometry
from ..check import Result
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
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(on_the_gpu, subject).result()


def another_gpu(subject: GpuUnderTest) -> Result:
    """Run on the next GPU while this one is torch's current device."""
    return on_the_gpu(subject.beside((subject.index + 1) % subject.gpus))


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
