"""``polyconv doctor``: findings, a self-test that detects faults, and the report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import polyconv as command
from polyconv import cli, settings
from polyconv.autotune import tuning_file
from polyconv.backend import Run, backend_for, override
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.planner import CpuPlan
from polyconv.cuda import CompileError
from polyconv.cuda.planner.planner import FAMILIES, family_name
from polyconv.measure import workloads
from polyconv.problem import Pass
from polyconv.tools.doctor import environment, runner
from polyconv.tools.doctor.check import Check, Result, Verdict
from polyconv.tools.doctor.checks import CHECKS, SELECTIONS
from polyconv.tools.doctor.device_under_test import DeviceUnderTest, GpuUnderTest
from polyconv.tools.doctor.environment import Finding
from polyconv.tools.doctor.journal import Journal
from polyconv.tools.doctor.runner import Runner
from polyconv.tools.doctor.session import about
from polyconv.tools.doctor.summary import summary
from polyconv.tools.doctor.worker import run_part
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.doctor import VirtualGpuUnderTest
from virtual_gpu.gpu import VirtualGpu

CPU = DeviceUnderTest(quick=True)
PASSES, WORKLOADS = (CHECKS[name] for name in SELECTIONS["self-test"])


def named(found: list[Finding], name: str) -> Finding:
    (one,) = (finding for finding in found if finding.name == name)
    return one


# ---- findings


def test_a_machine_without_a_gpu_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_driver", lambda: False)
    found = environment.findings()
    assert all(finding.state is not Verdict.PROBLEM for finding in found), found
    assert named(found, "GPU").text.startswith("none")
    assert torch.__version__ in named(found, "PyTorch").text
    assert "cuda tensors" not in {finding.name for finding in found}


def test_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_absent", lambda: "this installation has no native CPU kernels")
    found = environment.findings()
    assert named(found, "CPU").state is Verdict.WARNING
    assert named(found, "cpu tensors").text == "PyTorch's convolution"


def test_settings_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCONV_TUNING_FILE")
    monkeypatch.setenv("POLYCONV_TOLERANCE", "1e-3")
    monkeypatch.setenv("POLYCONV_TOLERENCE", "1e-3")
    found = list(environment._settings())
    assert "POLYCONV_TOLERANCE=1e-3 (environment)" in [finding.text for finding in found]
    assert "WORKSPACE_BYTES=67108864" in named(found, "settings").text
    assert found[-1].advice == "did you mean POLYCONV_TOLERANCE?"
    assert found[-1].state is Verdict.WARNING


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with settings.use(cache_dir=tmp_path / "file" / "cache"):
        found = named(environment.findings(), "cache")
    assert found.state is Verdict.WARNING
    assert "POLYCONV_CACHE_DIR" in found.advice


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    with settings.use(kernels=tmp_path):
        found = named(environment.findings(), "bundle")
    assert found.state is Verdict.PROBLEM
    assert "no manifest.json" in found.text


def test_tuning_files(tmp_path: Path) -> None:
    here = backend_for(CPU.device).environment()
    entry = tuning_file.Entry("direct", {"direct": 1.0}, 1.0)
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    tuning_file.update(good, tuning_file.Tuning.of(here, {"a": entry, "b": entry}))
    tuning_file.update(good, tuning_file.Tuning.of(replace(here, name="another processor"), {"a": entry}))
    bad.write_text("{}")
    with settings.use(tuning_file=(good, bad, tmp_path / "absent.json"), cache_dir=tmp_path):
        found = [one for one in environment.findings() if one.name == "tuning"]
    assert found[0].text == f"{good}: 3 choices, 2 of them measured on this machine"
    assert [one.state for one in found] == [Verdict.OK, Verdict.WARNING, Verdict.WARNING]
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
    assert named(found, "PyTorch on GPU").state is Verdict.WARNING
    assert named(found, "driver").state is Verdict.OK
    assert named(found, "compiler").state is Verdict.OK


@pytest.mark.parametrize("jit", ["on", "off"])
def test_a_gpu_without_a_compiler(jit: str) -> None:
    found = run_in_virtual_gpu(_without_compiler, environment={"POLYCONV_JIT": jit})
    assert named(found, "compiler").state is (Verdict.PROBLEM if jit == "on" else Verdict.OK)
    assert ("polyconv[cu12]" in named(found, "compiler").advice) == (jit == "on")
    assert named(found, "cuda tensors").state is (Verdict.PROBLEM if jit == "on" else Verdict.OK)


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
    found = run_in_virtual_gpu(_every_pass, timeout=600)
    assert {part: result.words for part, result in found.items() if result.verdict is not Verdict.OK} == {}
    assert found.pop("compiling").figures["kernels"] > 50
    tried = {(result.row, part.partition(":")[0].rpartition(", ")[2]) for part, result in found.items()}
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
    float32 = [family for family in FAMILIES if "float32" in getattr(family, "DTYPES", ("float32",))]
    volta = [family for family in float32 if any(kernel.runs_on("sm_70") for kernel in family.all_kernels())]
    assert set(passes) == {family_name(family) for family in volta}
    assert tried == {(family, kind) for family, kinds in passes.items() for kind in kinds}


def _every_pass() -> dict[str, Result]:
    with VirtualGpu() as gpu:
        return {name: run_part(part) for name, part in PASSES.parts(VirtualGpuUnderTest(gpu)).items()}


def test_a_gpu_that_does_not_work_is_a_result() -> None:
    """PyTorch's CPU build as one that cannot reach the GPU: every part fails with a reason, none escapes."""
    parts, results = run_in_virtual_gpu(_unreachable_gpu)
    assert parts > 50
    for result in results:
        assert result.verdict is Verdict.PROBLEM
        assert "CUDA" in result.words


