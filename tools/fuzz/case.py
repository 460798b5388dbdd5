"""The interface of a part of the fuzzer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

PARTS = Path(__file__).resolve().parent / "parts"


class Failure(AssertionError):  # noqa: N818 (what a case has found is no error of the campaign)
    """A fault found by a case. The first line, numbers aside, identifies its kind: each kind is reported once."""


class Case:
    """One test case. It runs in a worker process, which may crash."""

    limit: float = 60.0
    """Seconds after which it counts as hanging. Generous: the machine may be busy, or the build sanitized."""

    def run(self) -> None:
        """Raise :class:`Failure` if something is wrong. Any other exception is a failure, too."""
        raise NotImplementedError

    def script(self) -> str:
        """A Python program that reproduces the case with only polyconv installed: for the report."""
        raise NotImplementedError

    def smaller(self) -> Iterator[Case]:
        """Simpler cases that may fail alike, the greatest simplification first. Deterministic."""
        return iter(())


class Part(Protocol):
    """A module in ``parts``, or in a folder given with ``--parts``, named by its file."""

    ABOUT: str
    """Its target, in a sentence."""

    def case(self, seed: int, index: int) -> Case:
        """A case of the sequence. It depends on the two numbers only, so any case can be made again."""


def why_not(part: Part) -> str:
    """Reason why a part has no cases on this machine, which is no failure; empty if it has some.

    A part with optional requirements has a function of this name, without arguments.
    """
    found: str = getattr(part, "why_not", str)()
    return found


def names(folder: Path = PARTS) -> list[str]:
    """The parts of a folder."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def load(name: str, folder: Path = PARTS) -> Part:
    """A part by its name."""
    if folder == PARTS:
        return cast(Part, importlib.import_module(f"fuzz.parts.{name}"))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return cast(Part, module)


def find(part: Part, seed: int, index: int, path: Sequence[int]) -> Case | None:
    """A case of the sequence, or a simplification of it: each number selects one of the simpler cases."""
    found = part.case(seed, index)
    for step in path:
        candidate = next((case for place, case in enumerate(found.smaller()) if place == step), None)
        if candidate is None:
            return None
        found = candidate
    return found
