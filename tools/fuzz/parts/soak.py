"""A soak test: thousands of calls with changing shapes and weights in one process, whose memory must stay constant."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import polyconv
from fuzz.case import Case, Failure
from polyconv.backend import backend_for
from polyconv.cpu import native, planner
from polyconv.dispatch import prepare

ABOUT = "calls by the thousand, shapes and weights changing: memory flat, caches bounded, no descriptor or thread left"

CALLS = 1000
"""Calls per case; a hundred cases make a hundred thousand."""
SHAPES = 400
"""Distinct layers: no more than the caches hold, so that these fill and then stay."""
WARM = 1
"""Cases of a worker before its first measurement: allocators, thread pools and kernels settle."""
POOL = 64 * 2**20
"""Bytes of freed outputs that the pool may keep here."""
SLACK = 32 * 2**20
"""Allowed growth besides the caches [bytes]: fragmentation, and torch's own caches."""
QUARANTINE = 256 * 2**20 if "GPU_EMULATOR_SANITIZE" in os.environ else 0
"""Freed memory [bytes] that AddressSanitizer keeps (``csrc/sanitize.py``)."""
ENTRY = 40 * 2**10
"""Largest cache entry [bytes]: a plan with reasons for every rejected candidate."""

KINDS = (
    "inference",
    "training",
    "with an epilogue",
    "new module",
    "replaced weights",
    "rewritten weights",
    "large",
    "replaced model",
)


def layers(seed: int) -> list[dict[str, Any]]:
    """The layers of a soak."""
    random, found = Random(f"soak {seed}"), []
    for _ in range(SHAPES):
        kernel = random.choice([1, 3, 3, 5, (3, 5), (1, 7)])
        found.append(
            {
                "in_channels": random.choice([2, 4, 8, 16]),
                "out_channels": random.choice([2, 4, 8, 24]),
                "kernel_size": kernel,
                "stride": random.choice([1, 1, 2]),
                "padding": random.choice([0, 1, 2]),
                "dilation": random.choice([1, 1, 2]),
                "groups": random.choice([1, 1, 2]),
                "bias": random.choice([True, False]),
                "padding_mode": random.choice(["zeros", "zeros", "reflect"]),
                "size": (random.randint(1, 2), random.randint(9, 28), random.randint(13, 28)),
            }
        )
    return found


def call(kind: str, options: dict[str, Any], kept: dict[int, polyconv.Conv2d], number: int) -> None:
    """One call; ``kept`` holds the surviving modules."""
    options = dict(options)
    batch, height, width = options.pop("size")
    x = torch.randn(batch, options["in_channels"], height, width)
    conv = kept.get(number)
    if conv is None or kind == "new module":
        conv = kept[number] = polyconv.Conv2d(**options)
        if len(kept) > 64:
            del kept[next(iter(kept))]
    if kind == "training":
        y = conv(x.requires_grad_())
        y.square().sum().backward()
        with torch.no_grad():
            for parameter in conv.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad)
                parameter.grad = None
        return
    with torch.no_grad():
        conv(x)
        if kind == "replaced weights":
            conv.weight = torch.nn.Parameter(torch.randn_like(conv.weight))
            conv(x)
        elif kind == "rewritten weights":
            conv.weight.data.neg_()
            conv(x)
        elif kind == "with an epilogue":
            y = polyconv.conv2d(x, conv.weight, conv.bias, padding=1, groups=conv.groups, activation="relu")
            polyconv.conv2d(x, conv.weight, None, padding=1, groups=conv.groups, residual=y, activation="silu")
        elif kind == "large":
            polyconv.conv2d(torch.randn(1, 3, 258, 258), torch.randn(64, 3, 3, 3))
        elif kind == "whole model":
            model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 3))
            images = torch.randn(1, 4, 16, 16)
            polyconv.replace(model)
            model(images)
            polyconv.restore(model)
            model(images)


def block(seed: int, index: int, kinds: tuple[str, ...]) -> None:
    """A thousand calls. No module outlives them."""
    random, table = Random(f"soak {seed} {index}"), layers(seed)
    kept: dict[int, polyconv.Conv2d] = {}
    torch.manual_seed(index)
    for _ in range(CALLS):
        number = random.randrange(len(table))
        kind = random.choice(kinds)
        call("inference" if kind == "large" and random.random() < 0.97 else kind, table[number], kept, number)


def entries() -> int:
    """Number of entries in all caches."""
    backend: Any = backend_for(torch.device("cpu"))
    cached: list[Any] = [planner._plan]
    for function in cached:
        found = function.cache_info()
        if found.currsize > found.maxsize:
            raise AssertionError(f"a cache holds {found.currsize} entries, more than its {found.maxsize}")
    if len(prepare.known) > prepare.CAPACITY:
        raise AssertionError(f"{len(prepare.known)} calls are remembered, more than {prepare.CAPACITY}")
    if backend.weights.size > backend.weights.limit:
        raise AssertionError(f"{backend.weights.size} bytes of weights are kept, more than {backend.weights.limit}")
    total: int = sum(function.cache_info().currsize for function in cached) + len(prepare.known)
    return total


def measured() -> dict[str, int]:
    """Memory of the process after trimming everything."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "bytes": int(status["VmRSS"].split()[0]) * 1024,
        "entries": entries(),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


_first: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}
"""Memory of this process after the first cases."""


@dataclass(frozen=True)
class Soak(Case):
    """A thousand calls, and the memory after them."""

    seed: int
    index: int
    kinds: tuple[str, ...] = KINDS
    limit = 1800.0

    def run(self) -> None:
        torch.set_num_threads(1)  # threads that wait for one another spin, which would take most of the time
        native.operator("set_output_pool_limit")(POOL)
        sequence = (self.seed, self.kinds)
        if sequence not in _first:
            for earlier in range(WARM):
                block(self.seed, self.index - 1 - earlier, self.kinds)
            _first[sequence] = measured()
        block(self.seed, self.index, self.kinds)
        first, now = _first[sequence], measured()
        grown = now["bytes"] - first["bytes"]
        allowed = SLACK + QUARANTINE + ENTRY * max(0, now["entries"] - first["entries"])
        if grown > allowed:
            raise Failure(f"memory grows\nby {grown:,} bytes where {allowed:,} are allowed: {first}, then {now}")
        for name in ("tensors", "descriptors", "threads"):
            if now[name] > first[name]:
                raise Failure(f"more {name} than at first\n{first}, then {now}")

    def smaller(self) -> Iterator[Case]:
        for kind in self.kinds:
            others = tuple(other for other in self.kinds if other != kind)
            if others:
                yield replace(self, kinds=others)

    def script(self) -> str:
        quoted = "\n\n".join(inspect.getsource(function) for function in (layers, call, block, entries, measured))
        return f"""from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from random import Random
from typing import Any

import torch

import polyconv
from polyconv.backend import backend_for
from polyconv.cpu import native, planner
from polyconv.dispatch import prepare

CALLS, SHAPES = {CALLS}, {SHAPES}


{quoted}

torch.set_num_threads(1)
native.operator("set_output_pool_limit")({POOL})
for index in range({max(0, self.index - 40)}, {self.index} + 1):
    block({self.seed}, index, {self.kinds})
    print(index, measured())
"""


def case(seed: int, index: int) -> Soak:
    return Soak(seed, index)
