"""ATen's own convolutions while :func:`polyconv.enable` overrides them, for polyconv's fallback and references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_call: Callable[..., Any] | None = None


def bypassing(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function whose convolutions in this thread are ATen's, override or not."""
    return function(*arguments) if _call is None else _call(function, *arguments)


def is_overridden() -> bool:
    return _call is not None


def bypass_with(call: Callable[..., Any] | None) -> None:
    """Set the function that bypasses the override; None if there is none to bypass."""
    global _call
    _call = call
