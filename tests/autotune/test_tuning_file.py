"""Tuning files: contents, merging, refusals, and their effect on plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polyconv
from polyconv import settings
from polyconv.autotune import preferences, tuning_file, tuning_lookup
from polyconv.autotune.tuning_file import Entry, Tuning, TuningError
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.model.explain import explain_plans
from polyconv.problem import Pass, Problem, channels_last_strides
from polyconv.runtime import state_version
from polyconv.tuning_key import Environment, problem_key
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

PROBLEM = Problem.make("fprop", (1, 16, 40, 40), (16, 16, 3, 3), padding=(1, 1, 1, 1))
SIGNAL = Problem.make("fprop", (1, 16, 400), (16, 16, 3), padding=(1, 1))
VOLUME = Problem.make("fprop", (1, 16, 8, 12, 12), (16, 16, 3, 3, 3), padding=(1, 1, 1, 1, 1, 1))
KEY = problem_key(PROBLEM)
HERE = Environment("cpu", "A Processor", "0.1.0", "2.13.0", instruction_set="avx512", threads=2)
ELSEWHERE = replace(HERE, threads=4)


def entry(choice: str = "this", measured: str = "2026-01-01T00:00:00Z", **seconds: float) -> Entry:
    return Entry(choice, seconds or {choice: 1.0}, 2.0, measured)


# ---- the key


def test_the_key_reads_well_and_stays() -> None:
    """Tuning files in repositories depend on the key: a change invalidates them all."""
    assert KEY == (
        "fprop x 1x16x40x40 w 16x16x3x3, stride 1x1, padding 1,1,1,1 zeros, dilation 1x1, groups 1, "
        "layout nchw nchw nchw, float32, tolerance 0.0001"
    )


def test_whatever_a_plan_may_depend_on_is_in_the_key() -> None:
    last = channels_last_strides(PROBLEM.x_shape)
    variants = [
        replace(PROBLEM, kind=Pass.DGRAD),
        replace(PROBLEM, batch=2),
        replace(PROBLEM, out_channels=32),
        replace(PROBLEM, kernel=(3, 5)),
        replace(PROBLEM, stride=(1, 2)),
        replace(PROBLEM, padding=(1, 1, 1, 0)),
        replace(PROBLEM, padding_mode="reflect"),
        replace(PROBLEM, dilation=(2, 1)),
        replace(PROBLEM, groups=4),
        replace(PROBLEM, bias=True),
        replace(PROBLEM, x_strides=last),
        replace(PROBLEM, y_strides=(0, 0, 0, 0)),
        replace(PROBLEM, vector_aligned=False),
        replace(PROBLEM, dtype="float64"),
        replace(PROBLEM, tolerance=1e-5),
        replace(PROBLEM, activation="relu"),
        replace(PROBLEM, residual=True),
    ]
    keys = {problem_key(problem) for problem in [PROBLEM, *variants]} | {problem_key(PROBLEM, kept_weights=True)}
    assert len(keys) == len(variants) + 2


def test_a_stride_along_one_element_is_no_matter() -> None:
    pointwise = Problem.make("fprop", (1, 16, 40, 40), (16, 16, 1, 1))
    assert problem_key(replace(pointwise, w_strides=(16, 1, 16, 16))) == problem_key(pointwise)


# ---- the file


def assert_warns_once(words: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [tuning_lookup.find(KEY, HERE) for _ in range(2)] == [None, None]
    assert [words in str(warning.message) for warning in caught] == [True]


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "t.json"
    written = entry(this=0.5, that=0.7)
    tuning_file.update(path, Tuning.of(HERE, {KEY: written}))
    read = tuning_file.load(path)
    assert read.find(KEY, HERE) == written
    assert read.find(KEY + ", bias", HERE) is None
    text = json.loads(path.read_text())
    assert text["sections"][0]["environment"] == {
        "device": "cpu",
        "name": "A Processor",
        "polyconv": "0.1.0",
        "torch": "2.13.0",
        "instruction_set": "avx512",
        "threads": 2,
    }
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]


@pytest.mark.parametrize("change", [{"threads": 4}, {"name": "B"}, {"torch": "2.14.0"}, {"polyconv": "0.2.0"}])
def test_another_environment_is_skipped_and_kept(tmp_path: Path, change: dict[str, object]) -> None:
    path, other = tmp_path / "t.json", replace(HERE, **change)
    tuning_file.update(path, Tuning.of(HERE, {KEY: entry("mine")}))
    assert tuning_file.load(path).find(KEY, other) is None
    tuning_file.update(path, Tuning.of(other, {KEY: entry("theirs")}))
    both = tuning_file.load(path)
    assert both.find(KEY, HERE).choice == "mine"
    assert both.find(KEY, other).choice == "theirs"


def test_a_section_that_this_version_does_not_understand_is_carried_along(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    alien = {"environment": {"device": "npu", "colour": "red"}, "entries": {"k": {"program": [1, 2]}}}
    path.write_text(json.dumps({"format": f"polyconv {tuning_file.KIND}", "schema": 2, "sections": [alien]}))
    tuning_file.update(path, Tuning.of(HERE, {KEY: entry()}))
    assert alien in json.loads(path.read_text())["sections"]


def test_merging_keeps_the_later_then_the_faster_and_knows_no_order() -> None:
    old, new = entry("old", "2026-01-01T00:00:00Z", old=0.1), entry("new", "2026-01-02T00:00:00Z", new=0.9)
    slow, fast = entry("slow", slow=0.2), entry("fast", fast=0.1)
    for first, second, winner in ((old, new, "new"), (slow, fast, "fast")):
        a, b = Tuning.of(HERE, {KEY: first, "x": old}), Tuning.of(HERE, {KEY: second, "y": new})
        merged = tuning_file.merge((a, b))
        assert merged == tuning_file.merge((b, a)) == tuning_file.merge((a, merged, b))
        assert merged.find(KEY, HERE).choice == winner
        assert len(merged) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a tuning file"),
        ('{"format": "polyconv tuning", "schema": 99, "sections": []}', "schema 99"),
        ('{"format": "polyconv tuning", "schema": 2, "sections": [{}]}', "is damaged"),
        ('{"format": "polyconv tuning", "schema": 2}', "is damaged"),
    ],
)
def test_what_is_no_tuning_file_is_said_once_and_never_overwritten(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TuningError, match=words):
        tuning_file.load(path)
    with pytest.raises(TuningError, match="not overwritten"):
        tuning_file.update(path, Tuning.of(HERE, {KEY: entry()}))
    assert path.read_text() == text
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        assert_warns_once(words)


def test_a_file_that_was_named_and_is_absent_is_said_once(tmp_path: Path) -> None:
    with settings.use(tuning_file=(tmp_path / "absent.json",), cache_dir=tmp_path):
        assert_warns_once("absent.json cannot be read")


def test_files_are_asked_in_order_and_the_default_last(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    tuning_file.update(first, Tuning.of(HERE, {"a": entry("first")}))
    tuning_file.update(second, Tuning.of(HERE, {"a": entry("second"), "b": entry("second")}))
    with settings.use(tuning_file=(first, second), cache_dir=tmp_path / "cache"):
        tuning_file.update(tuning_lookup.default_file(), Tuning.of(HERE, {key: entry("default") for key in "abc"}))
        found = [tuning_lookup.find(key, HERE) for key in "abcd"]
        assert [f and f.entry.choice for f in found] == ["first", "second", "default", None]
        assert found[1].path == second
    with settings.use(tuning_file=None, cache_dir=tmp_path / "cache"):
        assert tuning_lookup.find("a", HERE).entry.choice == "default"
    with settings.use(tuning_file=(), cache_dir=tmp_path / "cache"):
        assert tuning_lookup.find("a", HERE) is None


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        tuning_file.update(path, Tuning.of(HERE, {KEY: entry("old")}))
        assert tuning_lookup.find(KEY, HERE).entry.choice == "old"
        tuning_file.update(path, Tuning.of(HERE, {KEY: entry("new", "2027-01-01T00:00:00Z")}))
        assert tuning_lookup.find(KEY, HERE).entry.choice == "new"


WRITER = """
import sys
from pathlib import Path
from polyconv.autotune.tuning_file import Entry, Tuning, update
from polyconv.tuning_key import Environment
here = Environment("cpu", "A Processor", "0.1.0", "2.13.0")
for i in range(20):
    update(Path(sys.argv[1]), Tuning.of(here, {f"{sys.argv[2]} {i}": Entry("a", {"a": 1.0}, 2.0)}))
