"""polyconv.benchmark: the first calls of a problem are trials with correct results, then the fastest candidate runs."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile

import polyconv
from commands import python
from entered import entered
from fresh import PROCESSES
from polyconv import backend as the_backend
from polyconv import settings
from polyconv.autotune import online, preferences, tuning_file
from polyconv.backend import Run, backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines import aten
from polyconv.cpu.planner import CpuPlan
from polyconv.dispatch import prepare
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem
from polyconv.selection import TRIALS
from polyconv.tuning_key import problem_key

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

T = TypeVar("T")
X, W = (2, 16, 24, 28), (16, 16, 3, 3)
MOST_CONTENDERS = TRIALS + 4
"""Includes the best candidate of each engine."""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    preferences.forget_outcomes()
    online._sessions.clear()
    prepare.known.clear()  # prepared calls hold sessions


class Timed(CpuBackend):
    """A fake clock that only candidates advance, by times given per candidate."""

    def __init__(self, seconds: Callable[[str], float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 0.0
        self.ran: list[str] = []

    def prepare(self, plan: CpuPlan, *, trial: bool = False) -> Run:
        run = super().prepare(plan, trial=trial)
        if not trial:
            return run

        def run_timed(tensors: MutableMapping[str, Tensor]) -> None:
            run(tensors)
            self.ran.append(plan.choice)
            self.now += self.seconds(plan.choice)

        return run_timed


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """Autotuning on the CPU with a fake clock: ATen takes 1 s, all other candidates 2 s."""
    backend = Timed(lambda name: 1.0 if name.endswith(aten.NAME) else 2.0)
    monkeypatch.setattr(online, "clock", lambda: backend.now)
    with the_backend.override("cpu", backend), polyconv.benchmark():
        yield backend


def call(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return polyconv.conv2d(x, w, padding=1)


def until_decided(once: Callable[[], T]) -> list[T]:
    """All results; the last call was not a trial."""
    found, before = [], -1
    while before != online.turns():
        before = online.turns()
        found.append(once())
    return found


def call_until_decided(x: Tensor, w: Tensor) -> list[Tensor]:
    return until_decided(lambda: call(x, w))


def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(X), torch.randn(W) / 12


def problem_of(x: Tensor, w: Tensor) -> Problem:
    return Problem.make("fprop", x.shape, w.shape, padding=(1, 1, 1, 1))


# ---- during and after a session


@pytest.mark.parametrize("tolerance", [0.0, 1e-5, 1e-4])
def test_every_result_keeps_the_tolerance(tolerance: float) -> None:
    x, w = tensors()
    exact = F.conv2d(x.double(), w.double(), padding=1)
    unit = scales(problem_of(x, w), {"x": x, "w": w})["y"]
    with polyconv.benchmark(), polyconv.tolerance(tolerance):
        results = call_until_decided(x, w)
        after = [call(x, w) for _ in range(3)]
    assert len(results) > TRIALS
    assert all(largest((y.double() - exact).abs(), unit) <= max(tolerance, 4e-6) for y in results)
    assert all(torch.equal(y, results[-1]) for y in after), "the winner stays"


def test_the_fastest_wins_and_stays(timed: Timed) -> None:
    x, w = tensors()
    wanted = timed.plan(problem_of(x, w), inference=True).trials()[1]
    timed.seconds = lambda name: 0.5 if name == wanted else 1.0
    call_until_decided(x, w)
    plan = preferences.plan(timed, problem_of(x, w), inference=True)
    assert plan.choice == wanted
    assert "chosen by autotuning in this process (500 ms against 1e+03 ms by " in plan.reason
    ran = len(timed.ran)
    for _ in range(3):
        call(x, w)
    assert len(timed.ran) == ran


@pytest.mark.parametrize(("ours", "wins"), [(1.3e-4, False), (1.0e-4, True)])
def test_what_it_costs_to_get_to_a_kernel_counts(timed: Timed, ours: float, wins: bool) -> None:
    """The clock runs only inside a candidate; ATen is called directly once it has won."""
    x, w = tensors()
    timed.seconds = lambda name: 2e-4 if name.endswith(aten.NAME) else ours
    call_until_decided(x, w)
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice.endswith(aten.NAME) is not wins


@pytest.mark.parametrize(("ours", "wins"), [(1.85e-3, False), (1.7e-3, True)])
def test_a_layer_that_is_trained_is_decided_as_a_whole(timed: Timed, ours: float, wins: bool) -> None:
    """One polyconv pass sends all three through Python, so their gains are weighed together."""
    x, w = (tensor.requires_grad_() for tensor in tensors())
    dy = torch.randn(X)
    timed.seconds = lambda name: 2e-3 if name.endswith(aten.NAME) else ours
    until_decided(lambda: polyconv.conv2d(x, w, padding=1).backward(dy))
    plans = [preferences.plan(timed, problem_of(x, w).for_pass(kind)) for kind in Pass]
    assert [plan.choice.endswith(aten.NAME) for plan in plans] == [not wins] * 3


def test_explain_says_that_it_was_autotuned() -> None:
    conv, x = polyconv.Conv2d(16, 16, 3, padding=1), torch.randn(X)
    with polyconv.benchmark(), torch.no_grad():
        until_decided(lambda: conv(x))
        text = str(polyconv.explain(conv, x))
    assert "chosen by autotuning in this process (" in text
    assert " ms by " in text


@pytest.mark.parametrize(("ours", "winner"), [(0.99, "ATen"), (0.97, "ours")])
def test_a_draw_is_left_to_torch(timed: Timed, ours: float, winner: str) -> None:
    timed.seconds = lambda name: 1.0 if name.endswith(aten.NAME) else ours
    x, w = tensors()
    call_until_decided(x, w)
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice.endswith(aten.NAME) == (winner == "ATen")


def test_one_unlucky_call_does_not_put_torch_out(timed: Timed) -> None:
    """On a busy machine, noise added to a trial must not decide."""
    first = iter([1.0, 9.0])  # a warm-up, then a trial

    def seconds(name: str) -> float:
        return next(first, 1.0) if name.endswith(aten.NAME) else 2.0

    timed.seconds = seconds
    x, w = tensors()
    call_until_decided(x, w)
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice.endswith(aten.NAME)


@pytest.mark.parametrize(("noise", "stays"), [(1.0, False), (1.3, True)])
def test_what_the_model_chose_stays_where_times_are_too_uncertain(timed: Timed, noise: float, stays: bool) -> None:
    """A gain of a tenth is noise if two trials of one candidate differ by more."""
    x, w = tensors()
    usual, other, *_ = (n for n in timed.plan(problem_of(x, w), inference=True).trials() if not n.endswith(aten.NAME))
    calls_of = {usual: 0, other: 0}

    def seconds(name: str) -> float:
        if name not in calls_of:
            return 2.0
        calls_of[name] += 1
        return (0.9 if name == other else 1.0) * (1.0 if calls_of[name] == 3 else noise)

    timed.seconds = seconds
    call_until_decided(x, w)
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice == (usual if stays else other)


def test_a_session_is_short(timed: Timed) -> None:
    """Each candidate has a warm-up call; a hopeless one has a single trial."""
    x, w = tensors()
    timed.seconds = lambda name: 1.0 if name.endswith(aten.NAME) else 9.0
    call_until_decided(x, w)
    names = timed.plan(problem_of(x, w), inference=True).trials()
    assert 1 < len(names) <= MOST_CONTENDERS
    assert len(timed.ran) <= 2 * len(names) + online.ROUNDS
    assert all(timed.ran.count(name) <= 3 for name in names if not name.endswith(aten.NAME))


def test_a_session_of_equals_ends(timed: Timed) -> None:
    x, w = tensors()
    for seconds, rounds in ((1.0, online.ROUNDS), (1e-5, online.MORE_ROUNDS)):
        timed.seconds = lambda _, seconds=seconds: seconds  # type: ignore[misc]
        timed.ran.clear()
        x = torch.cat([x, x])
        call_until_decided(x, w)
        names = timed.plan(problem_of(x, w), inference=True).trials()
        assert len(timed.ran) == len(names) * (1 + rounds)


def test_a_decided_call_costs_what_it_costs_without(timed: Timed) -> None:
    x, w = tensors()
    wanted = next(
        name for name in timed.plan(problem_of(x, w), inference=True).trials() if not name.endswith(aten.NAME)
    )
    timed.seconds = lambda name: 0.5 if name == wanted else 1.0
    call_until_decided(x, w)
    decided = entered(lambda: call(x, w))
    key = problem_key(problem_of(x, w), kept_weights=True)
    with polyconv.benchmark(False), preferences.Forced({key: wanted}):
        call(x, w)
        assert decided == entered(lambda: call(x, w))
    assert not any("online" in name for name in decided)


def test_what_torch_wins_is_left_to_torch(timed: Timed) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(X, requires_grad=True)
    assert type(conv(x).grad_fn).__name__ == "_RecordedBackward", "undecided, it may be anybody's"
    for _ in range(40):
        conv(x).square().sum().backward()
    assert type(conv(x).grad_fn).__name__ == "ConvolutionBackward0"


# ---- training


def test_all_passes_of_training_are_autotuned(timed: Timed) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3, padding=1), torch.randn(X, requires_grad=True)
    theirs = torch.nn.Conv2d(16, 16, 3, padding=1)
    theirs.load_state_dict(conv.state_dict())
    timed.seconds = lambda name: 2.0 if name.endswith(aten.NAME) else 1.0
    dy = torch.randn(X)
    expected = torch.autograd.grad(theirs(x), [x, *theirs.parameters()], dy)
    for found in until_decided(lambda: torch.autograd.grad(conv(x), [x, *conv.parameters()], dy)):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-3)
    keys = [key for _, key in online._sessions]
    assert sorted(key.split()[0] for key in keys) == ["dgrad", "fprop", "wgrad"]
    assert all(session.entry is not None for session in online._sessions.values())


def test_gradients_that_never_come_are_given_up(timed: Timed) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(X)
    timed.seconds = lambda name: 0.5 if name.endswith(aten.NAME) else 1.0
    kinds = [type(conv(x).grad_fn).__name__ for _ in range(2 * online.LONGEST + 20)]
    wanted = [
        plan.choice.endswith(aten.NAME)
        for plan in (preferences.plan(timed, each) for each in gradients(x, conv.weight))
    ]
    assert (kinds[-1] == "ConvolutionBackward0") == all(wanted)
    assert not any(online._place(timed, problem, False) for problem in gradients(x, conv.weight))


def gradients(x: Tensor, w: Tensor) -> list[Problem]:
    return [Problem.make("wgrad", x.shape, w.shape, bias=True)]


# ---- which problems take part


def test_one_weight_takes_part_in_inference(timed: Timed) -> None:
    """The weight cache holds a weight for one candidate at a time, so another weight runs the cost model's choice."""
    x, w = tensors()
    other = torch.randn(W)
    call(x, w)
    for _ in range(3):
        call(x, other)
    assert online.turns() == 1
    del w
    for _ in range(3):
        call(x, other)
    assert online.turns() == 4, "the first is gone"


