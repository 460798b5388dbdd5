"""Smoke test of a fresh installation: ``python smoke.py [--pure]``, with the Python of the installation.

Run it outside a checkout, of which it uses nothing. ``--pure`` is for the wheel without the CPU kernels. Besides
polyconv and torch the environment needs mypy. Each check prints a line; the first failure ends the run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import polyconv

RIGHT = """\
import torch
import polyconv

conv = polyconv.Conv2d(8, 16, (5, 9), dilation=(2, 3))
version: str = polyconv.__version__
explanation: polyconv.Explanation = polyconv.explain(conv, (2, 8, 40, 50))
"""
WRONG = RIGHT + "number: int = polyconv.__version__\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pure", action="store_true", help="the wheel without the CPU kernels")
    native = not parser.parse_args().pure
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    check_installation()
    check_convolution()
    check_plan(native)
    check_command(native)
    check_types()
    return 0


def check_installation() -> None:
    """The installed package was imported, and knows its version."""
    place = Path(polyconv.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not of the environment {sys.prefix}"
    assert polyconv.__version__ == importlib.metadata.version("polyconv")
    print(f"polyconv {polyconv.__version__} in {place.parent}")


def check_convolution() -> None:
    """Output and gradients agree with torch, within the default tolerance."""
    torch.manual_seed(0)
    ours = polyconv.Conv2d(8, 16, (5, 9), padding=(2, 4), dilation=(2, 3))
    theirs = torch.nn.Conv2d(8, 16, (5, 9), padding=(2, 4), dilation=(2, 3), dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 8, 40, 50, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    y, y64 = ours(x), theirs(x64)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    y64.backward(gradient.double())
    weights = zip(ours.parameters(), theirs.parameters(), strict=True)
    pairs = [(y, y64), (x.grad, x64.grad), *((mine.grad, yours.grad) for mine, yours in weights)]
    errors = [_relative_error(got, wanted) for got, wanted in pairs]
    assert max(errors) < 1e-4, f"errors of output, input's and parameters' gradients: {errors}"
    worst = max(errors)
    print(f"forward and backward agree with torch: {worst:.1e} relative at worst")


def _relative_error(got: Tensor | None, wanted: Tensor | None) -> float:
    assert got is not None, "a gradient is missing"
    assert wanted is not None
    got, wanted = got.detach().double(), wanted.detach()
    return float((got - wanted).abs().max() / wanted.abs().max())


def check_plan(native: bool) -> None:
    """``explain`` names a polyconv kernel, or the reason for its absence."""
    text = str(polyconv.explain(polyconv.Conv2d(32, 64, (5, 9), dilation=(2, 3)), (1, 32, 128, 128)))
    if native:
        assert "lanes on " in text, f"no native plan:\n{text}"
    else:
        assert "no native CPU kernels" in text, f"it should say that the kernels are not there:\n{text}"
    print(next(line.strip() for line in text.splitlines() if line.strip().startswith("runs")))


def check_command(native: bool) -> None:
    """The command is on the environment's path."""
    command = Path(sys.prefix) / "bin" / "polyconv"
    version = _output(str(command), "--version")
    assert polyconv.__version__ in version, version
    plan = _output(str(command), "plan", "W1", "--device", "cpu")
    assert "W1" in plan, plan
    assert ("lanes on " in plan) is native, plan
    print("polyconv plan W1 --device cpu: works")


def check_types() -> None:
    """mypy sees the package's types (``py.typed``): it accepts a correct program and rejects a wrong one."""
    with tempfile.TemporaryDirectory() as folder:
        # torch itself would take mypy half a minute.
        settings = Path(folder, "mypy.ini")
        settings.write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
        for text, status in ((RIGHT, 0), (WRONG, 1)):
            program = Path(folder, "program.py")
            program.write_text(text)
            command = [
                sys.executable,
                "-m",
                "mypy",
                "--config-file",
                str(settings),
                "--cache-dir",
                folder,
                str(program),
            ]
            ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            assert ran.returncode == status, f"mypy ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
        assert 'expression has type "str"' in ran.stdout, ran.stdout
    print("mypy sees the types")


def _output(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
