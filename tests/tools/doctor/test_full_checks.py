"""``polyconv doctor --full`` on the virtual GPU: end to end, and every planted fault is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands import polyconv as command
from fake_cuda import execute
from nightly import NIGHTLY, nightly
from polyconv import cli
from polyconv.cli import doctor
from polyconv.cuda.planner import DEVICES, all_kernels
from polyconv.tools.doctor import environment, kernel_coverage
from polyconv.tools.doctor.check import Needs, Result, Verdict
from polyconv.tools.doctor.checks import CHECKS, SELECTIONS
from polyconv.tools.doctor.journal import SELF_TEST_KEYS, Journal
from polyconv.tools.doctor.runner import Runner
from polyconv.tools.doctor.session import about
from polyconv.tools.doctor.worker import run_part
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.doctor import PLANTS, SPOILT, VirtualGpuUnderTest
from virtual_gpu.gpu import VirtualGpu

VIRTUAL = (sys.executable, "-m", "virtual_gpu.doctor")
TWO_GPUS = {"FAKE_CUDA_DEVICES": "v100,v100", "OMP_NUM_THREADS": "1"}
IN_THE_ROUND = {name: CHECKS[name] for name in SELECTIONS["full" if NIGHTLY else "quick"]}
"""Checks with a process each. Parts of the others share one; nightly, in sessions."""


# ---- coverage


@pytest.mark.parametrize("name", ["v100", "t4", "b200"])
def test_every_kernel_has_a_small_problem(name: str) -> None:
    found = kernel_coverage.ways(DEVICES[name])
    assert found.keys() == {kernel.symbol for kernel in all_kernels(DEVICES[name].arch)}
    assert all(symbol in {kernel.symbol for kernel in way.kernels} for symbol, way in found.items())
    kept = kernel_coverage.fewest(found)
    assert {kernel.symbol for way in kept.values() for kernel in way.kernels} == found.keys()
    assert len(kept) < len(found)


@nightly
def test_every_kernel_proves_itself() -> None:
    """Kernels that a full session forces by name; in most test runs, one of each family."""
    found = run_in_virtual_gpu(_prove_all, timeout=1500)
    assert {symbol: answer.words for symbol, answer in found.items() if answer.verdict is not Verdict.OK} == {}
    assert len(found) > 200


def _prove_all() -> dict[str, Result]:
    with VirtualGpu(execute) as gpu:
        subject = VirtualGpuUnderTest(gpu)
        subject.some = lambda every, quickly: list(every)  # type: ignore[method-assign]
        found = {symbol: run_part(part) for symbol, part in CHECKS["every kernel"].parts(subject).items()}
        return {symbol: result for symbol, result in found.items() if result.verdict is not Verdict.NOT_HERE}


def test_quick_and_the_self_test_are_parts_of_full() -> None:
    assert SELECTIONS["self-test"] == tuple(SELF_TEST_KEYS.values())
    for names in SELECTIONS.values():
        assert list(names) == [name for name in CHECKS if name in names]  # in the order of full


# ---- end to end


def test_a_full_round(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Twice: the second time nothing is missing, and nothing is checked."""
    assert run_in_virtual_gpu(_full, tmp_path / "report.json", timeout=880, environment=TWO_GPUS) == [0, 0]
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["ok"]
    assert found["complete"] == list(IN_THE_ROUND)
    verdicts = {
        name: {one["verdict"] for one in found["results"] if one["examination"] == name} for name in IN_THE_ROUND
    }
    for name, check in IN_THE_ROUND.items():
        expected = {"not here"} if check.needs is Needs.TORCH else {"ok"}
        assert verdicts[name] - {"not here"} == expected - {"not here"}, name
        assert verdicts[name] >= expected, name
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith("Virtual Tesla V100")
    assert "not here side stream needs a CUDA build of PyTorch" in " ".join(text.split())
    assert "All is well." in text
    assert len(text.splitlines()) < 40
    assert "resuming" in capfd.readouterr().err


def _full(path: Path) -> list[int]:
    subject, runner = VirtualGpuUnderTest(VirtualGpu()), Runner(command=VIRTUAL, sanitizer="")
    journals = (Journal(path, about(subject, "full")) for _ in range(2))
    return [doctor.run_session(journal, subject, runner, IN_THE_ROUND) for journal in journals]


def test_the_checks_that_are_not_in_the_round() -> None:
    found = run_in_virtual_gpu(_parts_of_the_others, timeout=300, environment=TWO_GPUS)
    for name, answers in found.items():
        assert {answer.verdict for answer in answers.values()} - {Verdict.NOT_HERE} == {Verdict.OK}, (name, answers)


def _parts_of_the_others() -> dict[str, dict[str, Result]]:
    with VirtualGpu(execute) as gpu:
        return {
            name: {part: answered() for part, answered in one.parts(VirtualGpuUnderTest(gpu)).items()}
            for name, one in CHECKS.items()
            if name not in (*IN_THE_ROUND, "every pass") and one.needs is not Needs.TORCH
        }


# ---- planted faults


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("out of bounds", "every kernel", "a kernel wrote outside y: 4 bytes before it, the nearest 9 away"),
        ("uninitialised", "every kernel", "1 elements of y are NaN: not written, or computed from uninitialised"),
        ("wrong result", "every kernel", "error 3.3e-03, allowed 1e-04"),
        (
            "launch",
            "every kernel",
            f"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (too many resources requested for launch) when launching {SPOILT}",
        ),
        ("occupancy", "occupancy", "a multiprocessor holds 2 blocks of it, and 8 were planned with"),
    ],
)
def test_a_planted_fault_is_found(fault: str, check: str, words: str, tmp_path: Path) -> None:
    assert fault in (*PLANTS, "launch")
    status, journal = run_in_virtual_gpu(_one, check, fault, tmp_path / "report.json", timeout=300)
    (result,) = journal.results
    slow = fault == "occupancy"
    assert result.part == SPOILT
    assert result.verdict is (Verdict.WARNING if slow else Verdict.PROBLEM)
    assert words in result.words
    assert status == (0 if slow else 1)
    assert words[:40] in (tmp_path / "report.txt").read_text()


def _one(name: str, fault: str, path: Path) -> tuple[int, Journal]:
    planted = Runner(command=VIRTUAL, environment={"PLANTED": fault}, sanitizer="")
    subject = VirtualGpuUnderTest(VirtualGpu())
    status = doctor.run_session(Journal(path, about(subject, "full")), subject, planted, {name: CHECKS[name]})
    journal = Journal(path, about(subject, "full"))
    assert journal.resume() == ""
    return status, journal


# ---- the command


def test_without_a_gpu_there_is_nothing_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "gpus", list)
    assert cli.main(["doctor", "--full"]) == 2
    assert "there is no GPU to check: polyconv doctor --self-test tests the CPU's kernels" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_quick_and_full_are_two_commands(tmp_path: Path) -> None:
    ran = command("doctor", "--full", "--quick", cwd=tmp_path)
    assert ran.returncode == 2
    assert "not allowed with" in ran.stderr


def test_results_read_well() -> None:
    assert str(Result("training", "", Verdict.OK, "fine")) == "training: fine"
    assert str(Result("layouts", "windows", Verdict.OK, "fine")) == "layouts, windows: fine"
