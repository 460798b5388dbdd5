"""Candidates are compared by counts, and only the chosen one is packed: its launches match the counts."""

from __future__ import annotations

from collections import Counter

import pytest

from golden.record import problems, variants
from nightly import sampled
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.cuda.planner.plan import Launch, Task
from polyconv.cuda.planner.planner import DEFAULT_WORKSPACE, candidates
from polyconv.problem import Pass, Problem

V100 = DEVICES["v100"]
SEVERAL = ("kb50", "kb80", "resnet50-3down", "mobilenet-dw3", "context-d8")
VOLUMES = Problem.make(
    "fprop", (2, 32, 9, 14, 15), (48, 32, 3, 3, 3), stride=(2, 1, 1), padding=(1,) * 6, bias=True, dtype="float16"
).channels_last()
STRIDED = Problem.make("dgrad", (3, 24, 50, 41), (40, 24, 5, 7), stride=(3, 9), padding=(2, 0, 1, 3), dilation=(2, 1))
CASES = {
    **dict(problems()),
    **{name: problem for name, problem in variants() if name.split()[0] in SEVERAL},
    "a stride of 27 phases, of several kinds": STRIDED,
    "volumes": VOLUMES,
    "weight gradients of volumes": VOLUMES.for_pass(Pass.WGRAD),
}


def weigh(problem: Problem, workspace: int) -> int:
    """Compare every variant that takes the problem with its launches; returns their number."""
    found = 0
    for way in candidates(problem):
        if way.refusal(problem) is not None:
            continue
        weighed: Counter[object] = Counter()
        for task in way.tasks(problem, V100.sms, workspace):
            weighed[task.kernel, task.grid, task.work] += task.times
        launched = way.schedule(problem, V100.sms, workspace).launches
        assert weighed == Counter((one.kernel, one.grid, one.work) for one in launched), way.name
        found += 1
    return found


@pytest.mark.parametrize("name", [*dict.fromkeys([*sampled(CASES, 40, "weighing"), *list(CASES)[-2:]])])
def test_every_candidate_is_weighed_as_it_would_be_launched(name: str) -> None:
    assert weigh(CASES[name], DEFAULT_WORKSPACE)


@pytest.mark.parametrize("workspace", [1, 2**20, 2**30])
@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] in ("resnet50-3b", "kb86")])
def test_that_holds_for_any_workspace(name: str, workspace: int) -> None:
    assert weigh(CASES[name], workspace)


@pytest.mark.parametrize("kind", Pass, ids=str)
def test_only_what_is_chosen_is_packed(kind: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    pack = Task.launch

    def counted(*args: object) -> Launch:
        packed.append(args)
        return pack(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Task, "launch", counted)
    plan = plan_cuda(Problem.make(kind, (5, 24, 31, 29), (48, 24, 3, 3)), V100)
    assert len([c for c in plan.candidates if c.cost is not None]) > 5
    assert 0 < len(packed) <= len(plan.launches)
