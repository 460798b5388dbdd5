"""Every file that polyconv reads: damaged, written by a process that is killed, on a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import polyconv  # noqa: F401 (forks of the worker find it imported)
from fuzz.case import Case
from fuzz.programs import Program

ABOUT = "tuning files, cached kernels and bundles: damaged, half written, without room, read-only, of other versions"

TARGETS = ("tuning", "cache", "bundle")


@dataclass(frozen=True)
class Damage(Program):
    """Damage to the files of a target."""

    way: str
    target: str
    seed: int
    numbers: tuple[object, ...] = ()

    head = "damage"
    patience = 100.0

    def call(self) -> str:
        return f"{self.way}({', '.join(map(repr, (self.target, self.seed, *self.numbers)))})"

    def smaller(self) -> Iterator[Case]:
        if not self.numbers:
            return
        count, *others = self.numbers
        if self.way in ("corrupted", "killed") and isinstance(count, int) and count > 1:
            yield replace(self, numbers=(1, *others))
            yield replace(self, numbers=(count - 1, *others))
        if self.way == "corrupted" and others == [True]:
            yield replace(self, numbers=(count, False))


def case(seed: int, index: int) -> Damage:
    chance = Random(f"files {seed} {index}")
    way = chance.choices(("corrupted", "killed", "without_room", "full_disk", "read_only"), (30, 2, 2, 2, 1))[0]
    target, own = chance.choice(TARGETS), chance.randrange(2**31)
    numbers: tuple[object, ...] = ()
    if way == "corrupted":
        numbers = (chance.choice([1, 1, 1, 2, 4]), chance.random() < 0.2)
    elif way == "killed":
        numbers = (20, chance.choice([0.005, 0.05]))
    elif way == "without_room":
        numbers = (chance.choice([0, 1, 100, 700, 1000, 3000]),)
    elif way == "full_disk":
        numbers = (4096 * chance.choice([1, 2, 4, 8, 16, 32]),)
    return Damage(way, target, own, numbers)
