"""Records the functions of polyconv that a call enters between caller and kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def entered(call: Callable[[], object]) -> list[str]:
    """Their names, one per entry."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("polyconv"):
            found.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
