"""Sizes that never repeat: caches stay bounded, planning is cheap, and every result is correct."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import polyconv
from fuzz.case import Case, Failure
from fuzz.parts.soak import POOL, SLACK, measured
from polyconv.backend import backend_for
from polyconv.cpu import native

ABOUT = "sizes without end, in inference, training, under benchmark(): memory and tables bounded, little time for each"

SIZES = 60
"""New sizes per case."""
UNBOUNDED = 500
"""Allowed growth of a table without its own bound [entries]."""
PER_SIZE = 100 * 2**10
"""Allowed memory per size while tables fill [bytes]: plans of three passes, reasons for every candidate, calls."""
FILLED = 4096
"""Number of sizes after which tables are full, and memory is constant."""
TIMES_TORCHS, TIMES_TORCHS_AUTOTUNED, BESIDE = 1.5, 3.0, 3.5e-3
"""Limits of a new size's processor time: multiples of PyTorch's without and with autotuning, plus planning [s]."""
SLOWER = 3.0
"""Allowed slowdown of later sizes: as much as a busy machine may cause."""

SANITIZED = "GPU_EMULATOR_SANITIZE" in os.environ
"""True for sanitized native code (csrc/sanitize.py)."""

KINDS = ("inference", "frozen", "training", "benchmark", "benchmark, training", "functional")

LAYERS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((3, 8, 3), {"padding": 1}),
    ((8, 8, 3), {"padding": 1, "stride": 2}),
    ((8, 16, 1), {}),
    ((16, 16, 5), {"padding": 2, "groups": 16}),
    ((16, 16, (3, 5)), {"padding": (1, 2)}),
)


def sizes(seed: int, index: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Input shapes, distinct in all cases except by chance."""
    random = Random(f"shapes {seed} {index}")
    for _ in range(SIZES):
        yield random.choice([1, 1, 2, 3]), channels, random.randint(8, 160), random.randint(8, 160)


def pair(seed: int, index: int) -> tuple[torch.nn.Conv2d, polyconv.Conv2d]:
    """A torch layer, and polyconv's with the same parameters."""
    arguments, moves = LAYERS[index % len(LAYERS)]
    torch.manual_seed(seed)
    torchs = torch.nn.Conv2d(*arguments, **moves)
    ours = polyconv.Conv2d(*arguments, **moves)
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


def call(kind: str, module: Any, x: torch.Tensor, times: int) -> list[torch.Tensor]:
    """Results of a size, called repeatedly."""
    for _ in range(times):
        if "training" in kind:
            x = x.detach().requires_grad_()
            y = module(x)
            found = [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *module.parameters()])]
        else:
            with torch.no_grad():
                if kind == "functional" and isinstance(module, polyconv.Conv2d):
                    moves: Any = module.stride, module.padding, module.dilation, module.groups
                    found = [polyconv.conv2d(x, module.weight, module.bias, *moves)]
                else:
                    found = [module(x)]
    return found