def _unreachable_gpu() -> tuple[int, list[Result]]:
    passes, timings = (list(check.parts(GpuUnderTest()).values()) for check in (PASSES, WORKLOADS))
    return len(passes), [run_part(passes[1]), run_part(timings[0])]


def test_every_engine_of_the_cpu_is_tried() -> None:
    found = [run_part(part) for part in PASSES.parts(CPU).values()]
    assert [result for result in found if result.verdict is not Verdict.OK] == []
    if native.is_available():
        assert {result.row for result in found} >= {"tile lanes", "channel lanes", "depthwise", "plain"}


class Broken(CpuBackend):
    """A backend with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def prepare(self, plan: CpuPlan, *, trial: bool = False) -> Run:
        right = super().prepare(plan, trial=trial)
        output = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "dw"}[plan.problem.kind]

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
        ("nothing is written", "are NaN: not written"),
        ("one element", "error "),
        ("input", "the run changed its input"),
    ],
)
def test_the_self_test_notices(kind: Pass, fault: str, words: str) -> None:
    part = PASSES.parts(CPU)[f"3x3, {kind}"]
    with override("cpu", Broken(fault)):
        result = run_part(part)
    assert result.verdict is Verdict.PROBLEM
    assert words in result.words
    assert run_part(part).verdict is Verdict.OK


# ---- speed, with a fake clock


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small workloads. A call takes 2 ms if it is polyconv's, which come first, and 5 ms if it is PyTorch's."""
    small = [replace(workload, input=(2, workload.input[1], 24, 40)) for workload in workloads.find("headline")]
    seen: list[object] = []

    def timer(call: Callable[[], object], times: int) -> float:
        call()
        if call not in seen:
            seen.append(call)
        return (2e-3, 5e-3)[seen.index(call) % 2]

    monkeypatch.setattr(DeviceUnderTest, "timer", staticmethod(timer))
    monkeypatch.setattr(workloads, "find", lambda _: small)


