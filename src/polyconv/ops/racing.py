"""``polyconv.benchmark``: the first calls of a problem are a race between the candidates for it.

Each call is computed by one contender, on the caller's own tensors, and timed where it would run anyway: between the
other layers of a model, in caches that they have used. So nothing is computed that nobody asked for, and what is
measured is what a program will see. When the fastest is known it becomes a choice of this process
(:mod:`~polyconv.choices`), all calls are prepared anew, and nothing of the race is left in them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, MutableMapping
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from .. import choices, settings
from ..forking import whole
from ..once import warn_once
from ..problem import Pass, Problem
from ..recent import Recent
from ..standings import Standings
from .plain import are_plain, is_watched

if TYPE_CHECKING:
    from ..backends import Backend
    from ..readiness import Run
    from ..tuning import Entry, Environment

ROUNDS, MORE_ROUNDS = 5, 10
"""Timed calls of each contender that stays to the end; and of calls that are shorter than :data:`SHORT`."""
SHORT = 1e-3
"""Seconds. Of short calls a larger share is chance, and more of them are soon done."""
DRAW = 1.02
"""PyTorch's convolution wins where the best is not faster than so many times: what is left to it has no overhead. Nor
does the best win where it gains less than that overhead, which the backend knows."""
LONGEST = 100
"""Calls after which a race ends however it stands: it has one weight, and new ones may come with every call."""

LARGE = 2**20
"""Elements of a weight from which on what a contender prepares of it is let go after each of its timed calls, and made
anew, untimed, before the next: all that contenders for all layers prepare is many times what a network will keep."""

MOST_RACES = 2048
"""Races to remember, ended ones included: they say what was measured."""
MOST_PREPARED = 256
"""Races that keep what their contenders prepared of weights. A network has no more layers and passes; a program with
new shapes at each call would keep transformed weights for each of them."""

_races: Recent[tuple[Environment, str], Race] = Recent(MOST_RACES)
"""Those that were begun, by where and what."""
_passes: Recent[Hashable, dict[Pass, Race]] = Recent(MOST_RACES)
"""The same of layers that are trained, by layer."""
_prepared: OrderedDict[Race, None] = OrderedDict()
"""Those that keep something, the one that ran last at the end."""


def clock() -> float:
    """For calls on a CPU. A thread that computes alone has a clock that stands while others interrupt it."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Race:
    """One problem, in one environment."""

    __slots__ = (
        "_backend", "_environment", "_inference", "_key", "_layer", "_pending", "_problem", "_runs", "_standings",
        "_torchs", "_usual", "_warm", "_weight", "calls", "ended", "entry",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, environment: Environment, key: str, problem: Problem, *, inference: bool
    ) -> None:
        names = backend.contenders(problem, inference=inference)
        self._backend = backend
        self._key = key
        self._environment = environment
        self._problem, self._inference = problem, inference
        self._layer = None if inference else (environment, problem.as_picture().another_pass(Pass.FPROP))
        """The same for all passes of a layer that is trained."""
        self._usual = names[0]
        """What the cost model chose."""
        self._torchs = next((name for name in names if name.endswith(", ATen")), None)
        """PyTorch's convolution: it is compared with to the end, and not by one unlucky call."""
        self._standings = Standings(names, MORE_ROUNDS, stays=[self._torchs] if self._torchs else ())
        self._runs: dict[tuple[Problem, str], Run] = {}
        self._warm: set[str] = set()
        """Those that have run on these weights: whose next call is counted."""
        self._weight: tuple[weakref.ref[UntypedStorage], int] | None = None
        """Memory and address. In inference one weight takes part: what is prepared of a weight is kept, for each
        contender by itself."""
        self.calls = 0
        self._pending: tuple[str, Any, Any] | None = None
        """A timed call of a GPU, with the events around it. It is read at the next call, when it is likely over."""
        self.entry: Entry | None = None
        """What was found; None until then, or where there was nothing to be found."""
        self.ended = False

    def run(self, problem: Problem, inference: bool, usual: Run, tensors: MutableMapping[str, Tensor]) -> None:
        """One call. ``usual`` computes it where the race does not: what the cost model chose."""
        if self._pending is not None:
            self._read_pending()
        with whole:
            turn = self._next(inference and problem.kind is Pass.FPROP, tensors)
        if turn is None:
            usual(tensors)
            return
        name, counted = turn
        try:
            self._run_timed(name, counted, self._prepared(problem, name, inference), tensors)
        except RuntimeError as error:  # of torch's, or of the driver's: memory that another contender does without
            with whole:
                self._standings.drop(name)
            warn_once(f"polyconv.benchmark: {name} is out of the race for {self._key}: {error}")
            usual(tensors)
        if counted:
            with whole:
                self._settle()
                self._let_go()

    def _let_go(self) -> None:
        """What was prepared for those who dropped out, or have to prepare it anew."""
        staying = self._warm.intersection(self._standings.running)
        self._runs = {(problem, name): run for (problem, name), run in self._runs.items() if name in staying}
        if not self._runs:
            _prepared.pop(self, None)

    def _keep(self) -> None:
        """What is prepared; the race that ran longest ago lets go of its own, and warms up anew."""
        with whole:
            _prepared[self] = None
            _prepared.move_to_end(self)
            if len(_prepared) > MOST_PREPARED:
                other, _ = _prepared.popitem(last=False)
                other._runs, other._warm = {}, set()

    def _next(self, one_weight: bool, tensors: MutableMapping[str, Tensor]) -> tuple[str, bool] | None:
        """Whose turn it is, and whether the call counts; None where it is no part of the race."""
        if (
            self.ended
            or not _is_fair(tensors["x"])
            or (one_weight and not self._has_weight(tensors.get("owner", tensors["w"])))
        ):
            return None
        self.calls += 1
        if self.calls > LONGEST:
            self._end()
            return None
        name = self._standings.next
        if name not in self._warm:
            self._warm.add(name)
            return name, False
        if one_weight and tensors["w"].numel() >= LARGE:
            self._warm.discard(name)
        return name, True

    def _has_weight(self, w: Tensor) -> bool:
        """Whether this is the weight that takes part. When that is gone, the next takes its place."""
        storage, address = w.untyped_storage(), w.data_ptr()
        if self._weight is None or self._weight[0]() is None:
            self._weight = weakref.ref(storage), address
            self._warm.clear()
        return self._weight[0]() is storage and self._weight[1] == address

    def _prepared(self, problem: Problem, name: str, inference: bool) -> Run:
        run = self._runs.get((problem, name))
        if run is None:
            run = self._runs[problem, name] = self._backend.contender(problem, name, inference=inference)
        self._keep()
        return run

    def _run_timed(self, name: str, counted: bool, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
        if tensors["x"].is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(tensors["x"].device)  # of this GPU, which need not be the current one
            start.record(stream)
            run(tensors)
            end.record(stream)
            if counted:
                self._pending = name, start, end
            return
        began = clock()
        run(tensors)
        seconds = clock() - began
        if counted:
            with whole:
                self._standings.note(name, seconds)

    def _read_pending(self) -> None:
        with whole:
            pending, self._pending = self._pending, None
        if pending is None or torch.cuda.is_current_stream_capturing():
            return
        name, start, end = pending
        end.synchronize()
        with whole:
            self._standings.note(name, start.elapsed_time(end) / 1e3)
            self._settle()

    # ---- the end

    def _settle(self) -> None:
        """End the race if it is decided."""
        best = self._standings.best
        if best and min(best.values()) >= SHORT:
            self._standings.rounds = ROUNDS
        if self._standings.decided and not self.ended:
            self._end()

    def _end(self) -> None:
        """Let what was found be a choice of this process."""
        self.ended = True
        self._runs.clear()
        _prepared.pop(self, None)
        self._backend.give_back()
        best = self._standings.best
        running = [name for name in self._standings.running if name in best]
        if not running:  # no weight came twice: what the cost model chose stays
            choices.settle(self._environment, self._key, self._usual, "raced in vain, for new weights")
            return
        winner, torchs = min(running, key=best.__getitem__), self._torchs
        if torchs is not None and best.get(torchs, inf) <= max(DRAW * best[winner], best[winner] + self._head_start()):
            winner = torchs
        elif best.get(self._usual, inf) <= self._standings.spread(winner, self._usual) * best[winner]:
            winner = self._usual  # nothing that was measured speaks against it
        from ..tuning import Entry  # here, as below: the backends have imported it, and importing polyconv need not

        self.entry = Entry(winner, best, best.get(torchs) if torchs else None)
        choices.settle(self._environment, self._key, winner, _in_words(winner, best))

    def _head_start(self) -> float:
        """What the clock did not see: the way to a kernel of polyconv's, in view of what the other passes gain."""
        passes = (_passes[self._layer] or {}) if self._layer is not None else {}
        others = [(kind, race) for kind, race in list(passes.items()) if race is not self]
        ahead = {kind: gained for kind, race in others if (gained := race._ahead) is not None}
        return self._backend.head_start(self._problem, ahead, inference=self._inference)

    @property
    def _ahead(self) -> float | None:
        """Seconds by which the best of polyconv's is ahead of PyTorch's, so far; None where that is not known."""
        best = dict(self._standings.best)
        torchs = best.pop(self._torchs, None) if self._torchs else None
        return torchs - min(best.values()) if best and torchs is not None else None


def _in_words(winner: str, best: dict[str, float]) -> str:
    others = [f"{best[name] * 1e3:.3g} ms by {name}" for name in sorted(best, key=best.__getitem__) if name != winner]
    against = f" against {', '.join(others)}" if others else ""
    return f"the winner of a race in this process ({best[winner] * 1e3:.3g} ms{against})"


def _is_fair(x: Tensor) -> bool:
    """Whether a call may be computed by any contender, and its time be what it always is: a plain one, of no graph."""
    if choices.determinism_is_asked_for() or is_watched() or not are_plain(x):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def is_raced(backend: Backend, problem: Problem, *, inference: bool) -> bool:
    """Whether the next call of a problem is, or may become, part of a race."""
    return _place(backend, problem, inference) is not None


def entered(backend: Backend, problem: Problem, usual: Run, *, inference: bool) -> Run:
    """What runs a problem: the race for it, where there is one; what runs it usually otherwise."""
    place = _place(backend, problem, inference)
    if place is None:
        return usual
    with whole:
        race = _races[place]
        if race is None or race.ended:
            race = Race(backend, *place, problem, inference=inference)
            _races.put(place, race)
            if race._layer is not None:
                passes = _passes[race._layer]
                if passes is None:
                    passes = {}
                    _passes.put(race._layer, passes)
                passes[problem.kind] = race
    return partial(race.run, problem, inference, usual)


def _place(backend: Backend, problem: Problem, inference: bool) -> tuple[Environment, str] | None:
    """Where and what is raced; None where nothing is, because it is settled, or because there is no choice."""
    if not settings.current().benchmark:
        return None
    environment, key = backend.environment(), backend.key(problem, inference=inference)
    if not choices.may_be_raced(key, environment) or len(backend.contenders(problem, inference=inference)) < 2:
        return None
    return environment, key


def awaited(backend: Backend, gradients: Iterable[Problem], run: Run) -> Run:
    """A forward pass that leads to gradients which are yet to be raced; it gives them up if they never come.

    Until they are settled the call cannot be left to torch. A program that records gradients and never computes them
    would pay for that for ever.
    """
    places = {place: problem for problem in gradients if (place := _place(backend, problem, False)) is not None}
    if not places:
        return run
    ahead = itertools.count(LONGEST, -1)

    def run_and_count(tensors: MutableMapping[str, Tensor]) -> None:
        run(tensors)
        if next(ahead) == 0:
            for (environment, key), problem in places.items():
                if _races[environment, key] is None:
                    choices.settle(environment, key, backend.contenders(problem)[0], "never raced, for want of calls")

    return run_and_count


def turns() -> int:
    """Calls that were part of a race so far. Where a call leads to no more of them, all is decided that it leads to."""
    return sum(race.calls for race in _races.every().values())


def save_benchmark(path: str | PathLike[str]) -> int:
    """Merge what was raced in this process into a tuning file, for later ones; gives the number of entries.

    Name the file in ``POLYCONV_TUNING_FILE``, or let it be ``tuning.json`` in the cache's folder: then a process that
    runs in the same environment (processor, threads, versions) makes these choices at once, and races only what is new.
    """
    from ..tuning import Tuning, merge, update

    with whole:
        every = _races.every().items()
        ended = [(environment, key, race.entry) for (environment, key), race in every if race.entry]
    found = merge(Tuning.of(environment, {key: entry}) for environment, key, entry in ended)
    if ended:
        update(Path(path), found)
    return len(found)
