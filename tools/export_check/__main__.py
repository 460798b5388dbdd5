"""Exports files, builds them with real compilers in real CUDA builds of PyTorch, and executes what the compilers made.

    python tools/export_check                  a sample: some minutes, and 5 GB in the cache the first time
    POLYCONV_NIGHTLY=1 python tools/export_check   all files
    python tools/export_check W1 W2            these files alone, and without the newest PyTorch
    python tools/export_check --list

The oldest PyTorch and CUDA that a file promises to work with are fetched (toolchains.py). The newest:

    CUDA_HOME               the toolkit, of the CUDA that PyTorch is built with; /usr/local/cuda-13.0 if absent.
    TORCH_CUDA_ARCH_LIST    the architecture to build for; 7.5 if absent (CUDA 13 has no 7.0).
    POLYCONV_CI_TORCH       the PyTorch to install; torch==2.12.1 if absent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from export_check.cases import EXAMPLE, FILES, W1, File
from export_check.toolchains import Toolkit, cuda_11_8, python_for
from fake_cuda import process_environment
from fake_cuda.environment import torch_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
OLDEST = "torch==2.0.1"
HOST_MILLISECONDS = 0.35
"""Limit of the host's processor time for the forward of W1."""
FIRST_MODEL, SECOND_PROCESS = 45.0, 3.0
"""Limits of processor time to the first model [s], in the process that builds and in a later one."""
AT_ONCE = os.cpu_count() or 1
"""Files checked in parallel: each mostly uses one processor, to start PyTorch or to emulate."""
WORKSPACE = "kWorkspace = 64 << 20;"
"""As every file has it."""
NIGHTLY = os.environ.get("POLYCONV_NIGHTLY", "") not in ("", "0")
START = time.perf_counter()


