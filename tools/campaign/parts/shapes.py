"""Sizes that never come again: what is kept of them is bounded, each costs little, and every result is right."""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import polyconv
from campaign.case import Case, Failure
from campaign.parts.soak import POOL, SLACK, measured
from polyconv.backends import backend_for
from polyconv.cpu import native

ABOUT = "sizes without end, in inference, training, under benchmark(): memory and tables bounded, little time for each"

SIZES = 120
"""New ones of a case."""
TABLE = 8192
"""Entries of any table of the package, at most: calls.CAPACITY is the largest."""
PER_SIZE = 100 * 2**10
"""Bytes that a size may cost while tables fill: plans of three passes with the words on every candidate, and calls."""
FILLED = 4096
"""Sizes after which tables are full, and memory stays."""
TIMES_TORCHS, BESIDE = 3.0, 6e-3
"""Processor seconds of a new size: so many times PyTorch's own, and so much to plan each pass once."""
SLOWER = 3.0
"""How much slower sizes may become: by as much as a busy machine may make them."""

KINDS = ("inference", "frozen", "training", "benchmark", "benchmark, training", "functional")

LAYERS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((3, 8, 3), {"padding": 1}),
    ((8, 8, 3), {"padding": 1, "stride": 2}),
    ((8, 16, 1), {}),
    ((16, 16, 5), {"padding": 2, "groups": 16}),
    ((16, 16, (3, 5)), {"padding": (1, 2)}),
)


def sizes(seed: int, index: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Shapes of inputs, no two alike in any of the cases but by chance."""
    random = Random(f"shapes {seed} {index}")
    for _ in range(SIZES):
        yield random.choice([1, 1, 2, 3]), channels, random.randint(8, 160), random.randint(8, 160)


def pair(seed: int, index: int) -> tuple[torch.nn.Conv2d, polyconv.Conv2d]:
    """A layer of torch's, and polyconv's with the same parameters."""
    arguments, moves = LAYERS[index % len(LAYERS)]
    torch.manual_seed(seed)
    torchs = torch.nn.Conv2d(*arguments, **moves)
    ours = polyconv.Conv2d(*arguments, **moves)
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


def call(kind: str, module: Any, x: torch.Tensor, times: int) -> list[torch.Tensor]:
    """The results of a size: the same again and again, as batches of it come."""
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
    """All sizes of a case: the processor's seconds of either, and by how much results differ."""
    torchs, ours = pair(seed, index)
    if kind == "frozen":
        polyconv.freeze(ours)
    random, spent, off = Random(f"times {seed} {index}"), {"torch": 0.0, "polyconv": 0.0}, 0.0
    with polyconv.benchmark("benchmark" in kind):
        for shape in sizes(seed, index, ours.in_channels):
            x = torch.randn(shape)
            # A race is over after some ten calls; most sizes do not come that often.
            times = random.choice([1, 2, 2, 30]) if "benchmark" in kind else 2
            results = {}
            for name, module in (("torch", torchs), ("polyconv", ours)):
                began = time.process_time()
                results[name] = call(kind, module, x, times)
                spent[name] += time.process_time() - began
            for one, other in zip(results["polyconv"], results["torch"], strict=True):
                off = max(off, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return {**spent, "off": off}


def tables() -> dict[str, int]:
    """Everything in the package that could grow, by name: how much it holds, more than a few."""
    found: dict[str, int] = {}
    places: list[tuple[str, Any]] = [
        (name, vars(module)) for name, module in list(sys.modules.items()) if name.startswith("polyconv")
    ]
    backend: Any = backend_for(torch.device("cpu"))
    places += [("backend", vars(backend)), ("backend.weights", vars(backend.weights))]
    for place, names in places:
        for name, value in list(names.items()):
            held = getattr(value, "entries", value)  # of a Stack
            if callable(getattr(value, "cache_info", None)):
                found[f"{place}.{name}"] = value.cache_info().currsize
            elif isinstance(held, dict | list | set | tuple | deque) and isinstance(held, Sized):
                found[f"{place}.{name}"] = len(held)
    return {name: count for name, count in found.items() if count > 256 and "__" not in name}


_first: dict[tuple[int, str], tuple[dict[str, int], dict[str, float]]] = {}
"""What this process held after the first case of a kind, and what the case took."""
_seen: dict[tuple[int, str], int] = {}


@dataclass(frozen=True)
class Shapes(Case):
    """New sizes of one layer, in one way."""

    seed: int
    index: int
    kind: str
    limit = 600.0

    def run(self) -> None:
        torch.set_num_threads(1)
        native.set_output_pool_limit(POOL)
        key = self.seed, self.kind
        spent = block(self.seed, self.index, self.kind)
        if spent["off"] > 1e-3:
            raise Failure(f"a result of a new size is another than PyTorch's, in {self.kind}\n{spent}")
        per_size = spent["polyconv"] / SIZES
        if per_size > TIMES_TORCHS * spent["torch"] / SIZES + BESIDE:
            raise Failure(
                f"a new size takes long, in {self.kind}\n{1e3 * per_size:.2f} ms of the processor, PyTorch's "
                f"{1e3 * spent['torch'] / SIZES:.2f} ms"
            )
        held = tables()
        for name, count in held.items():
            if count > TABLE:
                raise Failure(f"{name} grows without end, in {self.kind}\n{count} entries; {held}")
        now = measured()
        if key not in _first:
            _first[key] = now, spent
            _seen[key] = 0
            return
        _seen[key] += SIZES
        first, took = _first[key]
        grown, allowed = now["bytes"] - first["bytes"], SLACK + PER_SIZE * min(_seen[key], FILLED)
        if grown > allowed:
            raise Failure(
                f"memory grows with sizes, in {self.kind}\nby {grown:,} bytes, {allowed:,} are allowed; {held}"
            )
        for name in ("tensors", "descriptors", "threads"):
            if now[name] > first[name]:
                raise Failure(f"more {name} than at first, in {self.kind}\n{first}, then {now}")
        # By PyTorch's, whose sizes are as new: the machine may be slower now, and other layers are larger.
        slower = (spent["polyconv"] / spent["torch"]) / (took["polyconv"] / took["torch"])
        if slower > SLOWER:
            raise Failure(f"new sizes become slower, in {self.kind}\n{slower:.1f} times: {took}, then {spent}; {held}")

    def smaller(self) -> Iterator[Case]:
        if self.kind != "inference":
            yield replace(self, kind="inference")

    def script(self) -> str:
        quoted = "\n\n".join(inspect.getsource(function) for function in (sizes, pair, call, block, tables))
        return f"""from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sized
from random import Random
from typing import Any

import torch

import polyconv
from polyconv.backends import backend_for
from polyconv.cpu import native

SIZES = {SIZES}
LAYERS = {LAYERS}


{quoted}

torch.set_num_threads(1)
native.set_output_pool_limit({POOL})
for index in range({self.index % len(KINDS)}, {self.index} + 1, {len(KINDS)}):
    print(index, block({self.seed}, index, {self.kind!r}), tables(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def case(seed: int, index: int) -> Shapes:
    return Shapes(seed, index, KINDS[index % len(KINDS)])
