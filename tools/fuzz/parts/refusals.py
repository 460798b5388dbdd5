"""Arguments that are wrong, or nearly: polyconv raises what torch raises, and accepts what torch accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from fuzz.case import Case, Failure

ABOUT = "wrong and odd arguments: the same type of exception as torch's, or a result where torch has one"

GOOD: dict[str, Any] = {
    "x": (2, 4, 8, 9),
    "w": (6, 4, 3, 3),
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "x_dtype": "float32",
    "w_dtype": "float32",
    "requires_grad": False,
}

ODD: dict[str, tuple[Any, ...]] = {
    "x": (
        *((), (4,), (4, 8), (4, 8, 9), (1, 2, 4, 8, 9), (0, 4, 8, 9), (2, 0, 8, 9), (2, 4, 0, 9), (2, 4, 8, 0)),
        *((2, 3, 8, 9), (2, 8, 8, 9), (2, 4, 2, 2), (2, 4, 3, 3), (0, 4, 2, 2), None, "x", 3.0),
    ),
    "w": (
        *((), (6,), (6, 4, 3), (6, 4, 3, 3, 3), (0, 4, 3, 3), (6, 0, 3, 3), (6, 4, 0, 3), (6, 4, 3, 0)),
        *((6, 2, 3, 3), (5, 2, 3, 3), (6, 4, 1, 1), (6, 4, 9, 9), (1, 4, 3, 3), None, [1]),
    ),
    "bias": ((6,), (5,), (1,), (6, 1), (), (0,), 1.0, "b"),
    "stride": (
        *(0, -1, 2, 3.0, True, "2", None, (1,), (2, 3), (1, 2, 3), (), [2, 1], (0, 1), (1, -1), 2**31, 2**40),
        *((1.0, 1), (None, 1)),
    ),
    "padding": (
        *(1, -1, 2.0, True, "same", "valid", "full", "", None, (1,), (1, 2), (1, 2, 3), (), [1, 0], (-1, 0)),
        *(500, (0.5, 1)),
    ),
    "dilation": (0, -1, 2, 2.0, True, "2", None, (1,), (2, 3), (1, 2, 3), (), [1, 2], (0, 1), 100, 2**31, 2**40),
    "groups": (0, -1, 2, 3, 4, 7, 2.0, True, None, "1", (1,), 2**31, 2**40),
    "x_dtype": ("float64", "int64", "complex64", "bool", "float16"),
    "w_dtype": ("float64", "int32", "complex64", "float16"),
    "requires_grad": (True,),
}


def tensor(given: Any, dtype: str) -> Any:
    """A tensor of a shape, or the argument given in its place."""
    if not isinstance(given, tuple):
        return given
    return torch.ones(given).to(getattr(torch, dtype))


def outcome(function: Any, arguments: dict[str, Any]) -> Tensor | Exception:
    """Result of a convolution with the arguments."""
    x, w = tensor(arguments["x"], arguments["x_dtype"]), tensor(arguments["w"], arguments["w_dtype"])
    bias = tensor(arguments["bias"], arguments["w_dtype"])
    if arguments["requires_grad"] and isinstance(w, Tensor) and w.is_floating_point():
        w.requires_grad_()
    try:
        y: Tensor = function(
            x, w, bias, arguments["stride"], arguments["padding"], arguments["dilation"], arguments["groups"]
        )
    except Exception as error:
        return error
    return y.detach()


@dataclass(frozen=True)
class Refusal(Case):
    """Arguments that differ from good ones."""

    changed: tuple[tuple[str, Any], ...]

    @property
    def arguments(self) -> dict[str, Any]:
        return {**GOOD, **dict(self.changed)}

    def run(self) -> None:
        theirs, ours = outcome(F.conv2d, self.arguments), outcome(polyconv.conv2d, self.arguments)
        words = f"for {dict(self.changed)}\nours: {ours}\ntorch's: {theirs}"
        if isinstance(theirs, Exception) and isinstance(ours, Exception):
            # NotImplementedError, which torch raises for dtypes, is a RuntimeError.
            if not any(isinstance(ours, kind) or issubclass(kind, type(ours)) for kind in self._kinds()):
                raise Failure(
                    f"another type of exception: {type(ours).__name__}, torch's is {type(theirs).__name__}\n{words}"
                )
            if not str(ours).strip():
                raise Failure(f"an exception without words: {type(ours).__name__}\n{words}")
        elif isinstance(ours, Exception):
            if not self._may_refuse(ours):
                raise Failure(f"refuses what torch takes: {type(ours).__name__}\n{words}")
        elif isinstance(theirs, Exception):
            raise Failure(f"takes what torch refuses\n{words}")
        elif ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise Failure(f"another shape or dtype\n{words}")
        elif not torch.allclose(ours.double(), theirs.double(), rtol=1e-3, atol=1e-3):
            raise Failure(f"another result\n{words}")

    def _kinds(self) -> set[type]:
        """What torch raises for these, or for some of them: any of several wrong ones may be found first."""
        some = itertools.chain.from_iterable(
            itertools.combinations(self.changed, count) for count in range(1, len(self.changed) + 1)
        )
        found = [outcome(F.conv2d, {**GOOD, **dict(changed)}) for changed in some]
        return {type(error) for error in found if isinstance(error, Exception)}

    def _may_refuse(self, error: Exception) -> bool:
        """polyconv computes with real floating-point numbers only; an empty batch makes no wrong argument right."""
        arguments = self.arguments
        if {arguments["x_dtype"], arguments["w_dtype"]} & {"complex64", "int64", "int32", "bool"}:
            return isinstance(error, RuntimeError)
        x = arguments["x"]
        if isinstance(x, tuple) and len(x) == 4 and 0 in x[:2]:
            whole = outcome(F.conv2d, {**arguments, "x": (1, *x[1:])})
            return isinstance(whole, Exception) and isinstance(error, type(whole))
        return False

    def smaller(self) -> Iterator[Case]:
        for place in range(len(self.changed)):
            yield replace(self, changed=self.changed[:place] + self.changed[place + 1 :])

    def script(self) -> str:
        a = self.arguments
        grad = ".requires_grad_()" if a["requires_grad"] else ""

        def made(name: str, dtype: str) -> str:
            return f"torch.ones({a[name]}, dtype=torch.{dtype})" if isinstance(a[name], tuple) else repr(a[name])

        return f"""import torch

import polyconv

for conv2d in (torch.nn.functional.conv2d, polyconv.conv2d):
    x, w, bias = {made("x", a["x_dtype"])}, {made("w", a["w_dtype"])}{grad}, {made("bias", a["w_dtype"])}
    try:
        print(conv2d(x, w, bias, {a["stride"]!r}, {a["padding"]!r}, {a["dilation"]!r}, {a["groups"]!r}))
    except Exception as error:
        print(type(error).__name__, error)
"""


def case(seed: int, index: int) -> Refusal:
    random = Random(f"refusals {seed} {index}")
    names = random.sample([*ODD], random.choice([1, 1, 2, 2, 3]))
    return Refusal(tuple((name, random.choice(ODD[name])) for name in names))
