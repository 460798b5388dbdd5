"""``polyconv doctor``: findings, a self-test that detects faults, and the report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commands import polyconv as command
from polyconv import cli, settings
from polyconv.autotune import tuning_file
from polyconv.backend import Run, backend_for, override
from polyconv.cli import doctor
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cuda import CompileError
from polyconv.cuda.planner.planner import FAMILIES, family_name
from polyconv.measure.workloads import Workload, find
from polyconv.problem import Pass, Problem
from polyconv.tools.doctor import environment, kernel_coverage
from polyconv.tools.doctor.environment import Finding, State
from polyconv.tools.doctor.quick import correctness, speed
from polyconv.tools.doctor.summary import Report
from polyconv.util.console import Progress
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

CPU = torch.device("cpu")


def named(found: list[Finding], name: str) -> Finding:
    (one,) = (finding for finding in found if finding.name == name)
    return one


# ---- findings


def test_a_machine_without_a_gpu_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_driver", lambda: False)
    found = environment.findings()
    assert all(finding.state is not State.PROBLEM for finding in found), found
    assert named(found, "GPU").text.startswith("none")
    assert torch.__version__ in named(found, "PyTorch").text
    assert "cuda tensors" not in {finding.name for finding in found}


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_absent", lambda: "this installation has no native CPU kernels")
    found = environment.findings()
    assert named(found, "CPU").state is State.WARNING
    assert named(found, "cpu tensors").text == "PyTorch's convolution"


def test_settings_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCONV_TUNING_FILE")
    monkeypatch.setenv("POLYCONV_TOLERANCE", "1e-3")
    monkeypatch.setenv("POLYCONV_TOLERENCE", "1e-3")
    found = list(environment._settings())
    assert "POLYCONV_TOLERANCE=1e-3 (environment)" in [finding.text for finding in found]
    assert "WORKSPACE_BYTES=67108864" in named(found, "settings").text
    assert found[-1].advice == "did you mean POLYCONV_TOLERANCE?"
    assert found[-1].state is State.WARNING


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with settings.use(cache_dir=tmp_path / "file" / "cache"):
        found = named(environment.findings(), "cache")
    assert found.state is State.WARNING
    assert "POLYCONV_CACHE_DIR" in found.advice


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    with settings.use(kernels=tmp_path):
        found = named(environment.findings(), "bundle")
    assert found.state is State.PROBLEM
    assert "no manifest.json" in found.text


def test_tuning_files(tmp_path: Path) -> None:
    here = backend_for(CPU).environment()
    entry = tuning_file.Entry("direct", {"direct": 1.0}, 1.0)
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    tuning_file.update(good, tuning_file.Tuning.of(here, {"a": entry, "b": entry}))
    tuning_file.update(good, tuning_file.Tuning.of(replace(here, name="another processor"), {"a": entry}))
    bad.write_text("{}")
    with settings.use(tuning_file=(good, bad, tmp_path / "absent.json"), cache_dir=tmp_path):
        found = [one for one in environment.findings() if one.name == "tuning"]
    assert found[0].text == f"{good}: 3 choices, 2 of them measured on this machine"
    assert [one.state for one in found] == [State.OK, State.WARNING, State.WARNING]
    assert "is not a tuning file" in found[1].text
    assert "does not exist" in found[2].text


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(environment, "processor_name", broken)
    assert named(environment.findings(), "cpu").text == "RuntimeError: no idea"


def test_with_a_gpu() -> None:
    """The driver is present but this PyTorch cannot use it: a warning."""
    found = run_in_virtual_gpu(environment.findings)
    assert "V100" in named(found, "GPU 0").text
    assert "sm_70" in named(found, "GPU 0").text
    assert named(found, "PyTorch on GPU").state is State.WARNING
    assert named(found, "driver").state is State.OK
    assert named(found, "compiler").state is State.OK


@pytest.mark.parametrize("jit", ["on", "off"])
def test_a_gpu_without_a_compiler(jit: str) -> None:
    found = run_in_virtual_gpu(_without_compiler, environment={"POLYCONV_JIT": jit})
    assert named(found, "compiler").state is (State.PROBLEM if jit == "on" else State.OK)
    assert ("polyconv[cu12]" in named(found, "compiler").advice) == (jit == "on")
    assert named(found, "cuda tensors").state is (State.PROBLEM if jit == "on" else State.OK)


def _without_compiler() -> list[Finding]:
    def absent() -> None:
        raise CompileError("NVRTC was not found")

    def unknown(arch: str) -> None:
        absent()

    environment.compiler_id = absent  # type: ignore[assignment]
    environment.check_arch = unknown
    torch.cuda.is_available = lambda: True
    return environment.findings()


# ---- correctness


def test_every_family_and_pass_is_tried_on_a_gpu() -> None:
    """On the virtual V100, from plan to machine code, all results are correct."""
    report = run_in_virtual_gpu(_gpu_self_test, timeout=600)
    assert "V100" in report.device
    assert [str(failure) for failure in report.failures] == []
    tried = {(outcome.family, outcome.case.rpartition(", ")[2]) for outcome in report.outcomes}
    both, gradient = {"fprop", "dgrad"}, {"wgrad"}
    passes = {
        "implicit_gemm/fprop_dgrad": both,
        "implicit_gemm/wgrad": gradient,
        "implicit_gemm/wgrad_1x1": gradient,
        "depthwise/halo": both | gradient,
        "depthwise/strip": both | gradient,
        "winograd/nonfused": both,
        "winograd/fused": both,
        "winograd/wgrad": gradient,
        "winograd_fp16x3/nonfused": both,
        "winograd_fp16x3/fused": both,
        "winograd_fp16x3/wgrad": gradient,
    }
    float32 = [family for family in FAMILIES if not hasattr(family, "DTYPES")]
    assert set(passes) == {family_name(family) for family in float32}
    assert tried == {(family, kind) for family, kinds in passes.items() for kind in kinds}


def _gpu_self_test() -> Report:
    """The command's own self-test, with the GPU computing on the memory of CPU tensors."""
    (gpu,), report = environment.gpus(), Report()
    with VirtualGpu() as virtual:
        trials = list(correctness.cuda_trials(gpu.description, lambda planner: virtual.backend(planner=planner)))
        with patch.object(doctor, "gpu_subject", lambda _: (CPU, trials)):
            doctor.self_test(report, gpu, Progress(), timing=False)
    return report


