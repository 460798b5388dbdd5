"""Planning of new sizes: few candidates are evaluated, and the choice is that of the full ranking."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from polyconv.cpu import native, planner
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines.in_torch import fourier
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import CpuPlan, plan_cpu
from polyconv.cpu.profiles import Profile, shipped
from polyconv.problem import Pass, Problem
from polyconv.selection import select

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

(KNOWN,) = (known.read() for known in shipped("avx512") if known.threads == 1)
MEASURED = CpuDevice("avx512", cores=1, profile=Profile(str(KNOWN), KNOWN.records))
BARE = CpuDevice("avx2", cores=8)
LAYERS = {
    "3x3": ((64, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
    "1x1": ((64, 256, 1, 1), {}),
    "5x9": ((64, 32, 5, 9), {"dilation": (2, 3), "padding": (2, 2, 4, 4)}),
    "image": ((64, 3, 7, 7), {"stride": (2, 2), "padding": (3, 3, 3, 3)}),
    "strided": ((128, 64, 3, 3), {"stride": (2, 2), "padding": (1, 1, 1, 1)}),
    "depthwise": ((96, 1, 7, 7), {"groups": 96, "padding": (3, 3, 3, 3)}),
    "signal": ((128, 128, 1, 7), {"dilation": (1, 3), "padding": (0, 0, 9, 9)}),
}


def problems(count: int, seed: int) -> Iterator[tuple[Problem, bool]]:
    """Random sizes of all layers and passes, with the inference flag."""
    draw = random.Random(seed)
    for _ in range(count):
        (k, c, r, s), options = LAYERS[draw.choice(sorted(LAYERS))]
        size = (1 if r == 1 and s == 7 else draw.randint(12, 160), draw.randint(12, 160))
        kind = draw.choice(list(Pass))
        shape = (draw.choice([1, 2, 3, 8, 17]), c * options.get("groups", 1), *size)
        problem = Problem.make(kind, shape, (k, c, r, s), bias=kind is Pass.FPROP and draw.random() < 0.5, **options)
        problem = problem.channels_last() if draw.random() < 0.5 else problem
        yield replace(problem, tolerance=draw.choice([1e-4, 1e-5, 1e-6, 0.0])), draw.random() < 0.5


@pytest.mark.parametrize("device", [MEASURED, BARE], ids=["by a profile", "by the cost model"])
def test_the_choice_is_that_of_the_whole_ranking(device: CpuDevice) -> None:
    for problem, inference in problems(300, 1):
        plan = plan_cpu(problem, device, inference=inference)
        every = [one for engine in planner.ENGINES for one in engine.candidates(plan.ran, device)]
        found = select(
            every,
            problem,
            refusal=lambda one: one.refusal,
            error=lambda one: one.error,
            cost=plan.costs.cautious,
        )
        assert plan.chosen == found.chosen
        assert plan.candidates == found.candidates
        assert plan.cost == found.weighed.cost


def test_no_plan_depends_on_what_was_planned_before() -> None:
    """In another order and another process: equal choices and costs, bit by bit."""
    script = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); import test_new_sizes as tests;"
        "print(json.dumps(tests.choices(reverse=True)))"
    )
    path = json.dumps([str(__import__("pathlib").Path(__file__).parent), *sys.path])
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == choices(reverse=False)


def choices(*, reverse: bool) -> list[list[object]]:
    """Plans of 200 problems, in either order."""
    asked = list(problems(200, 2))
    order = sorted(range(len(asked)), reverse=reverse)
    plans = {place: plan_cpu(asked[place][0], MEASURED, inference=asked[place][1]) for place in order}
    return [[plans[place].choice, plans[place].cost, plans[place].predicted_error] for place in range(len(asked))]


def test_few_errors_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some twenty candidates only the cheapest are predicted, until one keeps the tolerance."""
    asked: list[str] = []
    error = CpuCandidate.error.fget
    assert error is not None

    def noted(candidate: CpuCandidate) -> float:
        asked.append(candidate.name)
        return float(error(candidate))

    monkeypatch.setattr(CpuCandidate, "error", property(noted))
    plan: CpuPlan = plan_cpu(Problem.make("fprop", (3, 64, 77, 78), (64, 64, 3, 3)), BARE, inference=True)
    assert len(asked) <= 2
    assert len(plan.candidates) > 15
    assert len(asked) > 10, "explain asks for the error of every candidate"


def test_a_new_size_is_planned_in_a_millisecond() -> None:
    """Best processor time of many: other processes only ever add to it."""
    sizes = random.Random(3)

    def best(inference: bool, *kinds: Pass) -> float:
        least = float("inf")
        for _ in range(60):
            shape = (sizes.randint(1, 8), 64, sizes.randint(12, 200), sizes.randint(12, 200))
            asked = [Problem.make(kind, shape, (64, 64, 3, 3), padding=(1, 1, 1, 1)) for kind in kinds]
            began = time.process_time()
            for problem in asked:
                plan_cpu(problem, MEASURED, inference=inference)
            least = min(least, time.process_time() - began)
        return least * 1e3

    assert best(True, Pass.FPROP) < 1.5  # 0.5 on a quiet machine
    assert best(False, *Pass) < 4.5  # 1.5


def test_signals_of_similar_lengths_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new length asks one engine, and its plan is that of the next smaller round length, which alone is ranked."""
    asked: list[int] = []
    candidates = fourier.candidates

    def noted(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
        asked.append(problem.in_size[1])
        return candidates(problem, device)

    monkeypatch.setattr(fourier, "candidates", noted)
    for length in (3000, 2945, 3007):
        plan = plan_cpu(Problem.make("fprop", (1, 64, 1, length), (64, 64, 1, 5)), MEASURED, inference=True)
        assert length not in asked
        similar = plan_cpu(Problem.make("fprop", (1, 64, 1, 2944), (64, 64, 1, 5)), MEASURED, inference=True)
        assert plan.choice == similar.choice
        assert "chosen for signals of 2944 samples" in plan.reason
        assert plan.problem.in_size == plan.ran.in_size == (1, length)
    assert asked.count(2944) == 1


def test_lines_say_what_the_file_says() -> None:
    """A profile parsed lazily equals one with all records parsed."""
    for known in (one for name in ("avx512", "avx2") for one in shipped(name)):
        section = known.read()
        lazy, whole = Profile("lazy", section.records), Profile("whole", tuple(section.records))
        for kind in Pass:
            one, other = lazy._measured(kind), whole._measured(kind)
            assert {room: [(at, errors()) for at, errors in there] for room, there in one.items()} == {
                room: [(at, errors()) for at, errors in there] for room, there in other.items()
            }


def test_the_first_plan_reads_a_few_lines_of_a_profile() -> None:
    """The first plan of a process parses only the records of one pass near one layer."""
    (section,) = (known.read() for known in shipped("avx512") if known.threads == 1)
    profile = Profile("fresh", section.records)
    problem = Problem.make("fprop", (1, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
    plan_cpu(problem, CpuDevice("avx512", cores=1, profile=profile), inference=True)
    read = [errors for there in profile._measured(Pass.FPROP).values() for _, errors in there if errors._found]  # type: ignore[attr-defined]
    assert 0 < len(read) < len(section.records) / 10
    assert profile._measured.cache_info().currsize == 1
    assert section.records._records is None  # type: ignore[attr-defined]
