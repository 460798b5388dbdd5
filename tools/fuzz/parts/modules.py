"""Modules that change between calls: attributes and weights, set in every way. With threads: concurrency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from fuzz.case import Case
from fuzz.programs import Program
from fuzz.programs.mutations import CHANGES, KINDS, OPEN

ABOUT = "attributes and weights are set, shadowed, swapped, offloaded, loaded, frozen: the next call follows"

ATTRIBUTES = [name for name in OPEN if ", set_" in name]
WEIGHTS = [name for name in CHANGES if name not in ATTRIBUTES]

Changes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Mutation(Program):
    """Changes to a module, and how it is called between or during them."""

    kind: str
    seed: int
    changes: Changes
    training: bool = False
    trial: int = 0
    """Index of the candidate that runs; 0: the planner's choice."""
    callers: int = 0
    """Threads that call it during the changes; 0: it is called between them."""
    switch: float = 0.005

    head = "mutations"

    @property
    def in_worker(self) -> bool:
        """Not with threads: there the first calls of a process are concurrent."""
        return not self.callers

    def call(self) -> str:
        changes = "".join(f"    {change!r},\n" for change in self.changes)
        if self.callers:
            return f"meanwhile({self.kind!r}, {self.seed}, {self.callers}, {self.switch}, [\n{changes}])"
        return f"in_turn({self.kind!r}, {self.seed}, {self.training}, {self.trial}, [\n{changes}])"

    def smaller(self) -> Iterator[Case]:
        half = len(self.changes) // 2
        if half > 1:
            yield replace(self, changes=self.changes[half:])
            yield replace(self, changes=self.changes[:half])
        for place in range(len(self.changes)):
            fewer = self.changes[:place] + self.changes[place + 1 :]
            if fewer:
                yield replace(self, changes=fewer)
        for simpler in (
            replace(self, training=False),
            replace(self, trial=0),
            replace(self, callers=min(self.callers, 1)),
            replace(self, kind="small"),
        ):
            if simpler != self:
                yield simpler


def case(seed: int, index: int) -> Mutation:
    chance = Random(f"modules {seed} {index}")
    kind, own = chance.choice([*KINDS]), chance.randrange(2**31)
    # Attributes only, weights only, or both: faults of one would hide those of the other.
    names = chance.choice([ATTRIBUTES, WEIGHTS, WEIGHTS, [*CHANGES]])
    changes = _some(chance, names, chance.choice([1, 2, 4, 10]))
    trial = chance.choice([0, chance.randrange(1, 30), chance.randrange(1, 30)])
    return Mutation(kind, own, changes, chance.random() < 0.3, trial)


def meanwhile(chance: Random) -> Mutation:
    """Changes of one attribute each, with threads that call the module meanwhile."""
    kind, own = chance.choice([*KINDS]), chance.randrange(2**31)
    changes = _some(chance, [*OPEN], chance.choice([1, 4, 12]))
    return Mutation(kind, own, changes, callers=chance.choice([1, 2, 4]), switch=chance.choice([0.005, 1e-4, 1e-6]))


def _some(chance: Random, names: list[str], count: int) -> Changes:
    return tuple((chance.choice(names), chance.randrange(2**31)) for _ in range(count))
