"""Warnings that a process gives once, however many calls, kernels and threads meet the reason."""

from __future__ import annotations

import warnings

_said: dict[str, object] = {}


def warn_once(message: str) -> None:
    """A warning per process and text."""
    mine = object()
    if _said.setdefault(message, mine) is mine:  # one step, so that of two threads only one says it
        warnings.warn(message, RuntimeWarning, stacklevel=2)
