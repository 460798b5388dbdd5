"""``polyconv bundle``, wheels of kernels, and ``polyconv cache verify --model``: the gate of a deployment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyconv import cli, settings
from polyconv.cli.warmup import model_problems
from polyconv.cuda.errors import MissingKernelError
from polyconv.cuda.jit import bundle as bundles
from polyconv.cuda.jit.bundle import Bundle
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.fingerprint import sha256
from polyconv.cuda.planner import KernelSpec
from polyconv.model.aot import wanted_by
from polyconv.problem import Pass
from polyconv.tools.doctor import environment
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, axpy_spec
from virtual_gpu.gpu import VirtualGpu, record_only

SPEC, ARCH = axpy_spec(), "sm_70"
MODEL = "import torch\n\n\ndef network():\n    return torch.nn.Conv2d(8, 16, (5, 9))\n"
SHAPE = "2,8,24,40"

pytestmark = pytest.mark.usefixtures("new_warnings")


def make_bundle(folder: Path, *specs: KernelSpec, arch: str = ARCH, code: bytes = b"machine code") -> Path:
    machine = KernelCache(folder.parent / "machine", include_dirs=[KERNELS], compiler=lambda *_: code)
    writer = BundleWriter(folder, machine)
    with settings.use(kernels="off"):  # as the command does
        for spec in specs:
            writer.add(spec, arch)
    writer.finish(["a test"])
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "kernels", SPEC)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    bundles.installed.cache_clear()
    yield folder
    bundles.installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("mymodel")]:
        del sys.modules[name]


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert cli.main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def wheel(folder: Path, output: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Path:
    found = ask(capsys, "bundle", "wheel", str(folder), "--name", "mymodel-kernels", "-o", str(output), *options)
    return Path(found["wheel"])


def served() -> bytes:
    """The kernel in a process that must not compile."""
    with settings.use(jit=False):
        return KernelCache("/nowhere", include_dirs=[KERNELS]).get(SPEC, ARCH)


# ---- wheels


def test_digest(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = Bundle(bundle).digest
    assert ask(capsys, "bundle", "digest", str(bundle)) == {"directory": str(bundle), "digest": digest}
    assert cli.main(["bundle", "digest", f"{bundle}#{digest}"]) == 0
    assert capsys.readouterr().out == f"{digest}\n"
    assert cli.main(["bundle", "digest", f"{bundle}#{'0' * 64}"]) == 1


def test_the_kernels_of_an_installed_wheel_are_found(
    bundle: Path, tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By pip, and with permissions and links that no bundle without a digest may have."""
    path = wheel(bundle, tmp_path / "dist", capsys, "--version", "1.0")
    assert path.name == "mymodel_kernels-1.0-py3-none-any.whl"
    with pytest.raises(MissingKernelError):
        served()
    bundles.installed.cache_clear()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    ran = subprocess.run([*install, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    subprocess.run(["chmod", "-R", "a+rwX", str(site)], check=True)
    assert served() == b"machine code"
    (found,) = (finding for finding in environment.findings() if finding.name == "bundle")
    assert (found.state, str(site) in found.text) == ("ok", True)
    with settings.use(kernels="off"), pytest.raises(MissingKernelError):
        served()
    (cubin,) = site.rglob("kernel.cubin")
    cubin.write_bytes(b"other code")
    bundles.installed.cache_clear()
    with pytest.raises(MissingKernelError, match="its checksum"):
        served()


def test_a_bundle_that_is_named_comes_before_a_wheel(
    bundle: Path, tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zipfile.ZipFile(wheel(bundle, tmp_path, capsys)).extractall(site)
    (tmp_path / "other").mkdir()
    other = make_bundle(tmp_path / "other" / "kernels", SPEC, code=b"other code")
    assert served() == b"machine code"
    with settings.use(kernels=other):
        assert served() == b"other code"
    (entry,) = (path for path in other.iterdir() if path.is_dir())
    (entry / "kernel.cubin").write_bytes(b"damaged")
    with settings.use(kernels=other), pytest.warns(RuntimeWarning, match="that of another bundle runs instead"):
        assert served() == b"machine code"


def test_a_wheel_is_complete_and_the_same_each_time(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = wheel(bundle, tmp_path / "one", capsys)
    os.utime(bundle / "manifest.json", (0, 0))
    second = wheel(Path(f"{bundle}#{Bundle(bundle).digest}"), tmp_path / "two", capsys)
    assert first.name == second.name
    assert Bundle(bundle).digest[:12] in first.name
    assert first.read_bytes() == second.read_bytes()
    archive = zipfile.ZipFile(first)
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    inside = {name for name in archive.namelist() if name.startswith("mymodel_kernels/")}
    there = {"manifest.json", *(f"{entry.name}/{name}" for name in ("kernel.cu", "kernel.cubin", "meta.json"))}
    assert inside == {"mymodel_kernels/__init__.py", *(f"mymodel_kernels/kernels/{name}" for name in there)}
    (record,) = (name for name in archive.namelist() if name.endswith("RECORD"))
    assert {line.partition(",")[0] for line in archive.read(record).decode().splitlines()} == set(archive.namelist())


def test_a_wheel_that_cannot_be_imported_is_a_warning(site: Path) -> None:
    (site / "mymodel_broken-1.0.dist-info").mkdir()
    described = site / "mymodel_broken-1.0.dist-info"
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mymodel-broken\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[polyconv.kernels]\nbroken = mymodel_absent:KERNELS\n")
    with pytest.warns(RuntimeWarning, match="cannot use the kernels of broken"), pytest.raises(MissingKernelError):
        served()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wheel"], "--name is needed"),
        (["wheel", "--name", "my model"], "is no name of a distribution"),
        (["wheel", "--name", "a", "--version", "new"], "is no version"),
        (["wheel", "--name", "a", "-o", __file__], "cannot write into"),
    ],
)
def test_wrong_usage(bundle: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    action, *rest = arguments
    assert cli.main(["bundle", action, str(bundle), *rest]) == 2
    assert words in capsys.readouterr().err


def test_no_wheel_is_made_of_a_damaged_bundle(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    (entry / "kernel.cubin").write_bytes(b"damaged")
    assert cli.main(["bundle", "wheel", str(bundle), "--name", "a", "-o", str(tmp_path / "dist")]) == 2
    assert f"1 kernels of {bundle} are refused, the first: {entry.name}" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


# ---- the gate


def test_verify_names_every_kernel_that_a_model_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_gate_net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    model, shape = "small_gate_net:network", tuple(map(int, SHAPE.split(",")))
    wanted = list(wanted_by(model_problems(model, [shape], [Pass.FPROP]), "sm_80").kernels)
    assert len(wanted) > 1
    make_bundle(tmp_path / "kernels", *wanted, arch="sm_80")
    options = ["--model", model, "--input-shape", SHAPE, "--pass", "fprop", "--directory", "kernels"]
    verify = ["cache", "verify", *options, "--arch"]
    assert ask(capsys, *verify, "sm_80")["missing"] == {"sm_80": {}}
    assert cli.main([*verify, "sm_80"]) == 0
    assert f"{model}: no kernel is missing for sm_80" in capsys.readouterr().out
    assert ask(capsys, *verify, "sm_80,sm_70", status=1)["missing"]["sm_70"]
    shutil.rmtree("kernels")
    make_bundle(tmp_path / "kernels", *wanted[1:], arch="sm_80")
    gone = wanted[0].symbol
    assert ask(capsys, *verify, "sm_80", status=1)["missing"] == {"sm_80": {gone: "not in kernels"}}
    assert cli.main([*verify, "sm_80"]) == 1
    printed = capsys.readouterr()
    assert f"{gone} for sm_80: not in kernels" in printed.out
    assert (
        f"1 kernels are missing; polyconv warmup {model} --input-shape {SHAPE} --arch sm_80 -o kernels" in printed.err
    )


@pytest.mark.parametrize(
    "arguments", [["verify", "--model", "a:b"], ["verify", "--input-shape", "1,2,3,4"], ["info", "--model", "a:b"]]
)
def test_wrong_usage_of_the_gate(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", *arguments]) == 2
    assert "--model and --input-shape are for verify" in capsys.readouterr().err


# ---- load time


def test_a_bundle_of_300_kernels_loads_fast(tmp_path: Path) -> None:
    """A few times the processor time in which the files are read and hashed, whatever the load of the machine."""
    loaded, hashed = run_in_virtual_gpu(_load_times, tmp_path / "kernels")
    assert loaded <= 10 * hashed


def _load_times(folder: Path) -> tuple[float, float]:
    """Shortest processor times: to find and load 300 kernels of 40 kB, and to read and hash their files alone."""
    specs = [axpy_spec(value=value) for value in range(100, 400)]
    code = KernelCache(include_dirs=[KERNELS]).get(specs[0], ARCH) + bytes(40_000)

    def renamed(spec: KernelSpec, _: str) -> bytes:
        return code.replace(specs[0].symbol.encode(), spec.symbol.encode())

    writer = BundleWriter(folder, KernelCache(folder.parent / "machine", include_dirs=[KERNELS], compiler=renamed))
    for spec in specs:
        writer.add(spec, ARCH)
    writer.finish(["a test"])
    files = list(folder.rglob("kernel.cubin"))
    loaded, hashed = [], []
    with VirtualGpu(record_only) as gpu, settings.use(kernels=f"{folder}#{Bundle(folder).digest}", jit=False):
        device = gpu.backend().device
        for _ in range(10):
            device._kernels.clear()
            start = time.process_time()
            cubins = KernelCache(folder / "none", include_dirs=[KERNELS]).get_many(specs, ARCH)
            for spec, cubin in zip(specs, cubins, strict=True):
                device.load(spec, cubin)
            loaded.append(time.process_time() - start)
            start = time.process_time()
            for file in files:
                sha256(file.read_bytes())
            hashed.append(time.process_time() - start)
        device._kernels.clear()  # they have the code of one kernel, and other tests use the device
    return min(loaded), min(hashed)