def test_a_gpu_that_does_not_work_is_an_answer() -> None:
    """PyTorch's CPU build as one that cannot reach the GPU: every trial fails with a reason, none escapes."""
    device, trials, outcome, contest = run_in_virtual_gpu(_unreachable_gpu)
    assert device == torch.device("cuda", 0)
    assert trials > 50
    assert "CUDA" in outcome.failure
    assert not outcome.ok
    assert "CUDA" in contest.failure
    assert not contest.ok


def _unreachable_gpu() -> tuple[torch.device, int, correctness.Outcome, speed.Contest]:
    device, trials = doctor.gpu_subject(environment.gpus()[0])
    outcome = correctness.attempt(trials[0], device)
    return device, len(trials), outcome, next(speed.contests(find("W1"), device))


def test_every_engine_of_the_cpu_is_tried() -> None:
    trials = list(correctness.cpu_trials())
    outcomes = correctness.run(trials, CPU, lambda what: None)
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == []
    if native.is_available():
        assert {trial.family for trial in trials} >= {"tile lanes", "channel lanes", "depthwise", "plain"}


class Broken(CpuBackend):
    """A backend with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        right = super().prepare(problem, inference=inference)
        output = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "dw"}[problem.kind]

        def wrong(tensors: MutableMapping[str, Tensor]) -> None:
            if self.fault == "raises":
                raise RuntimeError("no kernel image is available")
            if self.fault == "nothing is written":
                return
            right(tensors)
            if self.fault == "one element":
                tensors[output].view(-1)[7] += 0.01 * tensors[output].std()
            else:
                tensors[next(name for name in tensors if name != output)].view(-1)[0] += 1

        return wrong


@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "RuntimeError: no kernel image is available"),
        ("nothing is written", "error inf"),
        ("one element", "error "),
        ("input", "the run changed its input"),
    ],
)
def test_the_self_test_notices(kind: Pass, fault: str, words: str) -> None:
    problem = kernel_coverage.CASES["3x3"].problem(kind)
    trial = correctness.Trial("3x3", problem, "broken", "a plan", lambda: Broken(fault))
    outcome = correctness.attempt(trial, CPU)
    assert not outcome.ok
    assert words in str(outcome)
    json.dumps(outcome.as_json(), allow_nan=False)
    assert correctness.attempt(replace(trial, backend=CpuBackend), CPU).ok


# ---- speed, with a fake clock


def small() -> list[Workload]:
    return [replace(workload, input=(2, workload.input[1], 24, 40)) for workload in find("headline")]


def clock(seconds: dict[int, float]) -> Callable[[Callable[[], object], int], float]:
    """Each callable takes its own time, in order."""
    seen: list[object] = []

    def timer(call: Callable[[], object], times: int) -> float:
        call()
        if call not in seen:
            seen.append(call)
        return seconds[seen.index(call) % len(seconds)]

    return timer


def test_contests() -> None:
    found = list(speed.contests(small(), CPU, timer=clock({0: 2e-3, 1: 5e-3})))
    assert [(c.workload, c.kind) for c in found] == [(f"W{n}", str(kind)) for n in (1, 2, 3) for kind in Pass]
    for contest in found:
        assert (contest.ours_ms, contest.torch_ms, contest.ratio) == (2.0, 5.0, 2.5)
        assert contest.ok
        assert (contest.batch, contest.whole_batch) == (2, 2)


def test_a_batch_that_does_not_fit_is_cut() -> None:
    (workload,) = find("W2")
    assert speed._batch(workload, 16 * 2**30, None) == 10
    assert speed._batch(workload, 80 * 2**30, None) == 16
    assert speed._batch(workload, 2**20, None) == 1
    assert speed._batch(workload, 80 * 2**30, 1) == 1


def test_a_wrong_or_failing_result_is_noticed_in_a_contest() -> None:
    for fault, words in (("one element", "deviation"), ("raises", "no kernel image")):
        with override("cpu", Broken(fault)):
            found = list(speed.contests(small()[1:2], CPU, timer=clock({0: 1e-3})))
        wgrad = found[-1]
        assert not wgrad.ok
        assert words in str(wgrad)


# ---- the report and the command


def test_what_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    outcome = correctness.Outcome("3x3", "direct", "a plan", 1e-6, 1e-4)
    report = Report([Finding("cache", State.OK, "/home/somebody/.cache/polyconv, 3 kernels")], "cpu", [outcome])
    assert report.ok
    report.write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert "somebody" not in text
    assert os.uname().nodename not in text
    found = json.loads(text)
    assert found["findings"][0]["text"] == "~/.cache/polyconv, 3 kernels"
    assert found["self_test"]["correctness"][0]["ok"]
    report.outcomes = [outcome, replace(outcome, error=1.0)]
    assert not report.ok
    assert [str(failure) for failure in report.failures] == ["3x3, direct (a plan): error 1.0e+00, allowed 1e-04"]
    assert not Report([Finding("GPU", State.PROBLEM, "broken")]).ok
    assert Report([Finding("GPU", State.WARNING, "slow")]).ok


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test of three trials and one contest."""
    trials = [trial for trial in correctness.cpu_trials() if trial.case.startswith("3x3, depthwise")][:3]
    contests = list(speed.contests(small()[:1], CPU, timer=clock({0: 2e-3, 1: 5e-3})))
    monkeypatch.setattr(correctness, "cpu_trials", lambda: trials)
    monkeypatch.setattr(speed, "contests", lambda *_, **__: iter(contests))


