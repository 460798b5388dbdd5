"""The contest of a network: contenders' processes are asked in turn, round by round, for one sample each.

No two contenders compute at the same time, and none shares a thread pool with another. The halves of a contender's own
samples, taken in turn, are its A/A.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import torch
from torch import Tensor, nn

from ....measure.environment import for_any_library
from ....measure.timing import FEWEST_ROUNDS
from ..ab_compare import difference
from ..cases import Case, Cases, Mode, Peer
from ..model_zoo import Network
from ..runner import Contest, instruction_set, worker
from .contenders import EXPORTED, INPUT, NETWORK, Job, RefusedError, eager, export, names, refusal
from .rows import Entry, PeerRow, key

PATIENCE = 120.0
"""Time after which a contest ends with the rounds done so far [s]."""
LONGEST = 1800.0
"""Time after which a contender that does not answer is ended [s]."""
ENDING = 10.0
"""Time for a contender's process to end [s]."""
SETTLING = 0.01
"""Pause before each sample, in which the threads of the contender before it stop spinning [s]."""
REFERENCE = "reference.pt"


def contests(networks: Sequence[Network], cases: Cases, peers: Sequence[Peer]) -> list[Contest[PeerRow]]:
    return [
        Contest(key(network.name, case), partial(measured, network, case, peers, cases.repeats))
        for network in networks
        for case in cases
    ]


def measured(network: Network, case: Case, peers: Sequence[Peer], repeats: int) -> PeerRow:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / NETWORK).write_bytes(pickle.dumps(network))
        jobs = [Job(name, case, Path(folder), instruction_set()) for name in names(peers, len(network.image) - 1)]
        seconds, not_exported = _prepare(jobs)
        contenders = []
        for number, job in enumerate(jobs):
            contender = Contender(job, number)
            stack.callback(contender.close)
            contenders.append(contender)
            exported = job.contender in EXPORTED
            contender.start(seconds if exported else 0.0, refusal(job) or (not_exported if exported else ""))
        _rounds(contenders, repeats)
        shape = network.input(case.batch)
        return PeerRow(network.name, "×".join(map(str, shape[2:])), case, [one.entry() for one in contenders])


def _prepare(jobs: Sequence[Job]) -> tuple[float, str]:
    """Compute the reference and export the network once; returns the time of the export [s], or why it failed."""
    with worker() as pool:
        pool.submit(write_reference, jobs[0]).result()
        if all(job.contender not in EXPORTED or refusal(job) for job in jobs):
            return 0.0, ""
        began = time.perf_counter()
        try:
            pool.submit(export, jobs[0]).result()
        except BrokenProcessPool:
            return 0.0, "not exported: the exporter ended its process"
        except RefusedError as error:
            return 0.0, str(error)
        return time.perf_counter() - began, ""


def write_reference(job: Job) -> None:
    """Write the input, and the result of eager PyTorch in float64; none if it is random."""
    torch.set_num_threads(job.case.threads)
    module, x = job.made()
    torch.save(x, job.folder / INPUT)
    if job.case.mode is Mode.INFERENCE or not _is_random(module):
        torch.save(eager(module.double(), x.double(), job.case).result, job.folder / REFERENCE)


def _is_random(module: nn.Module) -> bool:
    """Whether a training step drops elements by chance."""
    return any("Drop" in type(part).__name__ and getattr(part, "p", 1) for part in module.modules())


def _rounds(contenders: Sequence[Contender], repeats: int) -> None:
    """Ask for samples, each round starting with another contender."""
    began = time.perf_counter()
    for turn in range(repeats):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - began > PATIENCE:
            break
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.sample()


@dataclass(slots=True)
class Contender:
    """The driver's side of a contender's process."""

    job: Job
    number: int
    _entry: Entry = field(init=False)
    _process: subprocess.Popen[str] | None = None
    _calls: int = 1
    _samples: list[dict[str, float]] = field(default_factory=list)

    def start(self, earlier: float, refused: str) -> None:
        """Start the process and wait until it is built. ``earlier`` is the time spent on it before [s]."""
        self._entry = Entry(self.job.contender, refused)
        if refused:
            return
        self._file(".pickle").write_bytes(pickle.dumps(self.job))
        variables = {
            **for_any_library(self.job.case.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TORCHINDUCTOR_CACHE_DIR": str(
                self.job.folder / "inductor"
            ),  # of an earlier run, compilation takes no time
        }
        with self._file(".log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(self._file(".pickle"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **variables},
            )
        answer = self._answer()
        if answer is not None:
            self._calls = answer["calls"]
            self._entry = replace(self._entry, setup_s=earlier + answer["setup_s"], error=self._error())

    def sample(self) -> None:
        if not self._entry.refused:
            time.sleep(SETTLING)
            answer = self._answer(f"sample {self._calls}")
            if answer is not None:
                self._samples.append(answer)

    def entry(self) -> Entry:
        answer = None if self._entry.refused else self._answer("memory")
        if answer is None:
            return Entry(self.job.contender, self._entry.refused)
        walls, cpu = [one["s"] for one in self._samples], [one["cpu_s"] for one in self._samples]
        return replace(self._entry, peak_bytes=answer["bytes"], samples_s=walls, cpu_s=cpu)

    def close(self) -> None:
        """Close the pipes, which ends the process, and wait for it."""
        if self._process is not None:
            with _limited(self._process, ENDING), self._process:
                pass

    def _answer(self, request: str = "") -> dict[str, Any] | None:
        """The answer to a request; None if there is none, which makes the entry a refusal."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with _limited(self._process, LONGEST):
                if request:
                    print(request, file=self._process.stdin, flush=True)
                answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        if "refused" in answer or not answer:
            self._entry = replace(self._entry, refused=answer.get("refused") or self._last_words())
            return None
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._file(".log").read_text(errors="replace").splitlines() if line.strip()]
        return f"it ended its process{f': {lines[-1]}' if lines else ''}"

    def _error(self) -> float | None:
        reference = self.job.folder / REFERENCE
        if not reference.exists():
            return None
        result: Tensor = torch.load(self._file(".pt"))
        return difference(result, torch.load(reference))

    def _file(self, suffix: str) -> Path:
        return self.job.folder / f"{self.number}{suffix}"


@contextmanager
def _limited(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill the process if the ``with`` block takes longer."""
    limit = Timer(seconds, process.kill)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
