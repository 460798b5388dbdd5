"""The switch for tests that are too slow, or too dependent on the machine, to run on every change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from random import Random
from typing import TypeVar

import pytest

T = TypeVar("T")

NIGHTLY = os.environ.get("POLYCONV_NIGHTLY", "") not in ("", "0")
"""``POLYCONV_NIGHTLY=1``: run everything."""

nightly = pytest.mark.skipif(not NIGHTLY, reason="runs at night: POLYCONV_NIGHTLY=1")


def sampled(every: Iterable[T], count: int, seed: str) -> list[T]:
    """A fixed sample of similar cases, in order; nightly all of them."""
    found = list(every)
    if NIGHTLY or count >= len(found):
        return found
    return [found[place] for place in sorted(Random(seed).sample(range(len(found)), count))]
