"""Warnings given once per process and text, whatever the number of calls, kernels and threads."""

from __future__ import annotations

import warnings

MOST = 1024
"""Most texts remembered, as they may name any number of shapes. Beyond it the older half is forgotten."""

_said: dict[str, object] = {}


def warn_once(message: str) -> None:
    """Warn, unless the text was given before."""
    if len(_said) >= MOST:
        for text in list(_said)[: MOST // 2]:
            _said.pop(text, None)
    mine = object()
    if _said.setdefault(message, mine) is mine:  # atomic: only one of two threads warns
        warnings.warn(message, RuntimeWarning, stacklevel=2)
