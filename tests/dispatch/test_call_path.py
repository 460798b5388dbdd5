"""The modules that ``conv2d``'s input passes: first in a new call, then in a cached one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tomllib
import torch
from torch import Tensor

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names, override
from polyconv.cpu import native
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

COLD, WARM = 8, 4
"""Most modules that the input passes."""

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
(_CONTRACT,) = tomllib.loads(_PROJECT.read_text())["tool"]["importlinter"]["contracts"]
LAYER = {name: place for place, names in enumerate(_CONTRACT["layers"]) for name in names.split(" | ")}
"""Layers by the first part of a module's name, the highest being 0."""


def holds(value: Any, x: Tensor) -> bool:
    """Whether a value is the tensor or a collection of tensors with it."""
    if isinstance(value, dict):
        return any(each is x for each in value.values())
    return value is x or (isinstance(value, (tuple, list)) and any(each is x for each in value))


def passed(call: Callable[[], object], x: Tensor) -> tuple[list[str], list[str]]:
    """Modules of polyconv that functions with ``x`` among their arguments belong to, and calls that climb a layer."""
    modules: dict[str, None] = {}
    climbs: list[str] = []
    path: list[tuple[FrameType, str]] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        while path and event == "return" and path[-1][0] is frame:
            path.pop()
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("polyconv."):
            return
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
        if not any(holds(frame.f_locals.get(each), x) for each in given):
            return
        modules[name] = None
        if path and LAYER[name.split(".")[1]] < LAYER[path[-1][1].split(".")[1]]:
            climbs.append(f"{path[-1][1]} calls {name}.{code.co_name}")
        path.append((frame, name))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(modules), climbs


def check(x: Tensor, w: Tensor) -> None:
    def call() -> Tensor:
        return polyconv.conv2d(x, w, padding=1)

    with torch.no_grad():
        cold, cold_climbs = passed(call, x)
        warm, warm_climbs = passed(call, x)
    assert cold[:2] == warm[:2] == ["polyconv.functional", "polyconv.dispatch.fastpath"]
    assert len(cold) <= COLD, cold
    assert len(warm) <= WARM, warm
    assert cold_climbs == warm_climbs == []


@pytest.mark.parametrize("engine", ["tile lanes", "channel lanes", "ATen"])
def test_on_the_cpu(engine: str) -> None:
    if engine != "ATen" and not native.is_available():
        pytest.skip("the native kernels are not built")
    x, w = torch.randn(1, 16, 21, 23), torch.randn(16, 16, 3, 3)
    with preferences.watched() as seen, torch.no_grad():
        polyconv.conv2d(x, w, padding=1)
    (decision,) = seen
    names = candidate_names(backend_for(x.device), decision.problem, inference=True)
    with preferences.Forced({decision.key: next(name for name in names if name.endswith(engine))}):
        check(x, w)


def test_on_a_gpu() -> None:
    run_in_virtual_gpu(_on_a_gpu)


def _on_a_gpu() -> None:
    with VirtualGpu(record_only) as gpu, override("cpu", gpu.backend()):
        check(torch.randn(1, 16, 21, 23), torch.randn(16, 16, 3, 3))
