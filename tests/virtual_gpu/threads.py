"""Threads that launch at the same time, each with its own addresses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from virtual_gpu.gpu import VirtualGpu


def assert_addresses_are_not_mixed(gpu: VirtualGpu, launch: Callable[[int], None], times: int) -> None:
    """``launch`` writes an address twice at the front of the parameters; eight threads call it this often each."""

    def work(base: int) -> None:
        for i in range(times):
            launch(base + i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, (k << 32 for k in range(1, 9))))
    pairs = [struct.unpack_from("<QQ", seen.params) for seen in gpu.launches]
    assert all(x == y for x, y in pairs)
    assert {x for x, _ in pairs} == {(k << 32) + i for k in range(1, 9) for i in range(times)}
