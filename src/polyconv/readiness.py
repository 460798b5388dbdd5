"""What a model will ask of a backend, and what the backend says when it has prepared all of it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .problem import Problem

Run = Callable[[MutableMapping[str, Tensor]], None]
"""A problem that is prepared: fills the outputs among the tensors of one call, by name."""


class Asked(NamedTuple):
    """What a backend will be asked for."""

    problem: Problem
    inference: bool
    """Whether no gradient is recorded."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What it took to prepare many problems. Times are in seconds."""

    problems: int
    planning: float
    kernels: int = 0
    """That their plans name, each counted once; none where they need not be compiled."""
    compiled: int = 0
    """Of these, how many were not in the cache."""
    compiling: float = 0.0
    cores: int = 0
    """That compiled, each another kernel."""
    longest: str = ""
    longest_compiling: float = 0.0
    """Of the kernel that took longest: with any number of cores it takes as long."""
    loading: float = 0.0
    cache: Path | None = None
    """Where the kernels are kept."""
