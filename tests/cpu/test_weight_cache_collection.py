"""Weight cache: entries that the garbage collector drops while the cache is being read."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from polyconv.cpu import native, weight_cache

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)


@pytest.fixture
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_thresholds")
def test_weights_in_reference_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in a cycle is freed by a collection, which any allocation of a container may start."""
    operators = {"hash": lambda w: 0, "transform_weights": lambda x, w, *_: w.clone()}
    monkeypatch.setattr(weight_cache, "_operator", operators.__getitem__)
    cache, x = weight_cache.TransformedWeights(), torch.zeros(1)
    for threshold in range(1, 60):
        gc.set_threshold(threshold, 1, 1)
        for _ in range(20):
            cycle: list[object] = [torch.zeros(1, 1, 1, 1)]
            cycle.append(cycle)
            assert cache.of(x, cycle[0], x, [], []) is not None  # type: ignore[arg-type]
    assert cache.size <= cache.limit
