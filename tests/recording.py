"""Recorders: a backend that records its problems and tensors, and a mode that records operators."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyconv.backend import Run
from polyconv.cpu.engines import aten
from polyconv.numerics.prediction import Way
from polyconv.problem import Pass, Problem
from polyconv.selection import Candidate
from polyconv.tuning_key import Environment

OUTPUTS = {Pass.FPROP: {"y"}, Pass.DGRAD: {"x"}, Pass.WGRAD: {"dw", "db"}}


class RecorderPlan(NamedTuple):
    """Plan of a :class:`Recorder`."""

    problem: Problem
    choice: str = "recorder"
    name: str = "recorder"
    candidates: tuple[Candidate, ...] = ()
    preference: str = ""
    predicted_error: float = 0.0
    ways: tuple[Way, ...] = ()
    keeps_weights: bool = False
    passthrough: bool = False

    def trials(self, most: int = 3) -> tuple[str, ...]:
        return (self.name,)

    def dispatch_overhead(self, ahead: object) -> float:
        return 0.0

    def with_parts(self, plan: object) -> RecorderPlan:
        return self

    def explain(self, *, verbose: bool = False) -> str:
        return f"{self.problem}\n  recorded"


@dataclass
class Recorder:
    """Runs ATen's convolution on poisoned outputs, and records every problem and its tensors."""

    name: str = "recorder"
    caches_weights: bool = False
    problems: list[Problem] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)

    def plan(self, problem: Problem, **_: Any) -> RecorderPlan:
        return RecorderPlan(problem)

    def prepare(self, plan: RecorderPlan, *, trial: bool = False) -> Run:
        return lambda tensors: self._run(plan.problem, tensors)

    def prepare_all(self, plans: Any, progress: Any) -> Any:
        raise NotImplementedError

    def environment(self) -> Environment:
        return Environment("cpu", self.name, "", "")

    def new_output(self, like: Tensor, shape: Any, strides: Any) -> Tensor:
        return like.new_empty_strided(shape, strides)

    def _run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        self.problems.append(problem)
        self.tensors.append(dict(tensors))
        for name in OUTPUTS[problem.kind] & tensors.keys():
            tensors[name].fill_(torch.nan)
        aten.run(problem, tensors)

    @property
    def kinds(self) -> list[str]:
        return [problem.kind.value for problem in self.problems]


class Calls(TorchDispatchMode):
    """Names of called operators, with newly allocated elements. Works for fake tensors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        results = out if isinstance(out, (tuple, list)) else (out,)
        for result, declared in zip(results, func._schema.returns, strict=False):
            if isinstance(result, Tensor) and declared.alias_info is None:
                self.allocated.append(result.untyped_storage().nbytes() // max(result.element_size(), 1))
        return out

    def assert_nothing_laid_out(self, elements: int) -> None:
        """No operator copied, and none allocated as many elements as a dense gradient."""
        copies = [name for name in self.names if any(word in name for word in ("clone", "contiguous", "copy"))]
        assert not copies
        assert elements not in self.allocated
