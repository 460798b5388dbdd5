"""Runs parts in parallel within a budget, follows up failures, and continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Event, Lock

from .journal import Found, PartJournal
from .process import Outcome, PartError, PartSkipped, Surroundings, Worker

TURN = 10.0
"""Seconds of a part's turn before another part may run."""
MINIMISING = 20.0
"""Seconds to search for a smaller case that fails alike."""
HISTORY = 1000
"""Earlier cases to name if a failure needs them."""


@dataclass(frozen=True)
class Budget:
    """Limits: total seconds, or cases per part."""

    seconds: float | None = None
    cases: int | None = None


class Campaign:
    """A seed, some parts, and the journal."""

    def __init__(
        self,
        folder: Path,
        parts: Sequence[str],
        seed: int,
        journal: Path,
        surroundings: Surroundings,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.seed = seed
        self.journals = {part: PartJournal(journal, part, seed) for part in parts}
        self.broken: dict[str, str] = {}
        """Parts that could not be used, and why."""
        self.skipped: dict[str, str] = {}
        """Parts that have no cases on this machine, and why."""
        self._folder = folder
        self._surroundings = surroundings
        self._tell = tell
        self._lock = Lock()
        self._stopping = Event()
        self._idle: dict[str, list[Worker]] = {part: [] for part in parts}
        self._all: list[Worker] = []
        self._had = dict.fromkeys(parts, 0.0)
        """Seconds of each part in this run: of the waiting parts the one with the least runs next."""
        self._running: list[tuple[str, float]] = []
        """Current turns, with their starting times."""
        self._left: dict[str, int] = {}
        self._turn_seconds = TURN

    @property
    def failed(self) -> bool:
        return bool(self.broken) or any(journal.failures for journal in self.journals.values())

    def run(self, budget: Budget, jobs: int = 1) -> None:
        """Run cases until the budget is spent. An interrupt ends it early, and is re-raised."""
        if budget.cases is not None:
            self._left = dict.fromkeys(self.journals, budget.cases)
        end = None if budget.seconds is None else time.monotonic() + budget.seconds
        share = inf if budget.seconds is None else budget.seconds * jobs / len(self.journals)
        self._turn_seconds = min(TURN, max(share, 0.1))
        pool = ThreadPoolExecutor(jobs)
        running = [pool.submit(self._job, end) for _ in range(jobs)]
        try:
            for job in running:
                job.result()
        finally:
            self._stopping.set()
            while wait(running, timeout=0.2).not_done:
                for worker in self._all:
                    worker.interrupt()
            for worker in self._all:
                worker.close()
            for journal in self.journals.values():
                journal.close()

    def replay(self, part: str, indices: Iterable[int]) -> str:
        """Run some cases of a part in one worker, in order; returns the script of the last. Nothing else runs."""
        journal = self.journals[part]
        worker, last = self._worker(part), 0
        for index in indices:
            last = journal.begin(index)
            worker = self._one(part, worker, index)
        text = worker.script(last, ())
        worker.close()
        return text

    # ---- one job: turns of one part after another

    def _job(self, end: float | None) -> None:
        while not self._stopping.is_set() and (end is None or time.monotonic() < end):
            turn = self._whose_turn()
            if turn is None:
                return
            part, begun = turn
            try:
                self._turn(part, min(begun + self._turn_seconds, inf if end is None else end))
            except PartSkipped as reason:
                self.skipped[part] = str(reason)
            except PartError as error:
                if not self._stopping.is_set():
                    self.broken[part] = str(error)
                    self._tell(str(error))
            finally:
                took = time.monotonic() - begun
                self.journals[part].spend(took)
                with self._lock:
                    self._running.remove(turn)
                    self._had[part] += took

    def _whose_turn(self) -> tuple[str, float] | None:
        with self._lock:
            out = {*self.broken, *self.skipped}
            able = [part for part in self._had if part not in out and self._left.get(part, 1) > 0]
            if not able:
                return None
            now = time.monotonic()
            taken = [part for part, _ in self._running]
            turn = min(able, key=lambda part: (taken.count(part), self._had[part])), now
            self._running.append(turn)
            return turn

    def _turn(self, part: str, end: float) -> None:
        with self._lock:
            worker = self._idle[part].pop() if self._idle[part] else None
        worker = worker or self._worker(part)
        while not self._stopping.is_set() and time.monotonic() < end and self._may_take(part):
            worker = self._one(part, worker, self.journals[part].begin())
        with self._lock:
            self._idle[part].append(worker)

    def _may_take(self, part: str) -> bool:
        with self._lock:
            if part in self._left:
                self._left[part] -= 1
                return self._left[part] >= 0
            return True

    def _one(self, part: str, worker: Worker, index: int) -> Worker:
        """Run a case, and follow it up if it failed. Returns the worker for the next one."""
        outcome = worker.run(index)
        if self._stopping.is_set():
            self.journals[part].stop(index)
            return worker
        if outcome.is_bad:
            self._follow_up(part, worker, index, outcome)
        return worker if worker.alive else self._worker(part, instead_of=worker)

    def _worker(self, part: str, instead_of: Worker | None = None) -> Worker:
        log = self.journals[part].file.with_suffix(".log")
        worker = Worker(self._folder, part, self.seed, log, self._surroundings)
        with self._lock:
            self._all = [*(other for other in self._all if other is not instead_of), worker]
        return worker

    # ---- follow-up of a failure

    def _follow_up(self, part: str, worker: Worker, index: int, outcome: Outcome) -> None:
        """The first failure of its kind is reproduced in a fresh worker and minimised; others are only recorded."""
        journal = self.journals[part]
        failure = Found(index, outcome.kind, outcome.words)
        if failure.likeness in journal.alike():
            journal.found(failure)
            return
        self._tell(f"{part}:{index} {outcome.kind}: {(outcome.words.splitlines() or [''])[0]}")
        fresh = self._worker(part)
        again = fresh.run(index)
        if again.kind == outcome.kind != "unmade":
            failure, fresh = self._minimise(part, fresh, failure)
        elif again.kind != outcome.kind:
            failure = Found(index, outcome.kind, outcome.words, alone=False, after=tuple(worker.ran[-HISTORY - 1 : -1]))
        if not fresh.alive:
            fresh = self._worker(part, instead_of=fresh)
        journal.script(index).write_text(self._heading(part, failure) + fresh.script(index, failure.path))
        self._discard(fresh)
        if not self._stopping.is_set():
            journal.found(failure)

    def _minimise(self, part: str, worker: Worker, failure: Found) -> tuple[Found, Worker]:
        """The smallest case that still fails alike, and the worker, which may be a new one."""
        end, path, step, words = time.monotonic() + MINIMISING, failure.path, 0, failure.words
        while time.monotonic() < end and not self._stopping.is_set():
            if not worker.alive:
                worker = self._worker(part, instead_of=worker)
            outcome = worker.run(failure.index, (*path, step))
            if outcome.kind == "absent":
                break
            if Found(failure.index, outcome.kind, outcome.words).likeness == failure.likeness:
                path, step, words = (*path, step), 0, outcome.words
            else:
                step += 1
        return Found(failure.index, failure.kind, words, path), worker

    def _discard(self, worker: Worker) -> None:
        with self._lock:
            self._all = [other for other in self._all if other is not worker]
        worker.close()

    def _heading(self, part: str, failure: Found) -> str:
        words = "\n".join(f"# {line}".rstrip() for line in failure.words.splitlines()[:20])
        again = f"python tools/fuzz --seed {self.seed} --only {part}:{failure.index}"
        if not failure.alone:
            first = min(failure.after, default=failure.index)
            again += f"\n# It passes alone; its worker had run others before: --only {part}:{first}-{failure.index}"
        return f"# {part}:{failure.index} {failure.kind}:\n{words}\n# {again}\n\n"
