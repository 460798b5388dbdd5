"""Warnings that a process gives once, however many calls, kernels and threads meet the reason."""

from __future__ import annotations

import warnings

MOST = 1024
"""Texts to remember: one may name a shape, of which a program may have any number. The older half is forgotten."""

_said: dict[str, object] = {}


def warn_once(message: str) -> None:
    """A warning per process and text."""
    if len(_said) >= MOST:
        for text in list(_said)[: MOST // 2]:
            _said.pop(text, None)
    mine = object()
    if _said.setdefault(message, mine) is mine:  # one step, so that of two threads only one says it
        warnings.warn(message, RuntimeWarning, stacklevel=2)
