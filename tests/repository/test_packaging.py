"""Contents of the source archive and the wheel, against the tree. Nothing is compiled.

The wheel with kernels is built, repaired, installed and used by ``.ci/check_wheel``.
"""

from __future__ import annotations

import email.message
import email.parser
import io
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
import tomllib

import polyconv
from release import artifacts, materials

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def tree() -> list[str]:
    """Files of the project: those that git knows or would add; in a source archive, those on its list."""
    if not (ROOT / ".git").exists():
        listed = (ROOT / "src" / "polyconv.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
        return [name for name in listed if ".egg-info/" not in name]
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def built(kind: str, source: Path, folder: Path) -> Path:
    """Output of the build backend: an ``sdist``, or a ``wheel`` without kernels."""
    folder.mkdir()
    environment = {**os.environ, "POLYCONV_BUILD_NATIVE": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)], cwd=source, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")  # a build leaves files behind
    for name in tree():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return built("sdist", copy, copy.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return built("wheel", source, unpacked / "wheel")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"polyconv-{polyconv.__version__}.dist-info/METADATA").decode()
    return email.parser.Parser().parsestr(text)


def test_source_archive(sdist: Path) -> None:
    artifacts.check_sdist(sdist)
    artifacts.check_only_tracked(sdist, tree())


def test_source_archive_has_what_the_tests_need(sdist: Path) -> None:
    """All of tests/, and every folder that a test names by path."""
    names = set(artifacts.sdist_names(sdist))
    sources = [name for name in tree() if name.startswith("tests/")]
    assert set(sources) <= names
    folders = {name.split("/")[0] for name in tree() if "/" in name and not name.startswith(".")}
    for name in sources:
        if name.endswith(".py"):
            named = set(re.findall(r'ROOT / "(\w+)"', (ROOT / name).read_text(encoding="utf-8"))) & folders
            assert all(any(other.startswith(f"{folder}/") for other in names) for folder in named), name


def test_wheel_is_the_package(wheel: Path) -> None:
    """Every file under src/polyconv that is opened at run time, and nothing else."""
    package = [
        name.removeprefix("src/") for name in tree() if name.startswith(("src/polyconv/", "src/polyconv_cli.py"))
    ]
    artifacts.check_wheel(wheel, package, polyconv.__version__, native=False)
    data = {name for name in artifacts.wheel_names(wheel) if name.startswith("polyconv/") and not name.endswith(".py")}
    assert {"polyconv/py.typed", "polyconv/cuda/planner/profiles.json", "polyconv/measure/data/workloads.json"} <= data


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "polyconv"
    assert metadata["Version"] == polyconv.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split(r"[<>=]", line)[0] for line in always] == ["torch"]