@pytest.mark.usefixtures("timed")
def test_workloads_next_to_pytorch() -> None:
    found = {name: run_part(part) for name, part in WORKLOADS.parts(CPU).items()}
    assert list(found) == [f"W{n}, {kind}" for n in (1, 2, 3) for kind in Pass]
    for name, result in found.items():
        figures = result.figures
        assert (figures["ours_ms"], figures["torch_ms"], figures["ratio"]) == (2.0, 5.0, 2.5)
        assert (figures["batch"], figures["whole_batch"]) == (1, 2)
        assert result.words == "2.50 x PyTorch (float32): 2 ms, PyTorch 5 ms, 1 of 2 images"
        assert (result.verdict, result.row) == (Verdict.OK, name)


@pytest.mark.usefixtures("timed")
def test_a_wrong_or_failing_result_of_a_workload_is_noticed() -> None:
    for fault, words in (("one element", "deviates from PyTorch's result by"), ("raises", "no kernel image")):
        with override("cpu", Broken(fault)):
            result = run_part(WORKLOADS.parts(CPU)["W2, wgrad"])
        assert result.verdict is Verdict.PROBLEM
        assert words in result.words


# ---- the report and the command


def test_what_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    finding = Finding("cache", Verdict.OK, "/home/somebody/.cache/polyconv, 3 kernels")
    journal = Journal(tmp_path / "report.json", about(CPU, "self-test"), [finding])
    journal.add(Result("every pass", "3x3", Verdict.OK, figures={"error": 1e-6}))
    assert journal.ok
    text = journal.path.read_text()
    assert "somebody" not in text
    assert os.uname().nodename not in text
    found = json.loads(text)
    assert found["findings"][0]["text"] == "~/.cache/polyconv, 3 kernels"
    assert found["self_test"]["correctness"][0]["ok"]
    journal.add(Result("every pass", "5x9", Verdict.PROBLEM, "error 1.0e+00, allowed 1e-04"))
    assert not journal.ok
    assert "  every pass, 5x9: error 1.0e+00, allowed 1e-04" in summary(journal, "report.txt").splitlines()
    assert not replace(journal, results=[], findings=[Finding("GPU", Verdict.PROBLEM, "broken")]).ok
    assert replace(journal, results=[], findings=[Finding("GPU", Verdict.WARNING, "slow")]).ok


class InThisProcess(Runner):
    """Runs three parts of each check without a worker, so that a test can replace what they call."""

    def run(self, check: Check, done: Sequence[Result] = ()) -> Iterator[Result]:
        for name, part in list(check.parts(CPU).items())[:3]:
            yield replace(run_part(part), check=check.name, part=name)


@pytest.fixture
def command_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "Runner", InThisProcess)
    return tmp_path


def test_the_command_tests_the_cpu(command_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--self-test"]) == 0
    printed = capsys.readouterr()
    assert "every pass                      3 of 3  largest error" in printed.out
    assert "2.50 x PyTorch" in printed.out
    assert "no user or host name" in printed.err
    found: dict[str, Any] = json.loads((command_in / "polyconv-report.json").read_text())
    assert len(found["self_test"]["correctness"]) == 3
    assert [one["pass"] for one in found["self_test"]["speed"]] == ["fprop", "dgrad", "wgrad"]
    assert cli.main(["doctor", "--self-test", "--json", "-o", "mine.json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((command_in / "mine.json").read_text())
    assert cli.main(["doctor", "--self-test", "--no-timing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] == ["every pass"]


@pytest.mark.usefixtures("command_in")
def test_something_broken_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with override("cpu", Broken("raises")):
        assert cli.main(["doctor", "--self-test"]) == 1
    assert "PROBLEM  every pass                      0 of 3  3x3, fprop: RuntimeError" in capsys.readouterr().out


def test_the_self_test_runs_in_a_worker() -> None:
    *_, before, last = PASSES.parts(CPU)
    (result,) = Runner("cpu", quick=True).run(PASSES, [Result("every pass", before, Verdict.OK)])
    assert (result.part, result.verdict) == (last, Verdict.OK)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    ran = command("doctor", "--json", cwd=tmp_path, POLYCONV_CACHE_DIR=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["ok"]
    assert {one["name"] for one in found["findings"]} >= {"polyconv", "PyTorch", "CPU", "GPU", "cache", "cpu tensors"}
    assert list(tmp_path.iterdir()) == []
