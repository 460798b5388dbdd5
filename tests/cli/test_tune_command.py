"""``polyconv tune``: measurements are written, merged, and followed by the backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyconv import settings
from polyconv.autotune import preferences, tuning_file, tuning_lookup
from polyconv.autotune.preferences import Decision
from polyconv.autotune.tuning_file import Entry, Tuning
from polyconv.backend import backend_for
from polyconv.cli import main
from polyconv.cpu import native
from polyconv.measure import candidate_timing
from polyconv.measure.batch_limits import with_batch
from polyconv.measure.workloads import find
from polyconv.model.explain import explain_plans
from polyconv.problem import Pass
from polyconv.tuning_key import Environment, problem_key

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

NAME = "tiny-batch"
HERE = Environment("cpu", "A", "0.1.0", "2.13.0")


def test_measures_writes_and_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    asked = ["tune", NAME, "--batch", "1", "--candidates", "1", "-o", str(path)]
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["pass"] for row in rows] == ["fprop, inference", "fprop, training", "dgrad", "wgrad"]
    kept = tuning_file.load(path)
    backend = backend_for(torch.device("cpu"))
    for row in rows:
        found = kept.find(row["problem"], backend.environment())
        assert found is not None
        assert found.choice == row["choice"]
        assert row["choice"] in row["seconds"]
        assert row["max_error"] < 1e-4
    (workload,) = find(NAME)
    problem = with_batch(workload, 1).problem("dgrad")
    assert problem_key(problem) == rows[2]["problem"]
    with settings.use(tuning_file=(path,)):
        assert preferences.plan(backend, problem).choice == rows[2]["choice"]
        assert "chosen by the tuning file" in explain_plans(backend, problem)
        assert workload.problem("dgrad") == problem
        assert main(["plan", NAME, "--device", "cpu", "--pass", "dgrad"]) == 0
        assert "chosen by the tuning file" in capsys.readouterr().out


def test_a_table_and_the_default_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with settings.use(cache_dir=tmp_path):
        assert main(["tune", NAME, "--batch", "1", "--candidates", "1", "--pass", "wgrad"]) == 0
        assert tuning_lookup.default_file().parent == tmp_path
        assert len(tuning_file.load(tuning_lookup.default_file())) == 1
    out = capsys.readouterr().out
    assert "x PyTorch" in out
    assert "1 entry in 1 section" in out


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    for path, choice, when in zip(paths, ("old", "new"), ("2026-01-01", "2026-01-02"), strict=False):
        tuning_file.update(
            path, Tuning.of(HERE, {"k": Entry(choice, {choice: 1.0}, 2.0, when), choice: Entry("x", {}, 1)})
        )
    a, b, c = map(str, paths)
    assert main(["tune", "--merge", a, b, "-o", c]) == 0
    assert capsys.readouterr().out == f"{c}: 3 entries in 1 section\n"
    found = tuning_file.load(paths[2]).find("k", HERE)
    assert found is not None
    assert found.choice == "new"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "either WORKLOADS"),
        ([NAME, "--merge", "a"], 2, "either WORKLOADS"),
        (["--merge", "a.json"], 2, "-o FILE"),
        (["--merge", "nowhere.json", "-o", "c.json"], 2, "no nowhere.json"),
        (["nonsense"], 2, "nonsense"),
        ([NAME, "-o", "no/such/folder/t.json"], 2, "is not a directory"),
    ],
)
def test_wrong_usage(
    words: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == status
    assert message in capsys.readouterr().err


def test_a_file_that_is_none_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "a.json", tmp_path / "b.json"
    tuning_file.update(good, Tuning.of(HERE, {"k": Entry("x", {"x": 1.0}, 1.0)}))
    bad.write_text("notes")
    assert main(["tune", "--merge", str(good), "-o", str(bad)]) == 1
    assert "not overwritten" in capsys.readouterr().err
    assert bad.read_text() == "notes"


def test_what_strays_costs_nothing_of_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = candidate_timing.contest

    def strays(decision: Decision, *args: Any, **options: Any) -> candidate_timing.Outcome:
        if decision.problem.kind is Pass.DGRAD:
            raise candidate_timing.InexactError("no candidate is exact enough")
        return real(decision, *args, **options)

    monkeypatch.setattr(candidate_timing, "contest", strays)
    path = tmp_path / "t.json"
    assert main(["tune", NAME, "--batch", "1", "--candidates", "1", "-o", str(path), "--json"]) == 1
    printed = capsys.readouterr()
    assert [row["pass"] for row in json.loads(printed.out)] == ["fprop, inference", "fprop, training", "wgrad"]
    assert "no candidate is exact enough" in printed.err
    assert len(tuning_file.load(path)) == 3


def test_nothing_is_measured_that_could_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with settings.use(cache_dir=tmp_path / "file"):
        assert main(["tune", NAME]) == 2
    assert "cannot write into" in capsys.readouterr().err
