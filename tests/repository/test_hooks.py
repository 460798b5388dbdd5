"""The pre-commit hooks: the environment's tools, in CI's versions, on the files that CI checks."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / ".pre-commit-config.yaml"
DEV = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]["dev"]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no hooks")


def hooks() -> list[dict[str, Any]]:
    repositories = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["repos"]
    return [{**hook, "repo": repository["repo"]} for repository in repositories for hook in repository["hooks"]]


def output(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_hook_has_no_version_of_its_own() -> None:
    """A tool of the environment, so that CI and commits use the same one."""
    assert {(hook["repo"], hook["language"]) for hook in hooks()} == {("local", "system")}


@pytest.mark.parametrize("tool", ["ruff", "mypy", "clang-format"])
def test_a_tool_whose_verdict_depends_on_its_version_is_pinned(tool: str) -> None:
    assert [line for line in DEV if line.startswith(tool)] == [f"{tool}=={version(tool)}"]


def test_what_ci_checks_a_hook_checks() -> None:
    """``.ci/run`` names the same tools in its step."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    step = script.partition('step "format, lint, types"')[2].partition("\nstep ")[0]
    entries = [" ".join(hook["entry"].split()[:2]).removesuffix(" -i") for hook in hooks()]
    assert sorted(entries) == ["clang-format", "lint-imports --no-cache", "mypy", "ruff check", "ruff format"]
    assert [entry for entry in entries if f"\n{entry}" not in step] == []


def test_ruff_finds_the_files_that_the_hooks_give_it() -> None:
    """pre-commit also detects Python by its first line; ``ruff check .`` by its name and the include list."""
    identify = pytest.importorskip("identify.identify", reason="pre-commit is not installed")
    given = {path for path in output("git", "ls-files") if {"python", "pyi"} & identify.tags_from_path(ROOT / path)}
    found = {str(Path(path).relative_to(ROOT)) for path in output("ruff", "check", "--show-files", ".")}
    assert given - found == set()
