"""Online autotuning (``polyconv.benchmark``): the first calls of a problem are trials of its candidates.

Each call runs one candidate on the caller's tensors and is timed in place, between the other layers of a model and with
their cache contents. No extra work is done, and the times are those of the program. The fastest candidate becomes a
preference of this process (:mod:`~polyconv.autotune.preferences`); calls are then prepared again, without any overhead.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from .. import settings
from ..problem import Pass, Problem
from ..runtime.fork_safety import STATE_LOCK
from ..runtime.guards import are_plain, is_watched
from ..runtime.warn_once import warn_once
from ..selection import Preference
from ..util.lru import LruTable
from . import preferences
from .elimination import Elimination

if TYPE_CHECKING:
    from ..backend import Backend, Run
    from ..tuning_key import Environment
    from .tuning_file import Entry

ROUNDS, MORE_ROUNDS = 5, 10
"""Trials of each remaining candidate: of calls of at least :data:`SHORT`, and of shorter ones."""
SHORT = 1e-3
"""Duration below which calls are noisier and get more trials [s]."""
LONGEST = 100
"""Calls after which a session ends even if undecided: if every call brings a new weight, no trial counts."""

LARGE = 2**20
"""Weight size [elements] from which a candidate's prepared weight is freed after each trial and prepared again before
the next, untimed: those of all candidates of all layers are many times what a network keeps."""

MOST_SESSIONS = 2048
"""Largest number of sessions kept, ended ones included, which hold the measurements."""
MOST_PREPARED = 256
"""Largest number of sessions that keep prepared weights: more than the layers and passes of a network. A program with
new shapes at each call would otherwise keep prepared weights for each."""

_sessions: LruTable[tuple[Environment, str], AutotuningSession] = LruTable(MOST_SESSIONS)
"""Sessions by environment and key."""
_passes: LruTable[Hashable, dict[Pass, AutotuningSession]] = LruTable(MOST_SESSIONS)
"""Sessions of trained layers, by layer."""
_prepared: OrderedDict[AutotuningSession, None] = OrderedDict()
"""Sessions that keep prepared weights, least recently used first."""


def trim_memory() -> None:
    """Call glibc's ``malloc_trim``: it returns free pages in the middle of the heap only on request."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def clock() -> float:
    """CPU timer [s]: with a single compute thread its CPU time, which excludes preemption."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class AutotuningSession:
    """Autotuning session of one problem in one environment."""

    __slots__ = (
        "_aten",
        "_backend",
        "_elimination",
        "_environment",
        "_key",
        "_layer",
        "_pending",
        "_plan",
        "_runs",
        "_usual",
        "_warm",
        "_weight",
        "calls",
        "ended",
        "entry",
    )  # fmt: skip

    def __init__(
        self, backend: Backend[Any], environment: Environment, key: str, problem: Problem, *, inference: bool
    ) -> None:
        self._backend, self._plan = backend, backend.plan(problem, inference=inference)
        names = self._plan.trials()
        self._key = key
        self._environment = environment
        self._layer = None if inference else (environment, problem.as_2d().another_pass(Pass.FPROP))
        """Key shared by all passes of a trained layer; None in inference."""
        self._usual = names[0]
        """The cost model's choice."""
        self._aten = next((name for name in names if name.endswith(", ATen")), None)
        """ATen's candidate, or None. It is never dropped, so that one slow call does not decide against it."""
        self._elimination = Elimination(names, MORE_ROUNDS, stays=[self._aten] if self._aten else ())
        self._runs: dict[tuple[Problem, str], Run] = {}
        self._warm: set[str] = set()
        """Candidates that have run on this weight, so that their next call is a trial."""
        self._weight: tuple[weakref.ref[UntypedStorage], int] | None = None
        """Storage and address. In inference one weight takes part: each candidate caches its own preparation of it."""
        self.calls = 0
        self._pending: tuple[str, Any, Any] | None = None
        """GPU trial and its events, read at the next call, when it has likely finished."""
        self.entry: Entry | None = None
        """Outcome; None until the session has ended with one."""
        self.ended = False

    def run(self, problem: Problem, inference: bool, usual: Run, tensors: MutableMapping[str, Tensor]) -> None:
        """Run one call, as a trial if possible, else by ``usual``, the cost model's choice."""
        if self._pending is not None:
            self._read_pending()
        with STATE_LOCK:
            turn = self._next(inference and problem.kind is Pass.FPROP, tensors)
        if turn is None:
            usual(tensors)
            return
        name, counted = turn
        try:
            self._run_timed(name, counted, self._prepared(problem, name, inference), tensors)
        except RuntimeError as error:  # of PyTorch or the driver: out of memory, say, which others may not be
            with STATE_LOCK:
                self._elimination.drop(name)
            warn_once(f"polyconv.benchmark: autotuning of {self._key} goes on without {name}: {error}")
            usual(tensors)
        if counted:
            with STATE_LOCK:
                self._settle()
                self._let_go()

    def _let_go(self) -> None:
        """Free the prepared weights of dropped candidates, and of those that must prepare them again."""
        staying = self._warm.intersection(self._elimination.running)
        self._runs = {(problem, name): run for (problem, name), run in self._runs.items() if name in staying}
        if not self._runs:
            _prepared.pop(self, None)

    def _keep(self) -> None:
        """Mark this session as most recently used; above the limit, the least recently used one must warm up again."""
        with STATE_LOCK:
            _prepared[self] = None
            _prepared.move_to_end(self)
            if len(_prepared) > MOST_PREPARED:
                other, _ = _prepared.popitem(last=False)
                other._runs, other._warm = {}, set()

    def _next(self, one_weight: bool, tensors: MutableMapping[str, Tensor]) -> tuple[str, bool] | None:
        """Next candidate and whether the call is a timed trial; None if the call takes no part in the session."""
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
        name = self._elimination.next
        if name not in self._warm:
            self._warm.add(name)
            return name, False
        if one_weight and tensors["w"].numel() >= LARGE:
            self._warm.discard(name)
        return name, True

    def _has_weight(self, w: Tensor) -> bool:
        """True if ``w`` is the weight that takes part. A new weight replaces one that was freed."""
        storage, address = w.untyped_storage(), w.data_ptr()
        if self._weight is None or self._weight[0]() is None:
            self._weight = weakref.ref(storage), address
            self._warm.clear()
        return self._weight[0]() is storage and self._weight[1] == address

    def _prepared(self, problem: Problem, name: str, inference: bool) -> Run:
        run = self._runs.get((problem, name))
        if run is None:
            plan = self._backend.plan(problem, inference=inference, prefer=Preference(name))
            run = self._runs[problem, name] = self._backend.prepare(plan, trial=True)
        self._keep()
        return run

    def _run_timed(self, name: str, counted: bool, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
        if tensors["x"].is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(tensors["x"].device)  # the tensor's GPU may not be the current one
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
            with STATE_LOCK:
                self._elimination.note(name, seconds)

    def _read_pending(self) -> None:
        with STATE_LOCK:
            pending, self._pending = self._pending, None
        if pending is None or torch.cuda.is_current_stream_capturing():
            return
        name, start, end = pending
        end.synchronize()
        with STATE_LOCK:
            self._elimination.note(name, start.elapsed_time(end) / 1e3)
            self._settle()

    # ---- end of the session

    def _settle(self) -> None:
        best = self._elimination.best
        if best and min(best.values()) >= SHORT:
            self._elimination.rounds = ROUNDS
        if self._elimination.decided and not self.ended:
            self._end()

    def _end(self) -> None:
        """End the session and make its outcome a preference of this process."""
        self.ended = True
        self._runs.clear()
        _prepared.pop(self, None)
        trim_memory()
        best, aten = self._elimination.best, self._aten
        winner = self._elimination.winner(self._usual, aten, 0.0 if aten is None else self._dispatch_overhead())
        if winner is None:  # no weight came twice: keep the cost model's choice
            preferences.settle(self._environment, self._key, self._usual, "not autotuned: no weight came twice")
            return
        from .tuning_file import Entry  # lazy, as below: the backends have imported it, importing polyconv does not

        self.entry = Entry(winner, best, best.get(aten) if aten else None)
        preferences.settle(self._environment, self._key, winner, _in_words(winner, best))

    def _dispatch_overhead(self) -> float:
        """Untimed dispatch overhead of polyconv's kernels [s], given the gains of the layer's other passes."""
        passes = (_passes[self._layer] or {}) if self._layer is not None else {}
        others = [(kind, session) for kind, session in list(passes.items()) if session is not self]
        ahead = {kind: gained for kind, session in others if (gained := session._ahead) is not None}
        overhead: float = self._plan.dispatch_overhead(ahead)
        return overhead

    @property
    def _ahead(self) -> float | None:
        """Gain of polyconv's best candidate over ATen so far [s]; None if either has no trial."""
        best = dict(self._elimination.best)
        torchs = best.pop(self._aten, None) if self._aten else None
        return torchs - min(best.values()) if best and torchs is not None else None


def _in_words(winner: str, best: dict[str, float]) -> str:
    others = [f"{best[name] * 1e3:.3g} ms by {name}" for name in sorted(best, key=best.__getitem__) if name != winner]
    against = f" against {', '.join(others)}" if others else ""
    return f"chosen by autotuning in this process ({best[winner] * 1e3:.3g} ms{against})"


def _is_fair(x: Tensor) -> bool:
    """True if any candidate may run the call and its time is representative: plain tensors, no graph capture."""
    if preferences.determinism_is_asked_for() or is_watched() or not are_plain(x):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def wrap(
    backend: Backend[Any], problem: Problem, usual: Run, *, inference: bool, gradients: Iterable[Problem] = ()
) -> tuple[Run, bool]:
    """Run of a problem through its autotuning session, or ``usual`` if it has none; and whether all is settled.

    ``gradients``: problems of the backward pass. While one of them is to be autotuned, the call cannot be a
    passthrough, which a program that never computes its gradients would pay forever; so after :data:`LONGEST` calls
    they are settled on the cost model's choice if they never ran.
    """
    if not settings.current().benchmark:
        return usual, True
    place = _place(backend, problem, inference)
    run = (
        usual if place is None else partial(_session(backend, place, problem, inference).run, problem, inference, usual)
    )
    later = {found: each for each in gradients if (found := _place(backend, each, False)) is not None}
    if not later:
        return run, place is None
    ahead = itertools.count(LONGEST, -1)

    def run_and_count(tensors: MutableMapping[str, Tensor]) -> None:
        run(tensors)
        if next(ahead) == 0:
            for (environment, key), gradient in later.items():
                if _sessions[environment, key] is None:
                    choice = backend.plan(gradient).trials()[0]
                    preferences.settle(environment, key, choice, "not autotuned: never called")

    return run_and_count, False


def _session(
    backend: Backend[Any], place: tuple[Environment, str], problem: Problem, inference: bool
) -> AutotuningSession:
    """Running session of a problem, or a new one."""
    with STATE_LOCK:
        session = _sessions[place]
        if session is None or session.ended:
            session = AutotuningSession(backend, *place, problem, inference=inference)
            _sessions.put(place, session)
            if session._layer is not None:
                passes = _passes[session._layer]
                if passes is None:
                    passes = {}
                    _passes.put(session._layer, passes)
                passes[problem.kind] = session
    return session


def _place(backend: Backend[Any], problem: Problem, inference: bool) -> tuple[Environment, str] | None:
    """Environment and key of the session; None if the problem is settled or has a single candidate."""
    environment, key = backend.environment(), preferences.key_of(backend, problem, inference=inference)
    if not preferences.may_autotune(key, environment) or len(backend.plan(problem, inference=inference).trials()) < 2:
        return None
    return environment, key


def turns() -> int:
    """Calls that took part in autotuning so far. A call that does not increase the count has only settled problems."""
    return sum(session.calls for session in _sessions.every().values())


def autotune(call: Callable[[], object]) -> None:
    """Repeat a call until all of its autotuning sessions are finished, so that its plans are final."""
    with settings.use(benchmark=True):
        before = -1
        while before != turns():
            before = turns()
            call()


def entries(environment: Environment) -> dict[str, Entry]:
    """Autotuning outcomes of this process in an environment, by key."""
    with STATE_LOCK:
        every = list(_sessions.every().items())
    return {key: session.entry for (here, key), session in every if here == environment and session.entry}


def save_benchmark(path: str | PathLike[str]) -> int:
    """Merge the autotuning outcomes of this process into a tuning file. Returns the number of entries.

    Name the file in ``POLYCONV_TUNING_FILE``, or write ``tuning.json`` in the cache folder: a later process in the same
    environment (processor, threads, versions) then uses these choices at once and autotunes only new problems.
    """
    from .tuning_file import Tuning, merge, update

    with STATE_LOCK:
        every = _sessions.every().items()
        ended = [(environment, key, session.entry) for (environment, key), session in every if session.entry]
    found = merge(Tuning.of(environment, {key: entry}) for environment, key, entry in ended)
    if ended:
        update(Path(path), found)
    return len(found)
