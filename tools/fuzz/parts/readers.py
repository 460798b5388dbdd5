"""Optimised models with code that reads between a convolution and its activation: it must read the same values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from fuzz.case import Case
from fuzz.programs import Program
from fuzz.programs.readers import ACTIVATIONS, READERS

ABOUT = "optimize: whatever reads the tensor before an activation, by hooks, copies, memory or threads, reads the same"

MODES = ("inference", "training")


@dataclass(frozen=True)
class Reading(Program):
    """Some readers, their surroundings, and the modes."""

    seed: int
    activation: str
    in_place: bool
    readers: tuple[str, ...]
    optimised: str
    then: tuple[str, ...]

    head = "readers"
    limit = 60.0

    @property
    def in_worker(self) -> bool:
        return True

    def call(self) -> str:
        given = self.seed, self.activation, self.in_place, [*self.readers], self.optimised, [*self.then]
        return f"read({', '.join(map(repr, given))})"

    def smaller(self) -> Iterator[Case]:
        for place in range(len(self.readers)):
            yield replace(self, readers=self.readers[:place] + self.readers[place + 1 :])
        for place in range(len(self.then)):
            yield replace(self, then=self.then[:place] + self.then[place + 1 :])
        if self.in_place:
            yield replace(self, in_place=False)
        if self.activation != "relu":
            yield replace(self, activation="relu")


def case(seed: int, index: int) -> Reading:
    """The first ones have one reader each, covering all; the others have several, or none."""
    chance = Random(f"readers {seed} {index}")
    shuffled = Random(f"readers {seed}").sample(READERS, len(READERS))
    own = chance.randrange(2**31)
    readers = [shuffled[index % len(READERS)]]
    if index >= 4 * len(READERS) or chance.random() < 0.2:
        readers = chance.sample(READERS, chance.choice([0, 2, 2, 3]))
    return Reading(
        own,
        chance.choice([*ACTIVATIONS]),
        chance.random() < 0.5,
        tuple(readers),
        chance.choice(MODES),
        tuple(chance.sample(MODES, 2)),
    )