class Report:
    """Messages about one file, kept together because files are checked in parallel."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []
        """Programs that failed."""

    def heading(self, text: str) -> None:
        self.lines.append(f"--- {text} ({time.perf_counter() - START:.0f} s)\n")


class Builds:
    """A Python with a CUDA build of PyTorch, the matching toolkit, and a build folder."""

    def __init__(self, python: Path, toolkit: Toolkit, arch: str, folder: Path) -> None:
        self.report = Report()
        self._python, self._toolkit = python, toolkit
        self._variables = {
            **os.environ,
            **toolkit.variables(),
            "TORCH_CUDA_ARCH_LIST": arch,
            "TORCH_EXTENSIONS_DIR": str(folder),
            "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),  # ninja is next to it
            "PYTHONWARNINGS": "ignore",
            "GPU_EMULATOR_CXX": os.environ.get("CXX", "g++"),  # not the one for nvcc
        }

    def run(self, program: str, *arguments: str) -> None:
        """Run a program without a GPU."""
        self._start(program, arguments, self._variables)

    def run_pretended(self, program: str, *arguments: str, devices: str = "v100", caching: bool = False) -> None:
        """Run a program on fake GPUs, with or without PyTorch's caching allocator."""
        variables = process_environment((self._toolkit.headers,), devices, self._variables, caching=caching)
        self._start(program, arguments, variables)

    def _start(self, program: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Print a program's output. A failure is counted, and the others still run."""
        command = [str(self._python), str(PROGRAMS / f"{program}.py"), *arguments]
        result = subprocess.run(command, env=variables, capture_output=True, text=True)
        self.report.lines.append(result.stdout)
        if result.returncode != 0:
            last_lines = "\n".join(result.stderr.splitlines()[-40:])
            self.report.lines.append(f"{' '.join(command)}\n{last_lines}\n  FAILED: {program}\n")
            self.report.failed.append(program)


def export(file: File, folder: Path) -> Path:
    """Write a file into its own folder."""
    folder.mkdir()
    path = folder / "model.py"
    command = [sys.executable, "-m", "polyconv_cli", "export", *file.words.split(), "-o", str(path)]
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": search}
    subprocess.run(command, env=variables, check=True, stderr=subprocess.DEVNULL)
    if file.workspace:
        text = path.read_text()
        assert WORKSPACE in text
        path.write_text(text.replace(WORKSPACE, f"kWorkspace = {file.workspace};"))
    return path


def check(file: File, builds: Builds, folder: Path) -> Report:
    """Export a file, build it, and execute its cases."""
    path = export(file, folder)
    builds.report.heading(f"{file.name}: {len(path.read_text().splitlines())} lines, polyconv export {file.words}")
    for numbers in file.board:
        builds.report.heading(f"{file.name}: image, taps, channels, batch {numbers} on a pretended {file.devices[0]}")
        builds.run_pretended("submits", str(path), *map(str, numbers), devices=file.devices[0])
    for limit in () if file.slow_build or file.board else (FIRST_MODEL, SECOND_PROCESS):
        builds.run("first_model", str(folder), str(limit))
    if file is EXAMPLE:
        for devices in file.devices:
            builds.report.heading(f"{file.name}: the command itself, on a pretended {devices}")
            builds.run_pretended("the_command", str(folder), json.dumps(W1), devices=devices)
        builds.report.heading(f"{file.name}: the host's time, and how it behaves in its surroundings")
        builds.run_pretended("host_time", str(folder), str(HOST_MILLISECONDS), caching=True)
        builds.run_pretended("surroundings", str(folder), devices="v100,v100", caching=True)
    for case in file.cases:
        for devices in file.devices[: 1 if file.slow_build else None]:
            arguments = ", other arguments" if case.arguments else ""
            builds.report.heading(f"{file.name}: {case.shape} on a pretended {devices}{arguments}")
            builds.run_pretended("computes", str(path), case.as_json(), devices=devices)
    return builds.report


def newest(folder: Path) -> Builds:
    """The newest CUDA build of PyTorch, with this machine's toolkit."""
    toolkit = Toolkit(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda-13.0")))
    if not (toolkit.home / "bin" / "nvcc").exists():
        sys.exit(
            f"There is no nvcc in {toolkit.home}/bin, so the exported file cannot be built with the newest PyTorch.\n"
            "Install the CUDA toolkit, or say where it is: CUDA_HOME=/usr/local/cuda python tools/export_check"
        )
    torch = os.environ.get("POLYCONV_CI_TORCH", "torch==2.12.1")
    python = torch_environment("torch-cuda-venv", (torch, "ninja", "numpy"))
    return Builds(python, toolkit, os.environ.get("TORCH_CUDA_ARCH_LIST", "7.5"), folder / "extensions")


def check_with_newest(builds: Builds, folder: Path) -> Report:
    """Build the example as a user would."""
    builds.report.heading(f"{EXAMPLE.name} with the newest PyTorch")
    export(EXAMPLE, folder)
    builds.run("loads", str(folder))
    return builds.report


def main(names: Sequence[str]) -> None:
    if "--list" in names:
        for file in FILES:
            print(
                f"{file.name:26} polyconv export {file.words}{'' if file.always else ' (if it is named, and at night)'}"
            )
        return
    unknown = set(names) - {file.name for file in FILES}
    if unknown:
        sys.exit(f"no file {', '.join(map(repr, sorted(unknown)))}: python tools/export_check --list names them")
    if names:
        chosen = [file for file in FILES if file.name in names]
    else:
        chosen = [file for file in FILES if file.always or NIGHTLY]
    toolkit = cuda_11_8()
    python = torch_environment(
        "torch-cuda-venv-2.0.1", (OLDEST, "numpy<2", "ninja", "setuptools<81"), python_for(OLDEST)
    )
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        folders = [Path(scratch) / str(i) for i in range(len(chosen) + 1)]
        checks = [
            pool.submit(check, file, Builds(python, toolkit, file.arch, folder / "extensions"), folder)
            for file, folder in zip(chosen, folders, strict=False)
        ]
        if not names:
            checks.append(pool.submit(check_with_newest, newest(folders[-1]), folders[-1]))
        failed = 0
        for each in checks:
            report = each.result()
            print("".join(report.lines), end="", flush=True)
            failed += len(report.failed)
    print(f"--- done, {failed} failed ({time.perf_counter() - START:.0f} s)")
    sys.exit(bool(failed))


main(sys.argv[1:])
