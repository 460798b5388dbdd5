"""Processes in which nothing was computed yet, without the seconds to import PyTorch.

Python's fork server has imported PyTorch and done nothing else; new processes are forks of it. PyTorch and its
libraries read the processor and the environment when they first compute, so each fork can have its own environment.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "pytest"])
"""Imports of any training: an optimiser's first step imports torch._dynamo."""


def run_fresh(function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, **variables: str) -> Any:
    """Result of a module-level function in a new process with these environment variables; its exception is raised."""
    with ProcessPoolExecutor(1, PROCESSES, initializer=_set, initargs=(variables,)) as pool:
        return pool.submit(function, *arguments).result(timeout)


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
