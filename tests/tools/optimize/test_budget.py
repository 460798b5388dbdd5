"""Division of the measuring time: by share of the model's time, the largest first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyconv.tools.optimize.budget import FOR_LAYERS, FOR_TIMING, LEAST_FOR_LAYERS, Budget
from polyconv.tools.optimize.recording import Call, Layer, Recording

SHARES = {"small": 0.01, "large": 0.9, "tiny": 0.0001, "middle": 0.0899}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def layers() -> dict[str, Layer]:
    return {
        name: Layer(name, nn.Conv2d(1, 1, 1), {0: Call(torch.zeros(1), False, count=1, seconds=7.0 * share)})
        for name, share in SHARES.items()
    }


def budget(found: dict[str, Layer], clock: Any, seconds: float = 0.1) -> Budget:
    return Budget(Recording(tuple(found.values()), (), None, seconds), 60.0, clock)  # type: ignore[arg-type]


def test_what_takes_most_comes_first_and_gets_most() -> None:
    found = layers()
    shared = budget(found, Clock())
    assert [layer.name for layer in shared.in_order] == ["large", "middle", "small", "tiny"]
    for name, share in SHARES.items():
        assert shared.for_call(found[name].calls[0]) == pytest.approx(60.0 * FOR_LAYERS * FOR_TIMING * share)


def test_when_the_time_is_over_nothing_more_is_measured() -> None:
    found, clock = layers(), Clock()
    shared = budget(found, clock)
    assert not any(map(shared.why_not, found.values()))
    clock.now = 60.0 * FOR_LAYERS + 1
    assert "the 60 seconds of measuring were spent on those that take more" in shared.why_not(found["small"])
    assert shared.for_model() == pytest.approx(60.0 - clock.now)
    clock.now = 100.0
    assert shared.for_model() == 0.0


@pytest.mark.parametrize(("seconds", "share"), [(0.1, FOR_LAYERS), (1.5, 0.4), (9.0, LEAST_FOR_LAYERS)])
def test_a_slow_model_leaves_less_for_its_layers(seconds: float, share: float) -> None:
    found = layers()
    shared = budget(found, Clock(), seconds)
    assert shared.for_call(found["large"].calls[0]) == pytest.approx(60.0 * share * FOR_TIMING * SHARES["large"])
