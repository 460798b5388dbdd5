"""Host cost of the exported W1: launches that do nothing, at full size.

    host_time.py FOLDER_OF_MODEL_PY LIMIT      fails if the forward takes more than LIMIT milliseconds

The limit applies to this process's processor time, all threads: wall time would include other processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fake_cuda import counts, unpack_fat_binaries


def best(call: Callable[[], object], calls: int) -> float:
    """Processor time of a call [ms]: the best of a few series."""
    call()
    found = []
    for _ in range(10):
        start = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - start) / calls)
    return min(found) * 1e3


def launches(call: Callable[[], object]) -> int:
    before = counts().launches
    call()
    return int(counts().launches - before)


def main(folder: str, limit: str) -> None:
    sys.path.insert(0, folder)
    import model

    unpack_fat_binaries()
    new: Any = model.ModelNew().cuda()
    x = torch.empty(8, 32, 512, 512, device="cuda", requires_grad=True)
    gradient = torch.empty(8, 64, 508, 496, device="cuda")

    def forward() -> object:
        with torch.no_grad():
            return new(x)

    def both() -> None:
        new(x).backward(gradient)
        x.grad = new.conv2d.weight.grad = None

    waits = counts().synchronisations
    forward_time, both_time = best(forward, 50), best(both, 20)
    print(f"  forward: {launches(forward)} launches, {forward_time:.3f} ms of the host's processors (at most {limit})")
    print(f"  forward and backward: {launches(both)} launches, {both_time:.3f} ms")
    print(f"  with Python's lock held: {counts().launches_with_gil} of {counts().launches} launches")
    assert counts().synchronisations == waits, "the file waits for the GPU"
    assert forward_time <= float(limit), "the forward takes too much of the host's time"
    assert counts().launches_with_gil == 0, "the file launches with Python's lock held: other threads stand still"


if __name__ == "__main__":
    main(*sys.argv[1:])
