"""Tensors of more than 2**31 elements, whose offsets do not fit into a signed 32-bit integer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .... import dispatch
from ....arguments import Geometry
from ..check import Part, Result, judged, not_here
from ..device_under_test import GpuUnderTest
from .layer import ALLOWED, deviation

CHANNELS, SIDE = 8, 16400
"""8 x 16400 x 16400 elements, slightly more than 2**31."""
SPARE = 2**30
"""Memory for everything else [bytes]."""
LAST = 24
"""Rows at the end from which the reference is computed."""


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    return {"input": lambda: large_input(subject), "output": lambda: large_output(subject)}


def _too_little(subject: GpuUnderTest) -> str:
    needed = 4 * (CHANNELS + 1) * SIDE**2 + SPARE
    free = subject.free_memory()
    return f"needs {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.0f} are free" if free < needed else ""


def large_input(subject: GpuUnderTest) -> Result:
    """Large input: compare the last rows of an output of one channel."""
    if too_little := _too_little(subject):
        return not_here(too_little)
    x = torch.randn(1, CHANNELS, SIDE, SIDE, device=subject.device)
    w = torch.randn(1, CHANNELS, 3, 3, device=subject.device)
    with torch.no_grad():
        y = dispatch.fprop(x, w, None, *Geometry(padding=(1, 1, 1, 1)))
        subject.wait()
        rows = x[:, :, -LAST:].cpu().double()
    exact = torch.nn.functional.conv2d(rows, w.cpu().double(), padding=1)[:, :, 1:]
    return _judged(y[:, :, 1 - LAST :], exact)


def large_output(subject: GpuUnderTest) -> Result:
    """Large output: compare the last rows of the input gradient of a one-channel ``dy``."""
    if too_little := _too_little(subject):
        return not_here(too_little)
    dy = torch.randn(1, 1, SIDE, SIDE, device=subject.device)
    w = torch.randn(1, CHANNELS, 3, 3, device=subject.device)
    like = torch.empty(1, device=subject.device).expand(1, CHANNELS, SIDE, SIDE)
    with torch.no_grad():
        dx = dispatch.input_gradient(dy, w, like, Geometry(padding=(1, 1, 1, 1)))
        subject.wait()
    rows = dy[:, :, -LAST:].cpu().double()
    exact = torch.nn.functional.conv_transpose2d(rows, w.cpu().double(), padding=1)[:, :, 1:]
    return _judged(dx[:, :, 1 - LAST :], exact)


def _judged(found: torch.Tensor, exact: torch.Tensor) -> Result:
    return judged(deviation(found, exact), ALLOWED)
