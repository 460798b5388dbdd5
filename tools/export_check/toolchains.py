"""Tool chains for exported files: CUDA 11.8's nvcc with a compiler that it accepts, and CUDA builds of PyTorch.

They come from Debian's and Python's package indices, into the developers' cache. They need neither a GPU nor rights
beyond the cache's folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fake_cuda.environment import run
from gpu_emulator.toolchain import ToolchainError, cache_dir, lock

# Debian 12 has nvcc and the newest gcc that it takes; NVIDIA's Python packages have the runtime and headers.
_DEBIAN = (
    "nvidia-cuda-toolkit",
    "libthrust-dev",
    "libcub-dev",
    "libcu++-dev",
    "gcc-11",
    "g++-11",
    "cpp-11",
    "libgcc-11-dev",
    "libstdc++-11-dev",
)
_PYTHON = ("nvidia-cuda-nvcc-cu11==11.8.89", "nvidia-cuda-runtime-cu11==11.8.89")
_PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, and the C++ compiler for its nvcc (the system's if absent)."""

    home: Path
    cc: Path | None = None
    cxx: Path | None = None

    @property
    def headers(self) -> Path:
        return self.home / "include"

    def variables(self) -> dict[str, str]:
        """Variables that torch.utils.cpp_extension reads."""
        found = {"CUDA_HOME": str(self.home)}
        if self.cc and self.cxx:
            found |= {"CC": str(self.cc), "CXX": str(self.cxx)}
        return found


def cuda_11_8() -> Toolkit:
    """CUDA 11.8's nvcc: 147 MB, fetched in half a minute and kept."""
    folder = cache_dir() / "cuda-11.8"
    if not folder.exists():
        with lock(cache_dir() / "cuda-11.8.lock"):
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
                    _assemble(Path(scratch))
                    os.rename(Path(scratch) / "toolkit", folder)
    compilers = folder / "debian" / "usr" / "bin"
    return Toolkit(folder, compilers / "gcc-11", compilers / "g++-11")


def _assemble(scratch: Path) -> None:
    """Put the toolkit's files where nvcc and torch expect them: ``bin``, ``nvvm``, ``include``, ``lib64``."""
    toolkit = scratch / "toolkit"
    debian, python = toolkit / "debian", scratch / "python"
    fetch_debian(scratch, debian, _DEBIAN, "main contrib non-free")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(python), *_PYTHON])
    nvidia = python / "nvidia"
    binaries, nvvm = toolkit / "bin", toolkit / "nvvm" / "bin"
    for folder in (binaries, nvvm):
        folder.mkdir(parents=True)
    tools = debian / "usr" / "lib" / "nvidia-cuda-toolkit"
    for name in ("ptxas", "fatbinary", "cudafe++"):
        shutil.copy2(debian / "usr" / "bin" / name, binaries)
    shutil.copy2(tools / "bin" / "nvcc", binaries)
    shutil.copy2(tools / "bin" / "cicc", nvvm)
    shutil.copytree(tools / "libdevice", toolkit / "nvvm" / "libdevice")
    shutil.copytree(nvidia / "cuda_runtime" / "lib", toolkit / "lib64")
    (toolkit / "lib64" / "libcudart.so").symlink_to("libcudart.so.11.0")
    for source in (nvidia / "cuda_runtime" / "include", nvidia / "cuda_nvcc" / "include"):
        shutil.copytree(source, toolkit / "include", dirs_exist_ok=True)
    for name in ("thrust", "cub", "cuda", "nv"):
        shutil.copytree(debian / "usr" / "include" / name, toolkit / "include" / name)
    (binaries / "nvcc.profile").write_text(_PROFILE)
    # g++-11 looks for the C++ library at its package's path: the system's serves.
    libraries = debian / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(exist_ok=True)
    (libraries / "libstdc++.so.6").symlink_to("/usr/lib/x86_64-linux-gnu/libstdc++.so.6")
    run([str(binaries / "nvcc"), "--version"])


def fetch_debian(
    scratch: Path, root: Path, names: Iterable[str], sections: str, architecture: str | None = None
) -> None:
    """Unpack packages of the system's own Debian source, of sections and for a processor that it need not name."""
    sources = [path.read_text() for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]
    main = next((text for text in sources if "Components: main\n" in text), None)
    if main is None or shutil.which("apt-get") is None:
        raise ToolchainError(
            f"{', '.join(names)}: to be fetched from Debian 12's packages, and this system has no Debian source in "
            "/etc/apt/sources.list.d"
        )
    (scratch / "lists" / "partial").mkdir(parents=True)
    packages = scratch / "packages"
    packages.mkdir()
    listing = scratch / "debian.sources"
    listing.write_text(main.replace("Components: main\n", f"Components: {sections}\n"))
    options = {
        "Dir::Etc::sourcelist": listing,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": scratch / "lists",
        "APT::Sandbox::User": "",  # it could not read the cache
    }
    if architecture is not None:
        options |= {"APT::Architecture": architecture}
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    run([*apt, "update"])
    run([*apt, "download", *names], cwd=packages)
    root.mkdir(parents=True)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg", "-x", str(package), str(root)])


def python_for(torch: str) -> str:
    """A Python for which a version of PyTorch has wheels: this one, unless too new for PyTorch 2.0."""
    if not torch.startswith("torch==2.0.") or sys.version_info < (3, 12):
        return sys.executable
    found = next(filter(None, map(shutil.which, ("python3.11", "python3.10"))), None)
    if found is None:
        raise ToolchainError(
            f"{torch} needs Python 3.11 or older, and there is no python3.11 or python3.10 on the PATH"
        )
    return found