def block(seed: int, index: int, kind: str) -> dict[str, float]:
    """All sizes of a case: processor seconds of both, and the differences of results."""
    torchs, ours = pair(seed, index)
    if kind == "frozen":
        polyconv.freeze(ours)
    random, spent, off = Random(f"times {seed} {index}"), {"torch": 0.0, "polyconv": 0.0}, 0.0
    with polyconv.benchmark("benchmark" in kind):
        for shape in sizes(seed, index, ours.in_channels):
            x = torch.randn(shape)
            # A session takes some ten calls; most sizes do not come that often.
            times = random.choice([1, 2, 2, 30]) if "benchmark" in kind else 2
            results = {}
            for name, module in (("torch", torchs), ("polyconv", ours)):
                began = time.process_time()
                results[name] = call(kind, module, x, times)
                spent[name] += time.process_time() - began
            for one, other in zip(results["polyconv"], results["torch"], strict=True):
                off = max(off, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return {**spent, "off": off}


def tables(bounded: bool) -> dict[str, int]:
    """Entries of the package's tables, by name: of bounded tables within their bound, or of the others."""
    found: dict[int, tuple[str, int, bool]] = {}
    backend: Any = backend_for(torch.device("cpu"))
    places: list[tuple[str, Any]] = [("backend", vars(backend)), ("backend.weights", vars(backend.weights))]
    places += [(name, vars(module)) for name, module in list(sys.modules.items()) if name.startswith("polyconv")]
    for place, names in places:
        for name, value in list(names.items()):
            held = getattr(value, "entries", value)  # of a Stack
            if hasattr(value, "cache_info"):
                count, bound = value.cache_info().currsize, value.cache_info().maxsize
            elif isinstance(held, dict | list | set | tuple) and value is not sys.modules and "__" not in name:
                count, bound = len(held), getattr(value, "capacity", names.get("CAPACITY"))
            else:
                continue
            keeps = bound is not None and count <= bound
            if keeps or id(value) not in found:  # a table may have names in modules that do not know its bound
                found[id(value)] = f"{place}.{name}", count, keeps
    return {name: count for name, count, keeps in found.values() if keeps == bounded}


_held: dict[str, dict[str, int]] = {}
"""Unbounded tables of this process before its first case, and all tables after it."""
_seen: list[int] = []
"""Sizes since then, by case."""
_took: dict[str, float] = {}
"""Time of the first case of a kind, as a multiple of PyTorch's."""


@dataclass(frozen=True)
class Shapes(Case):
    """New sizes of one layer, in one mode."""

    seed: int
    index: int
    kind: str
    limit = 600.0

    def run(self) -> None:
        torch.set_num_threads(1)
        native.operator("set_output_pool_limit")(POOL)
        _held.setdefault("unbounded", tables(bounded=False))
        spent = block(self.seed, self.index, self.kind)
        if spent["off"] > 1e-3:
            raise Failure(f"a result of a new size is another than PyTorch's, in {self.kind}\n{spent}")
        for name, count in tables(bounded=False).items():
            if count > _held["unbounded"].setdefault(name, count) + UNBOUNDED:
                raise Failure(f"{name} grows without a bound\n{count} entries, in {self.kind}")
        if SANITIZED:  # its time and memory are another process's
            return
        self._check_time(spent)
        now = measured()
        first = _held.setdefault("first", now)
        grown, allowed = now["bytes"] - first["bytes"], SLACK + PER_SIZE * min(sum(_seen), FILLED)
        _seen.append(SIZES)
        if grown > allowed:
            raise Failure(f"memory grows with sizes\nby {grown:,} bytes, {allowed:,} are allowed; {tables(True)}")
        for name in ("descriptors", "threads"):
            if now[name] > first[name]:
                raise Failure(f"more {name} than at first, in {self.kind}\n{first}, then {now}")

    def _check_time(self, spent: dict[str, float]) -> None:
        """Relative to PyTorch, whose sizes are equally new: the machine may be busy."""
        autotuned = "benchmark" in self.kind
        ours, torchs = spent["polyconv"] / SIZES, spent["torch"] / SIZES
        if ours > (TIMES_TORCHS_AUTOTUNED if autotuned else TIMES_TORCHS) * torchs + BESIDE:
            raise Failure(
                f"a new size takes long, in {self.kind}\n{1e3 * ours:.2f} ms of the processor, PyTorch's "
                f"{1e3 * torchs:.2f} ms"
            )
        key = f"{self.kind}, {self.index % len(LAYERS)}"
        if ours / torchs > SLOWER * _took.setdefault(key, ours / torchs):
            now = f"{ours / torchs:.1f} times PyTorch's, {_took[key]:.1f} at first"
            raise Failure(f"new sizes become slower, in {self.kind}\n{now}")

    def smaller(self) -> Iterator[Case]:
        if self.kind != "inference":
            yield replace(self, kind="inference")

    def script(self) -> str:
        quoted = "\n\n".join(inspect.getsource(function) for function in (sizes, pair, call, block, tables))
        return f"""from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

import polyconv
from polyconv.backend import backend_for
from polyconv.cpu import native

SIZES = {SIZES}
LAYERS = {LAYERS}


{quoted}

torch.set_num_threads(1)
native.operator("set_output_pool_limit")({POOL})
for index in range({self.index % len(KINDS)}, {self.index} + 1, {len(KINDS)}):
    print(index, block({self.seed}, index, {self.kind!r}), tables(False))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "KiB")
"""


def case(seed: int, index: int) -> Shapes:
    return Shapes(seed, index, KINDS[index % len(KINDS)])
