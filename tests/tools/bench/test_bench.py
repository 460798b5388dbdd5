"""``polyconv bench``: arguments, batches, errors against float64, rows, files."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import polyconv
from polyconv import backend, cli, settings
from polyconv.cli import _options
from polyconv.cpu import native
from polyconv.cpu.planner import plan_cpu
from polyconv.lowering.reshape import as_image
from polyconv.measure import accuracy, batch_limits, environment, timing
from polyconv.measure.batch_limits import Batch, cut_batch
from polyconv.measure.operands import CHANNELS_LAST, NCHW, OURS, OURS_CHANNELS_LAST, Operands, candidates
from polyconv.measure.timing import Timing
from polyconv.measure.workloads import QUICK, find
from polyconv.numerics import reference
from polyconv.problem import Pass, Problem
from polyconv.tools.bench import charts, runner, tables
from polyconv.tools.bench.passes import Options
from polyconv.tools.bench.passes import contests as passes
from polyconv.tools.bench.results import Row
from polyconv.tools.bench.runner import Contest, Failure
from polyconv.util.cpuinfo import processor_model, processor_name
from recording import Recorder

KEYS = {
    *("workload", "shape", "pass", "threads", "batch", "timings", "ratio_nchw", "ratio_channels_last", "ratio_best"),
    *("max_error", "compared", "predicted_error", "plan", "of_sgemm", "notes"),
}

PROBLEMS = {
    "padding and dilation": ((2, 5, 14, 17), (9, 5, 3, 2), {"padding": (2, 2, 1, 1), "dilation": (2, 3)}),
    "stride with rows that no output reads": ((2, 4, 16, 15), (10, 4, 3, 3), {"stride": (3, 2)}),
    "a few large groups": ((1, 24, 11, 9), (20, 12, 3, 3), {"padding": (1, 1, 1, 1), "groups": 2}),
    "a 1x1 kernel that skips": ((2, 10, 10, 11), (9, 10, 1, 1), {"stride": (4, 3)}),
    "depthwise": ((2, 12, 13, 12), (24, 1, 5, 3), {"padding": (2, 2, 1, 1), "groups": 12, "stride": (2, 1)}),
    "a volume with a border": ((2, 4, 5, 6, 7), (9, 4, 3, 3, 3), {"padding": (1,) * 6, "padding_mode": "reflect"}),
}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test depends on measured values, so a short matrix product suffices."""
    monkeypatch.setattr(timing, "SGEMM_SIZE", 64)
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    timing.sgemm_rate.cache_clear()
    yield
    timing.sgemm_rate.cache_clear()


def problem_of(name: str, kind: Pass) -> Problem:
    x, w, rest = PROBLEMS[name]
    return Problem.make(kind, x, w, bias=kind is not Pass.DGRAD, **rest)  # type: ignore[arg-type]


def exact(problem: Problem, operands: Operands) -> Tensor:
    x, w = operands.x.double().requires_grad_(), operands.w.double().requires_grad_()
    y = reference.fprop(problem, x, w, operands.bias)
    if problem.kind is Pass.FPROP:
        return y.detach()
    assert operands.dy is not None
    return torch.autograd.grad(y, x if problem.kind is Pass.DGRAD else w, operands.dy.double())[0]


def row(
    ours: float, nchw: float, last: float, kind: Pass = Pass.FPROP, name: str = "layer", ours_last: float | None = None
) -> Row:
    times = {OURS: ours, NCHW: nchw, OURS_CHANNELS_LAST: ours_last or ours, CHANNELS_LAST: last}
    return Row(
        workload=name,
        shape="8→8 3×3",
        kind=kind,
        threads=1,
        batch=Batch(1, 1),
        timings={name: Timing(seconds, seconds, seconds) for name, seconds in times.items()},
        max_error=1e-6,
        compared=1.0,
        predicted_error=1e-5,
        plan="ATen",
        of_sgemm=1.0,
    )


# ---- errors


@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("sampled", [False, True], ids=["whole", "sample"])
def test_the_reference_is_exact(name: str, kind: Pass, sampled: bool) -> None:
    problem = problem_of(name, kind)
    operands = Operands.random(problem)
    budget = {"whole": 0.0, "sample": problem.multiplications / 20} if sampled else {}
    result = exact(problem, operands)
    found = accuracy.measure(problem, operands, result, **budget)
    assert found.error < 1e-14
    assert (found.compared < 1) == sampled
    shifted = accuracy.measure(problem, operands, result + accuracy.scale(problem, operands), **budget)
    assert shifted.error == pytest.approx(1.0)
    assert accuracy.measure(problem, operands, result * torch.nan, **budget).error == inf


