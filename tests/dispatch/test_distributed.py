"""Several processes: all ranks run the same plans, whatever each would choose alone."""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import polyconv
from fresh import PROCESSES
from polyconv import settings
from polyconv.autotune import preferences, rank_consensus, tuning_file
from polyconv.autotune.tuning_file import Entry, Tuning
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.measure.timing import Timing
from polyconv.problem import Pass, Problem
from polyconv.runtime import state_version
from polyconv.tuning_key import problem_key

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

SIZE = (2, 8, 20, 24)
"""Input shape of one rank."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, (3, 5), padding=(1, 2))
        self.second = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


def problems() -> list[Problem]:
    """Problems of one training step on dense tensors, with y.sum()'s gradient."""
    with preferences.watched() as seen:
        net = Net()
        polyconv.replace(net)
        net(torch.randn(SIZE)).square().mean().backward()
    return [decision.problem for decision in seen]


def cpu_backend() -> CpuBackend:
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    return backend


def write_tuning(path: Path, rank: int) -> None:
    """A tuning file per rank that prefers different candidates, if there are enough."""
    entries = {}
    for problem in problems():
        for inference in (False, True):
            names = candidate_names(cpu_backend(), problem, inference=inference)
            kept = inference and problem.kind is Pass.FPROP
            entries[problem_key(problem, kept_weights=kept)] = Entry(names[rank % len(names)], {}, 1.0)
    tuning_file.update(path, Tuning.of(cpu_backend().environment(), entries))


def data(rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=draw), torch.randn(SIZE[0], 4, 18, 22, generator=draw)


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], steps: int = 3) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for _ in range(steps):
        optimiser.zero_grad()
        (model(x) - target).square().mean().backward()
        optimiser.step()


def network() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def worker(rank: int, world: int, folder: str) -> None:
    """One rank: plans alone, joins, plans again, trains; records its plans."""
    torch.set_num_threads(1)
    os.environ["POLYCONV_TUNING_FILE"] = f"{folder}/tuning{rank}.json"
    asked, backend = problems(), cpu_backend()
    report: dict[str, Any] = {"alone": [preferences.plan(backend, problem).choice for problem in asked]}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        report["together"] = [preferences.plan(backend, problem).choice for problem in asked]
        report["reasons"] = [preferences.plan(backend, problem).reason for problem in asked]
        if rank == 0:  # a problem of this rank only: no waiting
            polyconv.conv2d(torch.randn(1, 8, 31, 33), torch.randn(4, 8, 3, 3))
        dist.barrier()
        model = network()
        polyconv.replace(model)
        with preferences.watched() as seen:
            train(nn.parallel.DistributedDataParallel(model), [data(rank)])
        report["trained"] = sorted((decision.key, decision.choice) for decision in seen)
        torch.save(model.state_dict(), f"{folder}/state{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    report["afterwards"] = [preferences.plan(backend, problem).choice for problem in asked]
    Path(folder, f"report{rank}.json").write_text(json.dumps(report))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_would_choose_differently_run_the_same(world: int, tmp_path: Path) -> None:
    for rank in range(world):
        write_tuning(tmp_path / f"tuning{rank}.json", rank)
    mp.start_processes(worker, (world, str(tmp_path)), nprocs=world, start_method=PROCESSES.get_start_method())
    reports = [json.loads((tmp_path / f"report{rank}.json").read_text()) for rank in range(world)]

    assert len({tuple(report["alone"]) for report in reports}) == world, "the tuning files must differ"
    assert len({tuple(report["together"]) for report in reports}) == 1
    assert all(report["afterwards"] == report["alone"] for report in reports)
    assert all(report["trained"] == reports[0]["trained"] for report in reports)
    assert {key.split()[0] for key, _ in reports[0]["trained"]} == {"fprop", "dgrad", "wgrad"}
    for place, agreed in enumerate(reports[0]["together"]):
        assert agreed in [report["alone"][place] for report in reports], "the choice of one rank"
        for report in reports:
            adopted = report["alone"][place] != agreed
            assert ("agreed with the other ranks" in report["reasons"][place]) is adopted

    states = [torch.load(tmp_path / f"state{rank}.pt") for rank in range(world)]
    plain = network()
    train(plain, [data(rank) for rank in range(world)])
    for name, expected in plain.state_dict().items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        torch.testing.assert_close(states[0][name], expected, rtol=1e-3, atol=1e-5)


# ---- one process in a group of two

PROBLEM = Problem.make("fprop", (1, 16, 24, 24), (16, 16, 3, 3))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of a group of two; the other rank may have written to it."""
    shared = dist.HashStore()
    monkeypatch.setattr(rank_consensus, "ranks", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
    return shared


def plan_again() -> Any:
    with preferences.Forced({}):  # a new state version: no earlier plan is found
        return preferences.plan(cpu_backend(), PROBLEM)


def test_the_first_writes_and_the_others_adopt(store: dist.HashStore) -> None:
    mine = plan_again()
    assert plan_again() == mine
    other = next(name for name in candidate_names(cpu_backend(), PROBLEM) if name != mine.choice)
    measured = preferences.remember(cpu_backend().environment(), {problem_key(PROBLEM): other})
    try:
        adopted = plan_again()
        assert adopted.choice == mine.choice
        assert "agreed with the other ranks" in adopted.reason
    finally:
        preferences.forget(measured)


def test_what_optimize_measures_is_what_is_agreed_upon(store: dist.HashStore) -> None:
    """The published choice, not the cost model's."""
    conv, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 24, 24)
    asked: list[str] = []

    def timer(what: str, calls: Mapping[str, Any], _: Any) -> dict[str, Timing]:
        asked.extend([name for name in calls if name.endswith(" lanes")][-1:])
        theirs = {"PyTorch", "before", "before, again"}
        return {n: Timing(t, t) for n in calls for t in [9.0 if n in theirs else 1.0 if n in asked else 2.0]}

    _, report = polyconv.optimize(conv, x, timer=timer, quiet=True)
    try:
        assert list(report.choices.values()) == asked
        with preferences.watched() as seen, torch.no_grad():
            conv(x)
        assert {decision.key: decision.choice for decision in seen} == report.choices
    finally:
        report.undo()