@pytest.mark.usefixtures("quick")
def test_the_command_tests_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--self-test"]) == 0
    printed = capsys.readouterr()
    assert "Kernels on cpu, against float64" in printed.out
    assert "2.50" in printed.out
    assert "no user or host name" in printed.err
    found: dict[str, Any] = json.loads((tmp_path / "polyconv-report.json").read_text())
    assert len(found["self_test"]["correctness"]) == 3
    assert [one["pass"] for one in found["self_test"]["speed"]] == ["fprop", "dgrad", "wgrad"]
    assert cli.main(["doctor", "--self-test", "--json", "-o", "mine.json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "mine.json").read_text())


@pytest.mark.usefixtures("quick")
def test_something_broken_is_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trials = correctness.cpu_trials()
    monkeypatch.setattr(
        correctness, "cpu_trials", lambda: [replace(trial, backend=lambda: Broken("raises")) for trial in trials]
    )
    assert cli.main(["doctor", "--self-test"]) == 1
    assert "PROBLEM 3x3, depthwise, fprop" in capsys.readouterr().out


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    ran = command("doctor", "--json", cwd=tmp_path, POLYCONV_CACHE_DIR=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["ok"]
    assert {one["name"] for one in found["findings"]} >= {"polyconv", "PyTorch", "CPU", "GPU", "cache", "cpu tensors"}
    assert list(tmp_path.iterdir()) == []
