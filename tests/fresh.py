"""Processes in which nothing has been computed yet, without the seconds that each would take to import PyTorch.

A process of Python's fork server has imported PyTorch and done nothing else; a new process is a copy of it. PyTorch and
its libraries look at the processor and at their environment variables when they first compute, so that each copy may
have an environment of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "pytest"])
"""What training and its tests import in any case: an optimiser's first step asks for torch._dynamo."""


def run_fresh(function: Callable[..., Any], *arguments: Any, timeout: float = 300.0, **variables: str) -> Any:
    """What a module-level function returns in a new process with these environment variables; its error is raised."""
    with ProcessPoolExecutor(1, PROCESSES, initializer=_set, initargs=(variables,)) as pool:
        return pool.submit(function, *arguments).result(timeout)


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
