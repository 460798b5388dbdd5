"""Threads, forks, interrupts, and concurrent changes of settings."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import polyconv  # noqa: F401 (forks of the worker find it imported)
from fuzz.case import Case
from fuzz.parts import modules
from fuzz.programs import Program
from fuzz.programs.actors import ACTORS, KINDS

ABOUT = "first convolutions, settings, forks, Ctrl-C, the interpreter's end, modules that change, at the same time"

SMALL = [kind for kind in KINDS if kind != "pooled"]
ALONE = ("writer", "set_tolerance", "threads", "low_precision")
"""At most one of these runs, because two would have no correct result."""
UNFIT = ("fork", "low_precision", "set_tolerance", "writer", "reader", "churn")
"""Traces that an interrupt may leave, or that it breaks in Python's own modules: a thread being started."""
SLOW = ("optimize", "explain", "fork", "pool", "tuning")


@dataclass(frozen=True)
class Play(Program):
    """Some actors, and how they run together."""

    way: str
    actors: tuple[tuple[str, str], ...]
    seed: int
    rounds: int = 0
    number: float = 0.0
    """Further parameters: seconds between switches, until the interrupt, until the end."""

    head = "actors"

    @property
    def from_scratch(self) -> bool:
        return self.way == "abandoned"

    def call(self) -> str:
        numbers = [self.seed, *([self.rounds] if self.rounds else []), self.number]
        return f"{self.way}({list(self.actors)!r}, {', '.join(map(repr, numbers))})"

    def ended_well(self, status: int | None, words: str) -> bool:
        """At exit Python unwinds threads that still compute, for which torch's code is not made: a loop with a torch
        function ends in these words as well."""
        if self.way == "abandoned" and status == -signal.SIGABRT:
            return words.startswith("terminate called without an active exception")
        return status == 0

    def smaller(self) -> Iterator[Case]:
        for place in range(len(self.actors)):
            fewer = self.actors[:place] + self.actors[place + 1 :]
            if fewer:
                yield replace(self, actors=fewer)
        if self.rounds > 1:
            yield replace(self, rounds=self.rounds // 2)


def case(seed: int, index: int) -> Program:
    chance = Random(f"concurrency {seed} {index}")
    if chance.random() < 0.35:
        return modules.meanwhile(chance)
    way = chance.choices(("together", "interrupted", "reentered", "abandoned"), (10, 5, 1, 1))[0]
    own = chance.randrange(2**31)
    if way == "together":
        actors = _some(chance, chance.randint(2, 5), list(ACTORS))
        switch = chance.choice([0.005, 1e-4, 1e-6])
        return Play(way, actors, own, chance.choice([1, 5, 25]), switch)
    if way == "interrupted":
        names = [name for name in ACTORS if name not in UNFIT]
        actors = _some(chance, chance.randint(1, 2), names)
        return Play(way, actors, own, chance.choice([5, 30]), chance.choice([1e-4, 2e-3, 0.03]))
    if way == "reentered":
        actors = _some(chance, chance.randint(1, 2), ["inference", "backward", "tolerance", "module", "workspace"])
        return Play(way, actors, own, 30, chance.choice([1e-4, 2e-3]))
    return Play(
        way, _some(chance, 2, ["inference", "backward", "module", "tolerance", "pool"]), own, 0, chance.random()
    )


def _some(chance: Random, count: int, names: list[str]) -> tuple[tuple[str, str], ...]:
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count:
        name = chance.choice(names)
        taken = [other for other, _ in chosen]
        if (name in ALONE and name in taken) or (name in SLOW and any(other in SLOW for other in taken)):
            continue
        chosen.append((name, chance.choice(SMALL)))
    return tuple(chosen)
