"""An exported file is built once, loads, and has clear errors; without a GPU or a fake one.

loads.py FOLDER_OF_MODEL_PY
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.cpp_extension


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    start, before = time.perf_counter(), sum(os.times()[:4])
    made: list[Any] = []

    def construct() -> None:
        from model import ModelNew

        made.append(ModelNew())

    # Several threads at once, one build.
    threads = [threading.Thread(target=construct) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3, "a constructor failed"
    seconds, spent = time.perf_counter() - start, sum(os.times()[:4]) - before
    print(f"  the first ModelNew() of a process: {seconds:.2f} s, {spent:.2f} s of the processors' time")
    assert {name: tuple(value.shape) for name, value in made[0].state_dict().items()} == {
        "conv2d.weight": (64, 32, 5, 9)
    }
    message = refusal(lambda: made[0](torch.zeros(1, 32, 64, 64)))
    assert "cpu" in message, message
    assert ".cuda()" in message, message
    print(f"  refused as it should be: {message.splitlines()[0]}")


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a CPU tensor was not refused")


main(*sys.argv[1:])