"""


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)], env=environ) for n in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(tuning_file.load(path)) == 60
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    tuning_file.update(path, Tuning.of(HERE, {KEY: entry("old")}))

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        tuning_file.update(path, Tuning.of(HERE, {KEY: entry("new", "2027-01-01T00:00:00Z")}))
    assert tuning_file.load(path).find(KEY, HERE).choice == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


# ---- the backends follow the file


@pytest.fixture
def backend() -> CpuBackend:
    if not native.is_available():
        pytest.skip(str(native.why_absent()))
    found = backend_for(torch.device("cpu"))
    assert isinstance(found, CpuBackend)
    return found


def another(backend: CpuBackend, problem: Problem = PROBLEM) -> str:
    """A candidate other than the cost model's choice."""
    names = candidate_names(backend, problem)[1:]
    return next((name for name in names if "ATen" not in name), names[0])  # a volume has two candidates


@pytest.mark.parametrize("problem", [PROBLEM, SIGNAL, VOLUME], ids=["image", "signal", "volume"])
def test_the_cpu_backend_runs_what_the_file_says(tmp_path: Path, backend: CpuBackend, problem: Problem) -> None:
    """A 1-D problem is looked up as the 2-D problem that it is lowered to."""
    x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape, requires_grad=True)
    ours, theirs = (getattr(where, f"conv{problem.rank}d") for where in (polyconv, torch.nn.functional))
    asked = problem.as_2d()
    plain = preferences.plan(backend, asked)
    path, name = tmp_path / "t.json", another(backend, asked)
    tuning_file.update(path, Tuning.of(backend.environment(), {problem_key(asked): entry(name)}))
    with settings.use(tuning_file=(path,)):
        assert preferences.plan(backend, asked).choice == name != plain.choice
        assert f"chosen by the tuning file {path}" in explain_plans(backend, asked)
        assert "chosen by the tuning file" in str(polyconv.explain(ours, x, w, padding=1))
        y = ours(x, w, padding=1)
    assert preferences.plan(backend, asked) == plain
    torch.testing.assert_close(y, theirs(x, w, padding=1), rtol=1e-4, atol=1e-3)