def test_scale_is_the_rms_of_the_output() -> None:
    for kind in Pass:
        problem = Problem.make(kind, (4, 16, 40, 40), (32, 16, 3, 3))
        operands = Operands.random(problem)
        rms = float(exact(problem, operands).square().mean().sqrt())
        assert rms == pytest.approx(float(accuracy.scale(problem, operands).square().mean().sqrt()), rel=0.1)


# ---- candidates and timing


@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("fresh", [False, True], ids=["kept weights", "fresh weights"])
def test_candidates_compute_the_same(name: str, kind: Pass, fresh: bool) -> None:
    problem = problem_of(name, kind)
    operands = Operands.random(problem)
    expected = exact(problem, operands)
    calls = candidates(problem, operands, fresh_weights=fresh)
    assert list(calls) == [OURS, OURS_CHANNELS_LAST, NCHW, CHANNELS_LAST]
    for call in calls.values():
        torch.testing.assert_close(call().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize("name", ["kb76", "kb75", "kb79"])
def test_candidates_of_one_axis_and_transposed_compute_the_same(name: str, kind: Pass) -> None:
    (workload,) = find(name)
    small = replace(workload, input=(2, *(min(extent, 32) for extent in workload.input[1:])))
    if small.groups == 1:
        small = replace(small, input=(2, 8, *small.input[2:]), out_channels=8)
    problem = small.problem(kind)
    operands = Operands.random(problem)
    for call in candidates(problem, operands, transposed=small.transposed).values():
        assert accuracy.measure(problem.as_2d(), operands.as_images(), as_image(call())).error < 1e-4


def test_layouts_have_weights_of_their_own() -> None:
    """A 1x1 weight is dense in both layouts; the weight cache holds one of them at a time."""
    operands = Operands.random(problem_of("a 1x1 kernel that skips", Pass.FPROP))
    assert operands.channels_last().w.data_ptr() != operands.w.data_ptr()


def test_weights_are_kept_or_fresh() -> None:
    problem = problem_of("depthwise", Pass.FPROP)
    operands = Operands.random(problem)
    for fresh in (False, True):
        with backend.override("cpu", Recorder()) as recorder, torch.inference_mode():
            call = candidates(problem, operands, fresh_weights=fresh)[OURS]
            call()
            call()
        assert isinstance(recorder, Recorder)
        assert all((seen["w"].data_ptr() == operands.w.data_ptr()) != fresh for seen in recorder.tensors)
        assert recorder.problems == [problem, problem]


def test_rounds_start_with_another_one() -> None:
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    timings = timing.interleaved(calls, 3)  # type: ignore[arg-type]
    assert "".join(ran) == "aabbcc" + "abc" + "bca" + "cab"
    assert all(0 < found.best <= found.median for found in timings.values())
    assert all(found.cpu >= 0 for found in timings.values())


def test_processor_time_is_that_of_the_call() -> None:
    timings = timing.interleaved({"sleeps": lambda: time.sleep(0.02), "works": lambda: _spin(0.02)}, 3)
    assert timings["sleeps"].cpu < 0.01
    assert timings["works"].cpu > 0.01


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_short_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORTEST", 1.0)
    monkeypatch.setattr(timing, "MOST_CALLS", 5)
    ran: list[int] = []
    timing.interleaved({"a": lambda: ran.append(1)}, 2)
    assert len(ran) == 3 + 2 * 5


def test_who_is_far_behind_drops_out_unless_it_stays() -> None:
    ran: list[str] = []
    seconds = {"fast": 1.0, "slow": 9.0, "theirs": 9.0}
    calls = {name: lambda name=name: ran.append(name) for name in seconds}  # type: ignore[misc]

    def known(call: Callable[[], object], times: int) -> float:
        call()
        return seconds[ran[-1]]

    timings = timing.interleaved(calls, 5, known, stays=("theirs",))
    assert {name: ran.count(name) for name in seconds} == {"fast": 7, "slow": 3, "theirs": 7}
    assert {name: found.best for name, found in timings.items()} == seconds


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with timing.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# ---- batches


def test_batch_is_cut_by_work() -> None:
    (w1,) = find("W1")
    batch = cut_batch(w1, None, 2**50)
    assert str(batch) == "1 of 8"
    assert "multiply-adds" in batch.reason
    assert str(cut_batch(w1, None, 2**50, most=1e15)) == "8"


def test_batch_as_asked() -> None:
    (w1,) = find("W1")
    assert str(cut_batch(w1, 3, 2**50)) == "3 of 8"
    assert cut_batch(w1, 100, 2**50) == Batch(8, 8)


def test_batch_is_cut_by_memory() -> None:
    (w2,) = find("W2")
    gibibytes = 8
    batch = cut_batch(w2, 16, gibibytes * 2**30)
    assert 1 <= batch.images < 16
    assert "8.0 GiB" in batch.reason
    assert batch.images * batch_limits.bytes_per_image(w2) <= gibibytes * 2**30
    assert cut_batch(w2, None, 0).images == 1


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert batch_limits.available_memory(meminfo) == 2 * 2**20
    assert batch_limits.available_memory(tmp_path / "absent") > 0


def test_the_processor_is_asked_for_its_name_once(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor: 0\nmodel name\t: A Processor\n")
    assert processor_name(cpuinfo) == "A Processor"
    cpuinfo.unlink()
    assert processor_name(cpuinfo) == "A Processor"


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        ("vendor_id : V\ncpu family : 6\nmodel : 85\nmodel name : X\n", "X", "V 6 85"),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n",
            "Neoverse N1",
            "ARM 0x41 0xd0c",
        ),
        ("processor : 0\n", "CPU", "? ? ?"),
    ],
    ids=["x86", "ARM", "unknown"],
)
def test_a_processor_has_a_name_and_a_model(tmp_path: Path, text: str, name: str, model: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert (processor_name(cpuinfo), processor_model(cpuinfo)) == (name, model)


# ---- rows


def test_ratios() -> None:
    one = row(ours=2.0, nchw=6.0, last=3.0)
    assert (one.ratio_nchw, one.ratio_channels_last, one.ratio_best) == (3.0, 1.5, 1.5)
    assert row(ours=2.0, nchw=1.0, last=3.0).ratio_best == 0.5
    assert row(ours=2.0, nchw=6.0, last=3.0, ours_last=1.0).ratio_best == 3.0


def test_means(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_passes([row(1, 4, 2), row(1, 1, 9), row(1, 3, 5, Pass.WGRAD)], "")
    printed = capsys.readouterr().out.partition("Geometric means")[2].replace("│", " ").splitlines()
    assert [line.split() for line in printed if "grad" in line or "fprop" in line] == [
        ["fprop", "1", "2", "2.00", "4.24", "1.41"],
        ["wgrad", "1", "1", "3.00", "5.00", "3.00"],
    ]


def test_rows_are_read_again() -> None:
    one = row(1.0, 2.0, 4.0, Pass.DGRAD)
    assert Row.from_json(json.loads(json.dumps(one.as_json()))) == one


def measured(names: str, **options: Any) -> list[Row]:
    return [contest.run() for contest in passes(find(names), Options(repeats=1, batch=1, **options))]


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.measure, "__kwdefaults__", {"whole": 0.0, "sample": 1e5})
    (found,) = measured("mobilenet-dw3", passes=(Pass.FPROP,))
    assert found.notes[0] == "batch 1 of 32: --batch 1"
    assert found.notes[1].startswith("error measured on ")


def test_the_plan_is_the_planners() -> None:
    (workload,) = find("mobilenet-dw3")
    with settings.use(tolerance=0.0):
        (found,) = measured("mobilenet-dw3", passes=(Pass.DGRAD,))
        problem = replace(batch_limits.with_batch(workload, 1).problem(Pass.DGRAD), tolerance=0.0)
    plan = plan_cpu(problem)
    assert (found.plan, found.predicted_error) == (plan.name, plan.predicted_error)


# ---- the runner


def succeed(name: str) -> Row:
    return row(1, 2, 3, name=name)


def fail() -> Row:
    raise ValueError("no such thing")


def crash() -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_failures_do_not_end_the_rest() -> None:
    ran = list(
        runner.run(
            [
                Contest("first", partial(succeed, "first")),
                Contest("fails", fail),
                Contest("crashes", crash),
                Contest("last", partial(succeed, "last")),
            ]
        )
    )
    assert [type(found) for found in ran] == [Row, Failure, Failure, Row]
    assert ran[1] == Failure("fails", "ValueError: no such thing")
    assert ran[2] == Failure("crashes", "it ended the process that ran it")


def test_nothing_begins_after_the_time_limit() -> None:
    assert list(runner.run([Contest("late", fail)], seconds=0)) == []


# ---- the command


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contests that do not run; each returns the same row of its workload and pass."""
    asked: list[str] = []

    def run(chosen: Sequence[Contest[Row]], seconds: float | None) -> Iterator[Row]:
        for contest in chosen:
            asked.append(contest.key)
            name, kind, _ = contest.key.split(", ")
            yield row(1, 2, 3, Pass(kind), name)

    monkeypatch.setattr(runner, "run", run)
    return asked


def test_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["mobilenet-dw3,gcn-15x1", "--batch", "1", "--repeats", "2", "--threads", "1"]
    assert cli.main(["bench", *arguments, "-o", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["setting"]["PyTorch"] == torch.__version__
    assert found["failures"] == []
    rows = found["rows"]
    assert [(r["workload"], r["pass"]) for r in rows] == [
        (name, kind) for name in ("mobilenet-dw3", "gcn-15x1") for kind in ("fprop", "dgrad", "wgrad")
    ]
    for r in rows:
        assert r.keys() == KEYS
        best = {name: timing["best_ms"] for name, timing in r["timings"].items()}
        assert r["ratio_nchw"] == pytest.approx(best[NCHW] / best[OURS])
        assert r["ratio_channels_last"] == pytest.approx(best[CHANNELS_LAST] / best[OURS_CHANNELS_LAST])
        ours = min(best[OURS], best[OURS_CHANNELS_LAST])
        assert r["ratio_best"] == pytest.approx(min(best[NCHW], best[CHANNELS_LAST]) / ours)
        assert 0 < r["max_error"] < 1e-4
        assert (r["threads"], r["batch"]["images"]) == (1, 1)
    printed = capsys.readouterr()
    assert "gcn-15x1" in printed.out
    assert "Geometric means" in printed.out
    assert "--batch 1" in printed.out


def test_says_where_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scripted: list[str]
) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert cli.main(["bench"]) == 0
    assert "no native kernels" in capsys.readouterr().err


def test_without_arguments_it_is_short_and_says_what_it_does(
    capsys: pytest.CaptureFixture[str], scripted: list[str]
) -> None:
    assert cli.main(["bench", "--threads", "1"]) == 0
    assert list(dict.fromkeys(key.split(",")[0] for key in scripted)) == list(QUICK)
    assert capsys.readouterr().err.endswith(
        "polyconv bench: resnet50-3b, context-d8, inception-1x7, mobilenet-dw3; 12 contests. "
        "Ctrl-C ends it and keeps what was measured\n"
    )
    calls = [batch_limits.with_batch(w, cut_batch(w, None, 2**40).images).problem(Pass.FPROP) for w in find("quick")]
    assert sum(call.multiplications for call in calls) < 10e9
    assert cli.main(["bench", "--suite", "models", "--pass", "dgrad", "--threads", "1,2"]) == 0
    assert "and 24 more; 56 contests." in capsys.readouterr().err


def test_several_threads(scripted: list[str]) -> None:
    assert cli.main(["bench", "mobilenet-dw3", "--pass", "fprop", "--threads", "1,2"]) == 0
    assert scripted == ["mobilenet-dw3, fprop, 1 threads", "mobilenet-dw3, fprop, 2 threads"]


def test_only_those_with_a_word_in_their_name(scripted: list[str]) -> None:
    assert cli.main(["bench", "--suite", "models", "--only", "ASPP, drn", "--pass", "fprop", "--threads", "1"]) == 0
    names = [key.split(",")[0] for key in scripted]
    assert names == ["deeplab-aspp6", "deeplab-aspp12", "deeplab-aspp18", "drn-d2"]


def test_interrupted_runs_keep_what_they_have_and_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[str] = []

    def interrupted(chosen: Sequence[Contest[Row]], seconds: float | None) -> Iterator[Row]:
        began.append(chosen[0].key)
        yield row(1, 2, 3, name=chosen[0].key.split(",")[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    out = tmp_path / "out.json"
    arguments = ["bench", "--suite", "kernelbench", "--pass", "fprop", "--threads", "1", "-o", str(out)]
    assert cli.main(arguments) == 130
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == 1
    assert "W1" in capsys.readouterr().out
    assert cli.main([*arguments, "--resume"]) == 130
    assert began == ["W1, fprop, 1 threads", "W2, fprop, 1 threads"]
    assert [r["workload"] for r in json.loads(out.read_text(encoding="utf-8"))["rows"]] == ["W1", "W2"]
    assert "24 contests, of which 1 are measured" in capsys.readouterr().err


def test_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "run", lambda chosen, seconds: iter([Failure(chosen[0].key, "it broke")]))
    out = tmp_path / "out.json"
    assert cli.main(["bench", "W1", "--pass", "fprop", "--threads", "1", "-o", str(out)]) == 1
    assert "polyconv bench: W1, fprop, 1 threads: it broke" in capsys.readouterr().err
    expected = [{"key": "W1, fprop, 1 threads", "reason": "it broke"}]
    assert json.loads(out.read_text(encoding="utf-8"))["failures"] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no record of a run"),
        ("{", "no record of a run"),
        ('{"suite": "quick", "setting": {"processor": "another"}, "rows": []}', "processor another, now "),
        ('{"suite": "models", "setting": {}, "rows": []}', "suite models, now quick"),
    ],
)
def test_what_cannot_be_resumed(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], scripted: list[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text(text)
    assert cli.main(["bench", "--resume", "-o", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert scripted == []
    assert out.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["W9"], "'W9'"),
        (["-o", "absent/out.json"], "is not a directory"),
        (["--plot", "absent/out.png"], "is not a directory"),
        (["--threads", "0"], "'0' is not a positive number"),
        (["--threads", "1,x"], "'x' is not a positive number"),
        (["--repeats", "-1"], "'-1' is not a positive number"),
        (["--pass", "sideways"], "'sideways' is not a list of"),
        (["--suite", "models", "W1"], "not allowed with"),
        (["W1", "--mode", "training"], "--mode: for networks and layers only"),
        (["W1", "--sample", "3"], "--sample: for layers only"),
        (["W1", "--batch", "1,8"], "workloads take one --batch"),
        (
            ["--suite", "networks", "--pass", "fprop", "--fresh-weights"],
            "--pass and --fresh-weights: for workloads only",
        ),
        (["--suite", "networks", "--only", "nonsense"], "nothing has 'nonsense' in its name; there are resnet18"),
        (["--suite", "issues", "--batch", "2"], "--batch: not for issues"),
        (["--suite", "layers", "--layout", "nhwc"], "'nhwc' is not a list of nchw, channels_last"),
        (["--resume"], "--resume needs the file of the run"),
        (["--isa", "avx2"], "set ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2"),
        (["--device", "tpu"], "invalid choice"),
        (["--plot", "out.txt"], "cannot draw out.txt: the name of a chart ends with .png, .svg or .pdf"),
    ],
)
def test_argument_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(["bench", *arguments]))
    assert words in capsys.readouterr().err


def test_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--fresh-weights" in printed
    assert "relative to those of torch.mm" in printed


def test_variables_start_the_command_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []

    class StartedError(Exception):
        pass

    def execve(program: str, arguments: list[str], variables: dict[str, str]) -> None:
        started.append((program, arguments, variables))
        raise StartedError

    monkeypatch.setattr(environment.os, "execve", execve)
    monkeypatch.delenv(environment.HUGE_PAGES, raising=False)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    _options.set_up("bench", environment.wanted(None), None)
    assert started == []
    monkeypatch.setattr(sys, "argv", ["polyconv", "bench"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "polyconv", "bench"])
    with pytest.raises(StartedError):
        _options.set_up("bench", environment.wanted(None), None)
    program, arguments, variables = started[-1]
    assert (program, arguments) == (sys.executable, ["python", "-m", "polyconv", "bench"])
    assert variables[environment.HUGE_PAGES] == "1"
    monkeypatch.setenv(environment.HUGE_PAGES, "0")
    _options.set_up("bench", environment.wanted(None), None)
    assert len(started) == 1
    with pytest.raises(StartedError):
        _options.set_up("bench", environment.wanted("avx2"), "avx2")
    assert started[-1][2]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert started[-1][2]["ATEN_CPU_CAPABILITY"] == "avx2"
    assert started[-1][2][environment.HUGE_PAGES] == "0"


@pytest.mark.skipif(not native.is_available(), reason="there is nothing to limit")
def test_an_instruction_set_limits_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["mobilenet-dw3", "--pass", "fprop", "--batch", "1", "--repeats", "1", "--threads", "1"]
    ran = polyconv("bench", *arguments, "--isa", "sse4", "-o", str(out), ATEN_CPU_CAPABILITY="avx2")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["setting"]["instruction set"] == "sse4 (PyTorch: DEFAULT)"
    assert ", sse4 (PyTorch: DEFAULT), " in ran.stdout


# ---- the chart


@pytest.mark.parametrize("count", [1, 3, 30])
@pytest.mark.parametrize("passes", [(Pass.FPROP,), tuple(Pass)], ids=["one pass", "all passes"])
def test_plot(tmp_path: Path, count: int, passes: tuple[Pass, ...]) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(1 + n % 3, 2, 1 + n, kind, f"layer {n}") for n in range(count) for kind in passes]
    path = tmp_path / "out.png"
    charts.draw(charts.of_passes(rows), path, charts.PASSES_LEGEND, "somewhere")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_from_the_command(tmp_path: Path, scripted: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert cli.main(["bench", "mobilenet-dw3", "--pass", "fprop", "--threads", "1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install 'polyconv[bench]'" in capsys.readouterr().err
