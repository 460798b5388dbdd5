"""polyconv's kernels for every pass that has one, where the cost model would mostly choose ATen's: small test cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.engines import aten


def names_of(decision: preferences.Decision) -> tuple[str, ...]:
    return candidate_names(backend_for(torch.device("cpu")), decision.problem, inference=decision.inference)


@contextmanager
def enabled_without_aten(run: Callable[[], Any]) -> Iterator[list[preferences.Decision]]:
    """``enable``, with polyconv's kernels for every pass of ``run`` that has one; gives the decisions of the block."""
    with polyconv.enable():
        with preferences.watched() as seen:
            run()
        assert seen, "no pass came to polyconv"
        others = {one.key: [name for name in names_of(one) if not name.endswith(aten.NAME)] for one in seen}
        forced = {key: names[0] for key, names in others.items() if names}
        with preferences.Forced(forced), preferences.watched() as seen:
            yield seen
