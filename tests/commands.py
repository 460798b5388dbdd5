"""The ``polyconv`` command, and Python programs, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"


def command_line(*arguments: str) -> list[str]:
    """Entry point of the installed script."""
    return [sys.executable, "-m", "polyconv_cli", *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Environment of this process with this checkout first on the import path."""
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def polyconv(
    *arguments: str, cwd: Path | None = None, timeout: float = 300.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to completion."""
    return subprocess.run(
        command_line(*arguments),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def python(program: str, *arguments: str, **variables: str) -> str:
    """Output of a Python program in a new process, which must succeed."""
    command, environ = [sys.executable, "-c", program, *arguments], environment(**variables)
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
