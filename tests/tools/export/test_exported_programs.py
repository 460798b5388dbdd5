"""What ``tools/export_check`` judges a time by: another process at work must not decide the verdict."""

from __future__ import annotations

import time

from export_check.programs.host_time import best


def spin() -> None:
    """Take the processor for 4 ms of its time."""
    end = time.thread_time() + 4e-3
    while time.thread_time() < end:
        pass


def wait() -> None:
    """Let 20 ms pass, as a call does on a busy machine whose processor is taken from it."""
    time.sleep(0.02)


def spin_and_wait() -> None:
    spin()
    wait()


def test_waiting_is_not_counted() -> None:
    assert best(wait, 2) < 4
    assert 3.9 < best(spin_and_wait, 2) < 12
