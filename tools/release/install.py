"""Installs the wheels of a release in clean environments, and uses them there: ``install.py FOLDER [PYTHON ...]``.

    python tools/release/install.py dist                                    with this Python and its torch: seconds
    python tools/release/install.py dist python3.10 python3.12 python3.13   with each of these, and torch from PyPI

An environment sees the torch (and mypy) of another one, but no polyconv that is installed there. For other Pythons that
is a CUDA build of the same torch, without NVIDIA's packages (tools/fake_cuda/stand_ins.py), kept in the developers'
cache: 1.6 GB each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_cuda import stand_ins
from fake_cuda.environment import torch_environment

PACKAGES = ("filelock", "fsspec", "jinja2", "mypy", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
"""mypy for the smoke test, and torch's dependencies except NVIDIA's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the wheels")
    parser.add_argument("pythons", nargs="*", help="default: the one that runs this")
    options = parser.parse_args()
    (native,), (pure,) = options.folder.glob("*manylinux*.whl"), options.folder.glob("*none-any.whl")
    for python in options.pythons or [sys.executable]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if options.pythons:
            python, environment["LD_LIBRARY_PATH"] = _with_torch(python)
        _smoke(python, environment, native)
        _smoke(python, environment, pure, "--pure")
    return 0


def _with_torch(python: str) -> tuple[str, str]:
    """A Python of the same version that has torch, and the folder of libraries that torch needs."""
    version = _output(python, "import sys; print(*sys.version_info[:2], sep='.')").strip()
    requirement = f"torch=={torch.__version__.partition('+')[0]}"
    found = torch_environment(f"release-{version}-venv", PACKAGES, python, bare=(requirement,))
    (libraries,) = found.parents[1].glob("lib/python3*/site-packages/torch/lib")
    return str(found), str(stand_ins.build(libraries, found.parents[1], runtime=True))


def _smoke(python: str, environment: dict[str, str], wheel: Path, *arguments: str) -> None:
    print(f"--- {wheel.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="polyconv-install-") as folder:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        clean = str(Path(folder, "bin", "python"))
        pip = [sys.executable, "-m", "pip", "--python", clean, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        # Folders in a .pth file are searched, but not the .pth files in them: an editable installation stays invisible.
        shown = _output(python, "import sys; print(*(p for p in sys.path if p.endswith('site-packages')), sep='\\n')")
        place = _output(clean, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(place, "torch.pth").write_text(shown)
        script = shutil.copy(Path(__file__).with_name("smoke.py"), folder)
        subprocess.run([clean, str(script), *arguments], check=True, cwd=folder, env=environment)


def _output(python: str, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
