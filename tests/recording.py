"""Recorders: a backend that records its problems and tensors, and a mode that records operators."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyconv.backend import Run
from polyconv.cpu.engines import aten
from polyconv.problem import Pass, Problem

OUTPUTS = {Pass.FPROP: {"y"}, Pass.DGRAD: {"x"}, Pass.WGRAD: {"dw", "db"}}


@dataclass
class Recorder:
    """Runs ATen's convolution on poisoned outputs, and records every problem and its tensors."""

    name: str = "recorder"
    problems: list[Problem] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        return lambda tensors: self._run(problem, tensors)

    def is_passthrough(self, problem: Problem, *, inference: bool = False) -> bool:
        return False

    def _run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        self.problems.append(problem)
        self.tensors.append(dict(tensors))
        for name in OUTPUTS[problem.kind] & tensors.keys():
            tensors[name].fill_(torch.nan)
        aten.run(problem, tensors)

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        return f"{problem}\n  recorded"

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
