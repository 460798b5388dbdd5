"""CUDA builds of PyTorch, each in an environment of its own under the developers' cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_emulator.toolchain import ToolchainError, cache_dir, lock

from . import stand_ins
from .library import process_environment

_NAME, _TORCH = "torch-cuda-venv-2.6.0", "torch==2.6.0"
"""Supported by polyconv, and compiled for compute capability 7.0 among others, as the emulator wants it."""
_BARE = (
    _TORCH,
    # What it was built with: runtime and headers, and the compiler that it pins.
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-nvcc-cu12==12.4.131",
    "nvidia-cuda-nvrtc-cu12==12.4.127",
)
_WITH_DEPENDENCIES = (
    # Those of PyTorch that are not NVIDIA's.
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "sympy==1.13.1",
    "typing-extensions>=4.10",
    # polyconv's.
    "cuda-bindings==12.9.*",
    "cuda-core>=1.0",
    # The tests'.
    "hypothesis",
    "pytest",
    "pytest-timeout",
)


def torch_environment(
    name: str, packages: Sequence[str], python: str = sys.executable, bare: Sequence[str] = ()
) -> Path:
    """The Python of an environment with these packages, PyTorch's first (some 4.5 GB with all that it depends on).

    ``bare``: packages that are installed before, without what they depend on.
    """
    folder = cache_dir() / name
    marker, wanted = folder / "installed", (*bare, *packages)[0]
    with lock(cache_dir() / f"{name}.lock"):
        if not marker.exists() or marker.read_text().strip() != wanted:
            print(f"installing {' '.join((*bare, *packages))} into {folder}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            run([python, "-m", "venv", str(folder)])
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
            if bare:
                run([*pip, "--no-deps", *bare])
            run([*pip, *packages])
            marker.write_text(f"{wanted}\n")
    return folder / "bin" / "python"


@dataclass(frozen=True)
class PretendedTorch:
    """A Python whose PyTorch is a CUDA build, and what its processes need to find fake GPUs."""

    python: Path
    stand_ins: Path

    @classmethod
    def installed(cls) -> PretendedTorch:
        """Fetch it the first time: 0.85 GB, without the libraries that could compute nothing here (stand_ins.py)."""
        python = torch_environment(_NAME, _WITH_DEPENDENCIES, bare=_BARE)
        with lock(cache_dir() / f"{_NAME}.lock"):
            return cls(python, stand_ins.build(_packages(python) / "torch" / "lib", python.parents[1]))

    def environment(
        self, devices: str, base: Mapping[str, str] = os.environ, *, caching: bool = False
    ) -> dict[str, str]:
        """As :func:`fake_cuda.process_environment`, for this Python."""
        nvidia = _packages(self.python) / "nvidia"
        headers = (nvidia / "cuda_runtime" / "include", nvidia / "cuda_nvcc" / "include")
        found = process_environment(headers, devices, base, caching=caching)
        found["LD_LIBRARY_PATH"] += f"{os.pathsep}{self.stand_ins}"
        return found


def _packages(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python3*/site-packages"))


def run(command: Sequence[str], cwd: Path | None = None) -> None:
    """Run a command that is silent unless it fails."""
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise ToolchainError(f"{' '.join(command)}\n{result.stdout}")