def test_one_contender_at_a_time_keeps_what_it_makes_of_a_large_weight(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed.seconds = lambda _: 1.0
    x, w = tensors()
    for large in (False, True):
        monkeypatch.setattr(online, "LARGE", w.numel() + (not large))
        online._sessions.clear()
        prepare.known.clear()
        call(x, w)
        (session,) = online._sessions.values()
        kept = []
        while not session.ended:
            kept.append(len(session._runs))
            call(x, w)
        assert max(kept) == (1 if large else len(session._elimination.running))
        assert len(session._elimination.samples[session._usual]) == online.ROUNDS
        preferences.forget_outcomes()


def test_who_drops_out_keeps_nothing(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    trimmed: list[bool] = []
    monkeypatch.setattr(online, "trim_memory", lambda: trimmed.append(True))
    timed.seconds = lambda name: 1.0 if name.endswith(aten.NAME) else 9.0
    call(x, w)
    (session,) = online._sessions.values()
    while len(session._elimination.running) > 1:
        call(x, w)
        assert {name for _, name in session._runs} <= set(session._elimination.running)
        assert len(trimmed) == session.ended


def test_a_matrix_that_is_written_as_a_convolution_is_not_autotuned(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    backend, problem = CpuBackend(), problem_of(x, w)
    assert len(backend.plan(problem).trials()) > 1
    monkeypatch.setattr("polyconv.cpu.planner.LARGEST_TIMED_WEIGHT", w.numel() - 1)
    assert backend.plan(problem).trials() == (preferences.plan(backend, problem).name,)


def test_memory_is_given_back() -> None:
    online.trim_memory()


def test_a_new_weight_in_every_call_ends_the_session(timed: Timed) -> None:
    x, _ = tensors()
    weights = [torch.randn(W) for _ in range(2)]
    for turn in range(3 * online.LONGEST):
        weights[turn % 2] = torch.randn(W)
        call(x, weights[turn % 2])
    assert not online._place(timed, problem_of(x, weights[0]), True)


@pytest.mark.parametrize("how", ["deterministic algorithms", "cudnn"])
def test_nothing_is_autotuned_where_determinism_is_asked_for(timed: Timed, how: str) -> None:
    x, w = tensors()
    torch.use_deterministic_algorithms(how != "cudnn")
    try:
        with torch.backends.cudnn.flags(deterministic=how == "cudnn"):
            results = [call(x, w) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert online.turns() == 0
    assert all(torch.equal(y, results[0]) for y in results)


def test_a_session_that_has_begun_pauses_for_determinism(timed: Timed) -> None:
    x, w = tensors()
    call(x, w)
    torch.use_deterministic_algorithms(True)
    try:
        results = [call(x, w) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert online.turns() == 1
    assert all(torch.equal(y, results[0]) for y in results)
    call(x, w)
    assert online.turns() == 2


PAUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a profiler": lambda x, w: _within_profiler(x, w),
    "vmap": lambda x, w: torch.func.vmap(lambda x: polyconv.conv2d(x, w, padding=1))(x[None]),
    "a function's gradient": lambda x, w: torch.func.grad(lambda x: polyconv.conv2d(x, w, padding=1).sum())(x),
    "autocast": lambda x, w: _within_autocast(x, w),
    "a compiled graph": lambda x, w: torch.compile(lambda x: call(x, w), backend="aot_eager")(x),
    "a fake call": lambda x, w: polyconv.explain(polyconv.conv2d, x, w, padding=1),
    "someone who watches": lambda x, w: _watched(x, w),
    "a choice that is forced": lambda x, w: _forced(x, w),
}


def _within_profiler(x: Tensor, w: Tensor) -> None:
    with profile():
        call(x, w)


def _within_autocast(x: Tensor, w: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(x, w)


def _watched(x: Tensor, w: Tensor) -> None:
    with preferences.watched():
        call(x, w)


def _forced(x: Tensor, w: Tensor) -> None:
    with preferences.Forced({}):
        call(x, w)


@pytest.mark.parametrize("case", PAUSED)
def test_it_pauses_for(timed: Timed, case: str) -> None:
    x, w = tensors()
    PAUSED[case](x, w)
    assert online.turns() == 0


def test_what_was_measured_is_not_autotuned(timed: Timed, tmp_path: Path) -> None:
    x, w = tensors()
    key = problem_key(problem_of(x, w), kept_weights=True)
    name = timed.plan(problem_of(x, w)).trials()[-1]
    tuning_file.update(
        tmp_path / "t.json", tuning_file.Tuning.of(timed.environment(), {key: tuning_file.Entry(name, {}, 1.0)})
    )
    with settings.use(tuning_file=(tmp_path / "t.json",)):
        call(x, w)
    assert online.turns() == 0
    call(x, w)
    assert online.turns() == 1


@pytest.mark.parametrize(("dtype", "turns"), [(torch.float64, 0), (torch.bfloat16, 3), (torch.float16, 3)])
def test_what_has_no_choice_is_not_autotuned(timed: Timed, dtype: torch.dtype, turns: int) -> None:
    x, w = (tensor.to(dtype) for tensor in tensors())
    for _ in range(3):
        call(x, w)
    assert online.turns() == turns


def test_who_fails_is_out(timed: Timed) -> None:
    x, w = tensors()
    names = timed.plan(problem_of(x, w), inference=True).trials()

    def seconds(name: str) -> float:
        if name == names[0]:
            raise RuntimeError("out of memory")
        return 1.0

    timed.seconds = seconds
    with pytest.warns(RuntimeWarning, match="autotuning of .* goes on without .*out of memory"):
        results = call_until_decided(x, w)
    assert all(torch.allclose(y, F.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4) for y in results)
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice != names[0]


def test_threads_share_a_session(timed: Timed) -> None:
    x, w = tensors()
    expected, wrong = F.conv2d(x, w, padding=1), []

    def run() -> None:
        for _ in range(40):
            if not torch.allclose(call(x, w), expected, rtol=1e-4, atol=1e-4):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    (session,) = online._sessions.values()
    assert session.ended
    assert preferences.plan(timed, problem_of(x, w), inference=True).choice.endswith(aten.NAME)


# ---- the switch


def test_the_switch() -> None:
    assert not settings.current().benchmark
    with polyconv.benchmark():
        assert settings.current().benchmark
        with polyconv.benchmark(False):
            assert not settings.current().benchmark
    assert not settings.current().benchmark
    polyconv.benchmark(True)
    assert settings.current().benchmark
    polyconv.benchmark(False)
    assert settings.Settings.from_environment({"POLYCONV_BENCHMARK": "on"}).benchmark


def test_what_was_autotuned_holds_after_the_block(timed: Timed) -> None:
    x, w = tensors()
    wanted = timed.plan(problem_of(x, w), inference=True).trials()[-1]
    timed.seconds = lambda name: 0.5 if name == wanted else 1.0
    call_until_decided(x, w)
    with polyconv.benchmark(False):
        call(x, w)
        assert preferences.plan(timed, problem_of(x, w), inference=True).choice == wanted


# ---- other processes

LATER = """
import sys, torch, polyconv
from polyconv.autotune import online
torch.set_num_threads(1)
x, w = torch.randn(2, 16, 24, 28), torch.randn(16, 16, 3, 3)
polyconv.benchmark()
with torch.no_grad():
    for _ in range(5):
        polyconv.conv2d(x, w, padding=1)
print(online.turns())
from polyconv.autotune import preferences
from polyconv.backend import backend_for
from polyconv.problem import Problem
problem = Problem.make("fprop", x.shape, w.shape, padding=(1, 1, 1, 1))
print(preferences.plan(backend_for(x.device), problem, inference=True).explain())
"""


def test_a_later_process_follows_what_was_saved(tmp_path: Path) -> None:
    x, w = tensors()
    path = tmp_path / "tuned.json"
    assert polyconv.save_benchmark(path) == 0
    assert not path.exists(), "there is nothing to save"
    with polyconv.benchmark():
        call_until_decided(x, w)
    assert polyconv.save_benchmark(path) == 1
    backend = backend_for(torch.device("cpu"))
    found = tuning_file.load(path).find(problem_key(problem_of(x, w), kept_weights=True), backend.environment())
    assert found is not None
    assert found.torch_seconds is not None
    assert len(found.seconds) == len(backend.plan(problem_of(x, w), inference=True).trials())
    said = python(LATER, POLYCONV_TUNING_FILE=str(path), XDG_CACHE_HOME=str(tmp_path))
    turns, _, explained = said.partition("\n")
    assert turns == "0", "it is settled"
    assert f"runs {found.choice}" in explained
    assert f"chosen by the tuning file {path}" in explained


def worker(rank: int, folder: str) -> None:
    """One of two ranks, each with another fastest candidate."""
    torch.set_num_threads(1)
    backend = Timed(lambda _: 1.0)
    online.clock = lambda: backend.now
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        x, w = tensors()
        names = backend.plan(problem_of(x, w), inference=True).trials()
        backend.seconds = lambda name: 0.5 if name == names[rank] else 1.0
        with warnings.catch_warnings(), the_backend.override("cpu", backend), polyconv.benchmark():
            warnings.simplefilter("error")
            call_until_decided(x, w)
            (session,) = online._sessions.values()
            assert session.entry is not None
            report = {
                "own": session.entry.choice,
                "runs": preferences.plan(backend, problem_of(x, w), inference=True).choice,
            }
        Path(folder, f"report{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_ranks_agree_on_the_winner(tmp_path: Path) -> None:
    mp.start_processes(worker, (str(tmp_path),), nprocs=2, start_method=PROCESSES.get_start_method())
    one, other = (json.loads((tmp_path / f"report{rank}.json").read_text()) for rank in range(2))
    assert one["own"] != other["own"]
    assert one["runs"] == other["runs"]
    assert one["runs"] in (one["own"], other["own"])


def test_a_call_is_timed_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on the stream of another device measures other work."""
    second, seen = torch.device("cuda", 1), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            seen.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    session = SimpleNamespace(_pending=None)
    tensors: Any = {"x": SimpleNamespace(is_cuda=True, device=second)}
    online.AutotuningSession._run_timed(session, "one", True, lambda _: seen.append("run"), tensors)  # type: ignore[arg-type]
    assert seen == ["stream of cuda:1", "run", "stream of cuda:1"]
    assert session._pending[0] == "one"
