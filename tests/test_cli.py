"""The command's frame: version, help, unknown commands, and that subcommands are found and imported lazily."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import polyconv
from polyconv import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"polyconv {polyconv.__version__}\n"


def test_module_runs() -> None:
    ran = subprocess.run([sys.executable, "-m", "polyconv", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"polyconv {polyconv.__version__}\n"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "usage: polyconv" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_a_subcommand_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.ModuleType("polyconv.cli.hello")
    module.add_arguments = lambda parser: parser.add_argument("--name")  # type: ignore[attr-defined]
    module.run = lambda args: seen.append(args.name) or 3  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "polyconv.cli.hello", module)
    monkeypatch.setitem(cli.COMMANDS, "hello", "greets")
    assert cli.main(["hello", "--name", "x"]) == 3
    assert seen == ["x"]
