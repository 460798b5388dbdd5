"""A failing CUDA driver: every call that a convolution makes, with every kind of error, on the virtual V100."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import polyconv.cuda.backend  # noqa: F401 (forks of the worker find it imported)
from fuzz.case import Case
from fuzz.programs import Program

ABOUT = "each call to the CUDA driver fails: an error in words, and right results as soon as it works again"

FUNCTIONS = {
    "cuInit": 1,
    "cuDriverGetVersion": 2,
    "cuDeviceGet": 1,
    "cuDeviceGetName": 1,
    "cuDeviceGetAttribute": 9,
    "cuDevicePrimaryCtxRetain": 1,
    "cuCtxGetCurrent": 12,
    "cuCtxPushCurrent_v2": 12,
    "cuCtxPopCurrent_v2": 12,
    "cuLibraryLoadData": 8,
    "cuLibraryGetKernel": 8,
    "cuKernelSetAttribute": 3,
    "cuLaunchKernel": 8,
}
"""Driver calls of a first convolution and its gradients, with their approximate numbers."""

CODES = (1, 2, 3, 100, 101, 200, 201, 209, 400, 500, 700, 701, 719, 900, 999, 4321)
"""The last one is unknown to the bindings, as from a later driver."""

KINDS = ("small", "depthwise", "pointwise", "strided", "fast", "shared")


@dataclass(frozen=True)
class Fault(Program):
    """Failing calls of one function."""

    way: str
    arguments: tuple[object, ...]

    head = "faults"
    limit = 240.0
    patience = 200.0  # the first convolution of a kind compiles its kernels

    def call(self) -> str:
        return f"{self.way}({', '.join(map(repr, self.arguments))})"

    def smaller(self) -> Iterator[Case]:
        if self.way != "fail":
            return
        function, nth, count, code, kind, when, threads = self.arguments
        for simpler in (
            (function, nth, count, code, kind, when, 1),
            (function, nth, count, code, "pointwise", when, threads),
            (function, 1, count, code, kind, when, threads),
            (function, nth, 1, code, kind, when, threads),
            (function, nth, count, 999, kind, when, threads),
        ):
            if simpler != self.arguments:
                yield replace(self, arguments=simpler)


def case(seed: int, index: int) -> Fault:
    chance = Random(f"driver {seed} {index}")
    kind = chance.choice(KINDS)
    if chance.random() < 0.05:
        return Fault("without_memory", (chance.randint(1, 3), kind))
    function = chance.choice(list(FUNCTIONS))
    nth, count = chance.randint(1, FUNCTIONS[function]), chance.choice([1, 1, 2, 10**6])
    when, threads = chance.choice(["start", "backend", "warm"]), chance.choice([1, 1, 1, 3])
    return Fault("fail", (function, nth, count, chance.choice(CODES), kind, when, threads))