def test_version_is_written_once() -> None:
    """In version.py, where ``pyproject.toml`` reads it."""
    pattern = re.compile(rf'version\w*\s*=\s*"{re.escape(polyconv.__version__)}"')
    places = [
        name
        for name in tree()
        if name.endswith((".py", ".toml", ".cfg")) and pattern.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert places == ["src/polyconv/version.py"]


def test_changelog_has_the_version() -> None:
    """Under its own heading, or in brackets under Unreleased before."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings, "the changelog has no section"
    assert polyconv.__version__ in headings[0], f"the first section is {headings[0]!r}, not {polyconv.__version__}"


def test_extras_that_are_named_exist() -> None:
    """In the README, the documentation, the workflows and the messages of the package."""
    named: dict[str, str] = {}
    for name in tree():
        if name.endswith((".md", ".py", ".yml", ".toml")) or name.startswith(".ci/"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for extras in re.findall(r"(?:polyconv|['\"]\.)\[([a-z0-9, ]+)\]", text):
                named.update({extra.strip(): name for extra in extras.split(",")})
    assert {"cu12", "cu13", "cli", "bench", "dev"} <= set(named)
    assert {extra: name for extra, name in named.items() if extra not in PROJECT["optional-dependencies"]} == {}


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["README.md"], "lacks .*setup.py"),
        ([*artifacts.SDIST_HAS, "src/polyconv/cpu/_native.abi3.so"], "_native.abi3.so, which no source archive should"),
        ([*artifacts.SDIST_HAS, "build/lib/polyconv/nn.py"], "build/lib/polyconv/nn.py, which no"),
    ],
)
def test_unfit_source_archives(names: list[str], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "polyconv-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"polyconv-1.0/{name}"))
    with pytest.raises(artifacts.UnfitError, match=complaint):
        artifacts.check_sdist(path)


def test_unfit_wheels(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in artifacts.wheel_names(wheel) if name.startswith(("polyconv/", "polyconv_cli.py"))]
    version = polyconv.__version__
    with pytest.raises(artifacts.UnfitError, match=r"lacks \['polyconv/new.json'\]"):
        artifacts.check_wheel(wheel, [*names, "polyconv/new.json"], version, native=False)
    with pytest.raises(artifacts.UnfitError, match=r"has \['polyconv/nn.py'\] that it should not"):
        artifacts.check_wheel(wheel, [name for name in names if name != "polyconv/nn.py"], version, native=False)
    with pytest.raises(artifacts.UnfitError, match=r"lacks \['polyconv/cpu/_native.abi3.so', .*dispatch"):
        artifacts.check_wheel(wheel, names, version, native=True)
    monkeypatch.setattr(artifacts, "WHEEL_LIMIT", 1000)
    with pytest.raises(artifacts.UnfitError, match=r"none-any.whl has [\d,]+ bytes, more than 1,000"):
        artifacts.check_wheel(wheel, names, version, native=False)


@pytest.mark.parametrize(
    ("flags", "glibc", "complaint"),
    [
        (["-Wl,--no-as-needed", "-lgomp"], (2, 28), r"needs \['libgomp.so.1'\], which a user may not have"),
        (["-Wl,-rpath,/opt/torch/lib"], (2, 28), "looks for libraries in .*/opt/torch/lib"),
        (["-Wl,-soname,/venv/site-packages/a.so"], (2, 28), "paths of the machine .*: /venv/site-packages/a.so"),
        ([], (2, 1), "needs GLIBC_2.2: see `objdump -T"),
    ],
)
def test_unfit_modules(
    flags: list[str], glibc: tuple[int, int], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A one-line shared library, linked as the kernels must not be, or for a machine too old for it."""
    source, module = tmp_path / "module.c", tmp_path / "module.so"
    source.write_text("#include <unistd.h>\nint process(void) { return getpid(); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(module), *flags], check=True)
    monkeypatch.setattr(artifacts, "NEWEST_GLIBC", glibc)
    with pytest.raises(artifacts.UnfitError, match=complaint):
        artifacts.check_module(module)


def packed(path: Path, contents: dict[str, bytes], time: int) -> Path:
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(data), time, str(time), 0o600 | time % 2 * 0o111
            archive.addfile(member, io.BytesIO(data))
    return path


def test_same_files_give_the_same_source_archive(tmp_path: Path) -> None:
    """Whatever their order, times and owners; contents and the right to execute stay."""
    first = packed(tmp_path / "1" / "a.tar.gz", {"a/one": b"1", "a/two": b"2"}, time=1)
    second = packed(tmp_path / "2" / "a.tar.gz", {"a/two": b"2", "a/one": b"1"}, time=3)
    with pytest.raises(artifacts.UnfitError, match=r"differ: in order, times or permissions"):
        artifacts.check_same(first, second)
    for path in (first, second):
        artifacts.normalise_sdist(path, 315532800)
    artifacts.check_same(first, second)
    with tarfile.open(first) as archive:
        assert [(member.name, member.mode, member.mtime) for member in archive] == [
            ("a/one", 0o755, 315532800),
            ("a/two", 0o755, 315532800),
        ]
    third = packed(tmp_path / "3" / "a.tar.gz", {"a/one": b"1", "a/two": b"changed", "a/new": b""}, time=1)
    with pytest.raises(artifacts.UnfitError, match=r"two builds of a.tar.gz differ: a/new, a/two$"):
        artifacts.check_same(first, third)


def test_compressed_wheels(wheel: Path, tmp_path: Path) -> None:
    """Smaller, the same bytes each time, and with the same files, times and permissions."""
    compression = pytest.importorskip("release.compression", reason="needs deflate: tools/release/requirements.txt")
    copies = [Path(shutil.copy(wheel, tmp_path / name)) for name in ("one.whl", "other.whl")]
    for copy in copies:
        compression.compress(copy)
    artifacts.check_same(*copies)
    assert copies[0].stat().st_size < wheel.stat().st_size
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(copies[0]) as after:
        assert after.testzip() is None
        kept = [member for member in before.infolist() if not member.is_dir()]
        for old, new in zip(kept, after.infolist(), strict=True):
            assert (old.filename, old.date_time, old.external_attr) == (new.filename, new.date_time, new.external_attr)
            assert before.read(old) == after.read(new)


def test_bill_of_materials() -> None:
    """The version, what is required, and what is compiled in; in a wheel without native modules, nothing is."""
    described = {
        "components": [{"bom-ref": "requirements-L1", "name": "torch", "purl": "pkg:pypi/torch"}],
        "metadata": {"component": {"bom-ref": "root-component", "name": "polyconv"}},
    }
    pure = materials.complete(described, "1.2", None)
    assert pure["metadata"]["component"]["purl"] == "pkg:pypi/polyconv@1.2"
    assert pure["dependencies"][0] == {"ref": "root-component", "dependsOn": ["requirements-L1"]}
    native = materials.complete(described, "1.2", "1.0.3")
    purls = [component["purl"] for component in native["components"]]
    assert purls == ["pkg:pypi/torch", "pkg:github/google/highway@1.0.3"]
    assert native["dependencies"][0]["dependsOn"] == ["requirements-L1", "highway"]


def test_native_modules_are_for_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a machine with every tool installs the package without them; a Mac with them if it is asked to."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.delenv("POLYCONV_BUILD_NATIVE", raising=False)
    script = runpy.run_path("setup.py")
    monkeypatch.setattr(sys, "platform", "win32")
    assert script["missing"]() == "Linux or macOS, and this is win32"
    assert script["options"]() == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "where they have not run yet" in script["missing"]()
    assert script["options"]() == {}
    monkeypatch.setenv("POLYCONV_BUILD_NATIVE", "1")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert script["missing"]() == "arm64 as the processor of darwin, and this is x86_64"