def test_a_file_for_another_number_of_threads_is_not_for_us(tmp_path: Path, backend: CpuBackend) -> None:
    path, here = tmp_path / "t.json", backend.environment()
    tuning_file.update(path, Tuning.of(replace(here, threads=here.threads + 1), {KEY: entry(another(backend))}))
    plain = preferences.plan(backend, PROBLEM)
    with settings.use(tuning_file=(path,)):
        assert preferences.plan(backend, PROBLEM) == plain


def test_a_call_does_not_look_the_problem_up_again(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(PROBLEM.x_shape), torch.randn(PROBLEM.w_shape)
    polyconv.conv2d(x, w, padding=1)
    monkeypatch.setattr(tuning_lookup, "find", lambda *_: pytest.fail("looked up"))
    polyconv.conv2d(x, w, padding=1)
    with settings.use(tolerance=1e-4):
        polyconv.conv2d(x, w, padding=1)


def test_a_file_that_was_written_is_read_when_it_is_named_again(backend: CpuBackend, tmp_path: Path) -> None:
    plain, path = preferences.plan(backend, PROBLEM), tmp_path / "t.json"
    for name in (another(backend), plain.choice):
        path.unlink(missing_ok=True)
        tuning_file.update(path, Tuning.of(backend.environment(), {KEY: entry(name)}))
        with settings.use(tuning_file=(path,)):
            assert preferences.plan(backend, PROBLEM).choice == name
            assert "chosen by the tuning file" in explain_plans(backend, PROBLEM)


def test_remembered_and_forced_choices(backend: CpuBackend) -> None:
    plain, name = preferences.plan(backend, PROBLEM), another(backend)
    measured = preferences.remember(backend.environment(), {KEY: name})
    try:
        assert preferences.plan(backend, PROBLEM).choice == name
        assert "measured in this process" in explain_plans(backend, PROBLEM)
        with preferences.Forced({KEY: plain.choice}):
            assert preferences.plan(backend, PROBLEM).choice == plain.choice
        assert preferences.plan(backend, PROBLEM).choice == name
    finally:
        preferences.forget(measured)
    assert preferences.plan(backend, PROBLEM) == plain


def test_forced_choices_of_several_threads_end_in_any_order(backend: CpuBackend) -> None:
    plain, name, before = preferences.plan(backend, PROBLEM), another(backend), state_version.current()
    one, other = preferences.Forced({KEY: name}), preferences.Forced({KEY: plain.choice})
    for block in (one, other, one):
        block.__enter__()
    assert preferences.plan(backend, PROBLEM).choice == name
    one.__exit__()
    assert preferences.plan(backend, PROBLEM).choice == plain.choice
    one.__exit__()
    assert preferences.plan(backend, PROBLEM).choice == plain.choice
    other.__exit__()
    assert state_version.current() == before
    assert preferences.plan(backend, PROBLEM) == plain


def test_what_was_measured_elsewhere_or_later_does_not_stand_in_the_way(backend: CpuBackend) -> None:
    """One problem has the same key on all devices and in all models."""
    plain, name = preferences.plan(backend, PROBLEM), another(backend)
    first = preferences.remember(backend.environment(), {KEY: name})
    elsewhere = preferences.remember(Environment.of_cuda("A GPU", "sm_70", "12.9", "12.9"), {KEY: "a CUDA kernel"})
    later = preferences.remember(backend.environment(), {KEY: plain.choice})
    try:
        assert preferences.plan(backend, PROBLEM).choice == plain.choice
        preferences.forget(later)
        assert preferences.plan(backend, PROBLEM).choice == name
    finally:
        for measured in (first, elsewhere, later):
            preferences.forget(measured)
    assert preferences.plan(backend, PROBLEM) == plain


def test_the_cuda_backend_runs_what_the_file_says(tmp_path: Path) -> None:
    run_in_virtual_gpu(_cuda_listens, tmp_path / "t.json")


def _cuda_listens(path: Path) -> None:
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        plain, name = backend.prepare(preferences.plan(backend, PROBLEM)).plan, candidate_names(backend, PROBLEM)[1]
        here = backend.environment()
        assert (here.device, here.arch) == ("cuda", "sm_70")
        assert all(here.as_json().get(fact) for fact in ("name", "driver", "cuda", "torch", "polyconv"))
        tuning_file.update(path, Tuning.of(here, {KEY: entry(name)}))
        with settings.use(tuning_file=(path,)):
            assert backend.prepare(preferences.plan(backend, PROBLEM)).plan.choice == name != plain.choice
            assert "chosen by the tuning file" in explain_plans(backend, PROBLEM)
        assert backend.prepare(preferences.plan(backend, PROBLEM)).plan == plain
