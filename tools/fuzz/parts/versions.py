"""Another interpreter, with another torch: a sample of the convolutions there."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fuzz.case import PARTS, Case, Failure, find
from fuzz.parts import convolutions
from fuzz.process import Surroundings, Worker

ABOUT = "convolutions again, with the torch of another interpreter: CAMPAIGN_OTHER_PYTHON=FILE"

VARIABLE = "CAMPAIGN_OTHER_PYTHON"
EXAMPLE = "of an environment with another torch and numpy"


def why_not() -> str:
    """Reason for having no cases here; empty if there are some."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        return f"{VARIABLE} names no interpreter {EXAMPLE}"
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        return f"{VARIABLE}={python} is no interpreter: name one {EXAMPLE}"
    tried = subprocess.run([python, "-c", "import numpy, torch"], capture_output=True, text=True)
    last = tried.stderr.strip().rpartition("\n")[2]
    return f"{VARIABLE}={python} cannot import them: {last}; name one {EXAMPLE}" if tried.returncode else ""


class _Other:
    """The worker in the other interpreter: shared by all cases, replaced when a case ends it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def get(self, seed: int) -> Worker:
        if self._worker is None or not self._worker.alive:
            log = Path(tempfile.mkdtemp(prefix="campaign-")) / "versions.log"
            surroundings = Surroundings(os.environ[VARIABLE], {VARIABLE: ""})
            self._worker = Worker(PARTS, "convolutions", seed, log, surroundings)
            atexit.register(self._worker.close)
        return self._worker


_other = _Other()


@dataclass(frozen=True)
class Elsewhere(Case):
    """A case of the convolutions, with another torch."""

    seed: int
    index: int
    path: tuple[int, ...] = ()
    """Simplifications of it."""
    limit = 400.0

    def run(self) -> None:
        outcome = _other.get(self.seed).run(self.index, self.path)
        if outcome.is_bad:
            raise Failure(f"with the other torch: {outcome.words}")

    def _here(self) -> Case:
        found = find(convolutions, self.seed, self.index, self.path)
        assert found is not None
        return found

    def smaller(self) -> Iterator[Case]:
        for step, _ in enumerate(self._here().smaller()):
            yield replace(self, path=(*self.path, step))

    def script(self) -> str:
        return f"# for the interpreter that {VARIABLE} names\n{self._here().script()}"


def case(seed: int, index: int) -> Elsewhere:
    return Elsewhere(seed, index)
