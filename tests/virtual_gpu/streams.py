"""Streams of the virtual GPU, and their capture in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyconv.cuda import driver

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""Capture modes: forbidden calls fail in all threads, in this one, or in none."""


def new_stream() -> int:
    """A stream of the first GPU. The default stream cannot be captured."""
    with driver.device(0).activate():
        return int(driver.call("cuStreamCreate", 1))


@contextmanager
def captured(stream: int, mode: int = GLOBAL) -> Iterator[None]:
    """As ``torch.cuda.graph``. Raises if the block invalidated the capture."""
    driver.call("cuStreamBeginCapture", stream, driver.bindings().CUstreamCaptureMode(mode))
    try:
        yield
    finally:
        driver.call("cuStreamEndCapture", stream)
