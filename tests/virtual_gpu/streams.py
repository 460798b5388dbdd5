"""Streams of the virtual GPU, and what captures them in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyconv.cuda import driver

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""What is forbidden meanwhile: to all threads, to this one, to nobody."""


def new_stream() -> int:
    """Of the first GPU. The default stream can never be captured."""
    with driver.device(0).activate():
        return int(driver.call("cuStreamCreate", 1))


@contextmanager
def captured(stream: int, mode: int = GLOBAL) -> Iterator[None]:
    """As ``torch.cuda.graph`` does it. Ends with an error if something in the block spoiled the capture."""
    driver.call("cuStreamBeginCapture", stream, driver.bindings().CUstreamCaptureMode(mode))
    try:
        yield
    finally:
        driver.call("cuStreamEndCapture", stream)
