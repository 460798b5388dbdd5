"""Requirements on the files of a release: the source archive, the wheel with native parts and the one without.

Each check reads one file and raises :class:`UnfitError` with the finding and a remedy. Nothing is built.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

SDIST_LIMIT = 2_400_000
"""Size limit [bytes]: sources, golden record and profiles are smaller; anything above slipped in."""

WHEEL_LIMIT = 4_000_000
"""Size limit of a wheel [bytes]."""

SDIST_HAS = (
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "csrc/build.py",
    "csrc/cpu/bindings/convolution.cc",
    "csrc/cuda/module.cc",
    "csrc/dispatch/module.cc",
    "pyproject.toml",
    "setup.py",
    "src/polyconv/__init__.py",
    "src/polyconv/cuda/kernels/common/common.cuh",
    "src/polyconv/py.typed",
    "tests/conftest.py",
    "tools/gpu_emulator/__init__.py",
)
"""One file of each kind needed to build the package and run its tests."""

NEVER_PACKED = ("*.so", "*.o", "*.d", "*.key", "*.pyc", "*.cubin", "*.ptx", "*.png", "build/*", "dist/*", ".*/*")
"""Build products, caches and images."""

KERNELS = "polyconv/cpu/_native.abi3.so"
"""The CPU kernels, in the wheel that has them."""

MODULES = (KERNELS, *(f"polyconv/{part}/_native.abi3.so" for part in ("cuda", "dispatch", "runtime")))
"""Also the modules that launch GPU kernels and call ATen, which need nothing of torch or CUDA from the loader, and the
override of ATen's convolution, which does."""

LIBRARIES = frozenset(
    {
        "libtorch_cpu.so",
        "libc10.so",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
)
"""Libraries that the kernels may need: torch's, which torch has loaded, and those of every Linux.

No OpenMP: threads are torch's own pool, and a second libgomp in the process would bring a second pool.
"""

NEWEST_GLIBC = (2, 28)
"""glibc of the machines that torch's own wheels support (manylinux_2_28)."""


PLATFORMS = {"x86_64": "manylinux_2_28_x86_64", "aarch64": "manylinux_2_28_aarch64"}
"""By processor, the platforms whose wheels have native modules. All others install the wheel without."""


class UnfitError(Exception):
    """A file that must not be released."""


def normalise_sdist(path: Path, time: int) -> None:
    """Rewrite a source archive so that the same files give the same bytes: sorted, one time, no owner."""
    packed = path.with_suffix(".new")
    with (
        tarfile.open(path) as archive,
        packed.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=time) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as rewritten,
    ):
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            data = archive.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.mode & 0o100 else 0o644, {}
            rewritten.addfile(member, data)
    packed.replace(path)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_same(first: Path, second: Path) -> None:
    """Two builds of one file have the same bytes; otherwise the members that differ are named."""
    if digest(first) == digest(second):
        return
    one, other = _member_digests(first), _member_digests(second)
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    raise UnfitError(
        f"two builds of {first.name} differ: {', '.join(names) or 'in order, times or permissions of their files'}"
    )


def _member_digests(path: Path) -> dict[str, str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist()}
    else:
        with tarfile.open(path) as archive:
            files = [(member.name, archive.extractfile(member)) for member in archive]
            contents = {name: file.read() for name, file in files if file}
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def sdist_names(path: Path) -> list[str]:
    """Files in a source archive, without its top folder."""
    with tarfile.open(path) as archive:
        return sorted(str(PurePosixPath(*PurePosixPath(m.name).parts[1:])) for m in archive if m.isfile())


def wheel_names(path: Path) -> list[str]:
    """Files in a wheel, without the folders that auditwheel lists."""
    with zipfile.ZipFile(path) as archive:
        return sorted(member.filename for member in archive.infolist() if not member.is_dir())


def check_sdist(path: Path) -> None:
    """Small, complete, and nothing but sources."""
    if path.stat().st_size > SDIST_LIMIT:
        raise UnfitError(f"{path.name} has {path.stat().st_size:,} bytes, more than {SDIST_LIMIT:,}: see MANIFEST.in")
    names = sdist_names(path)
    _require(path, names, SDIST_HAS)
    _forbid(path, names, NEVER_PACKED)


def check_only_tracked(path: Path, tracked: Iterable[str]) -> None:
    """The source archive has only files of the repository and those that setuptools writes."""
    strange = set(sdist_names(path)) - set(tracked)
    strange = {name for name in strange if not re.match(r"PKG-INFO$|setup\.cfg$|src/polyconv\.egg-info/", name)}
    if strange:
        raise UnfitError(f"{path.name} has files that git does not know: {', '.join(sorted(strange))}")


def check_wheel(path: Path, sources: Iterable[str], version: str, *, native: bool) -> None:
    """Exactly the package's files, the right tag and, with ``native``, kernels that every such machine can load.

    Args:
        sources: the files of the package, as ``polyconv/nn.py``.
        version: what the metadata must say.
    """
    names = wheel_names(path)
    info = f"polyconv-{version}.dist-info"
    package = {name for name in names if not name.startswith(f"{info}/")}
    wanted = {*sources, *(MODULES if native else [])}
    if package != wanted:
        absent, strange = sorted(wanted - package), sorted(package - wanted)
        raise UnfitError(
            f"{path.name} lacks {absent} and has {strange} that it should not: see package-data in pyproject.toml"
        )
    _require(path, names, [f"{info}/METADATA", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"])
    tags = [f"cp310-abi3-{platform}" for platform in PLATFORMS.values()] if native else ["py3-none-any"]
    wanted_names = [f"polyconv-{version}-{tag}.whl" for tag in tags]
    if path.name not in wanted_names:
        raise UnfitError(f"{path.name} should be called {' or '.join(wanted_names)}")
    if path.stat().st_size > WHEEL_LIMIT:
        raise UnfitError(f"{path.name} has {path.stat().st_size:,} bytes, more than {WHEEL_LIMIT:,}")
    if native:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            for module in MODULES:
                check_module(Path(archive.extract(module, folder)))


def check_module(path: Path) -> None:
    """The kernels find torch's libraries because torch is loaded, and need no newer C library than torch."""
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    if not needed <= LIBRARIES:
        raise UnfitError(f"{path.name} needs {sorted(needed - LIBRARIES)}, which a user may not have")
    searched = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)
    if searched:
        raise UnfitError(
            f"{path.name} looks for libraries in {searched}, which is a place of the machine that built it"
        )
    paths = sorted({text.decode() for text in re.findall(rb"/[\w./-]*/site-packages/[\w./-]*", path.read_bytes())})
    if paths:
        raise UnfitError(f"{path.name} contains paths of the machine that built it: {', '.join(paths)}")
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)
    newest = max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))  # a small module needs none
    if newest > NEWEST_GLIBC:
        symbol = f"GLIBC_{newest[0]}.{newest[1]}"
        raise UnfitError(
            f"{path.name} needs {symbol}: see `objdump -T {path.name} | grep {symbol}`, csrc/cpu/common/glibc.cc"
        )


def _require(path: Path, names: Iterable[str], wanted: Sequence[str]) -> None:
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise UnfitError(f"{path.name} lacks {', '.join(absent)}")


def _forbid(path: Path, names: Iterable[str], patterns: Sequence[str]) -> None:
    strange = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
    if strange:
        raise UnfitError(f"{path.name} has {', '.join(strange)}, which no source archive should: see MANIFEST.in")
