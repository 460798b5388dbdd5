"""Timing in ``tools/export_check``: other busy processes must not decide the verdict."""

from __future__ import annotations

import time

from export_check.programs.host_time import best


def spin() -> None:
    """Use 4 ms of processor time."""
    end = time.thread_time() + 4e-3
    while time.thread_time() < end:
        pass


def wait() -> None:
    """Let 20 ms of wall time pass, as on a busy machine."""
    time.sleep(0.02)


def spin_and_wait() -> None:
    spin()
    wait()


def test_waiting_is_not_counted() -> None:
    assert best(wait, 2) < 4
    assert 3.9 < best(spin_and_wait, 2) < 12
