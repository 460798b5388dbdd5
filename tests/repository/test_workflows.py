"""The workflows in .github: well formed, and everything that they call exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from polyconv.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source archive has no workflows")


def load(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


def test_all_are_here() -> None:
    assert [path.stem for path in WORKFLOWS] == ["arm64", "ci", "docs", "gpu", "nightly", "wheels"]


def test_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    ran = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts(path: Path) -> None:
    """bash can parse them, the files that they name exist, and those called by name are executable."""
    for script in scripts(path):
        ran = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert ran.returncode == 0, f"{ran.stderr}{script}"
        assert "${{" not in script, f"an expression inside a script is a way in for others; use env: {script}"
        for name in re.findall(r"(?<![\w/.-])(?:\.ci|tools|tests|csrc|docs)/[\w./-]+", script):
            assert (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"
            if re.match(rf"\s*{re.escape(name)}\b", script):
                assert os.access(ROOT / name, os.X_OK), f"{path.name} calls {name}, which is not executable"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_the_package(path: Path) -> None:
    for script in scripts(path):
        for command in re.findall(r"bin/polyconv (\w+)", script):
            assert command in COMMANDS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_moves_underneath(path: Path) -> None:
    """Actions and images are pinned by hash, not by a movable name; jobs have a time limit."""
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
    for name, job in load(path)["jobs"].items():
        assert "timeout-minutes" in job, name
        if "container" in job:
            assert re.fullmatch(r"[\w/.-]+@sha256:[0-9a-f]{64}", job["container"])


def test_least_permissions() -> None:
    """Read-only, except publishing, and that only from a push."""
    for path in WORKFLOWS:
        workflow = load(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert ("permissions" in job) is (name == "publish")
            if name == "publish":
                assert "github.event_name == 'push'" in job["if"]


def test_wheels_are_tried_on_every_python_that_the_metadata_names() -> None:
    smoke = load(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]["smoke"]
    classifiers = "\n".join(PYPROJECT["project"]["classifiers"])
    assert smoke["strategy"]["matrix"]["python"] == re.findall(r"Python :: (3\.\d+)", classifiers)
