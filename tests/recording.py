"""A backend for tests that notes what it is given and lets another one do the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyconv.cpu.aten import AtenBackend
from polyconv.problem import Pass, Problem

OUTPUTS = {Pass.FPROP: {"y"}, Pass.DGRAD: {"x"}, Pass.WGRAD: {"dw", "db"}}


@dataclass
class Recorder:
    """Runs ATen's convolution, with the outputs poisoned first, and keeps every problem and its tensors."""

    name: str = "recorder"
    problems: list[Problem] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)

    def run(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        self.problems.append(problem)
        self.tensors.append(dict(tensors))
        for name in OUTPUTS[problem.kind] & tensors.keys():
            tensors[name].fill_(torch.nan)
        AtenBackend().run(problem, tensors)

    def explain(self, problem: Problem) -> str:
        return f"{problem}\n  recorded"

    @property
    def kinds(self) -> list[str]:
        return [problem.kind.value for problem in self.problems]