def test_keys_are_per_kind_of_device_and_problem(store: dist.HashStore) -> None:
    assert rank_consensus.agree("cpu", "a", "one") == "one"
    assert rank_consensus.agree("cpu", "a", "two") == "one"
    assert rank_consensus.agree("cuda", "a", "two") == "two"
    assert rank_consensus.agree("cpu", "b", "two") == "two"


def test_what_cannot_run_here_is_said_and_the_model_decides(store: dist.HashStore) -> None:
    rank_consensus.agree("cpu", problem_key(PROBLEM), "F(99,3) on tubes")
    with pytest.warns(RuntimeWarning, match=r"the other ranks run 'F\(99,3\) on tubes'.*cannot run it here"):
        plan = plan_again()
    assert plan.choice == candidate_names(cpu_backend(), PROBLEM)[0]
    assert "not F(99,3) on tubes, although agreed with the other ranks" in plan.reason


def test_a_store_that_fails_leaves_each_rank_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(rank_consensus, "ranks", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", broken)
    with pytest.warns(RuntimeWarning, match="Broken pipe"):
        assert plan_again().choice == candidate_names(cpu_backend(), PROBLEM)[0]


def test_a_group_of_one_asks_nobody(tmp_path: Path) -> None:
    before = state_version.current()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert state_version.current() != before
        assert rank_consensus.ranks() == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert preferences.plan(cpu_backend(), PROBLEM).choice
    finally:
        dist.destroy_process_group()
    assert rank_consensus.group() is None
    assert settings.current().tuning_file == ()


def test_plans_are_made_anew_when_the_group_comes_and_goes() -> None:
    """Also if only the state version records the group."""
    versions = [state_version.current()]
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        versions.append(state_version.current())
        dist.destroy_process_group()
        gc.collect()
        versions.append(state_version.current())
    assert len(set(versions)) == len(versions)
    assert state_version.current() == versions[-1]
