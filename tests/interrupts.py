"""A KeyboardInterrupt at each bytecode of a piece of code, in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from polyconv.runtime.fork_safety import STATE_LOCK


def interrupted_at_each_step(code: Callable[[], object], *modules: ModuleType) -> Iterator[int]:
    """Run ``code`` repeatedly, with a KeyboardInterrupt before the first, second, ... bytecode of the modules.

    Yields the number of the bytecode after each run; ends when ``code`` ran to completion.
    """
    files = {module.__file__ for module in modules}
    for step in range(100_000):
        if not _interrupt(code, files, step):
            assert step > 0, "nothing of these modules was run"
            return
        yield step


def _interrupt(code: Callable[[], object], files: set[str | None], step: int) -> bool:
    """True if there was such a bytecode."""
    left = step

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        code()
    except KeyboardInterrupt:
        while STATE_LOCK._is_owned():  # no signal arrives between the last step of a scope and the release of its lock
            STATE_LOCK.release()
        return True
    finally:
        sys.settrace(before)
    return False
