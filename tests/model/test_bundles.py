"""Kernels compiled ahead of time: selection, bundles, and running from one on a machine without a compiler."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polyconv
from commands import polyconv as command
from polyconv import cli, settings, tuning_key
from polyconv.autotune import tuning_file
from polyconv.backend import override
from polyconv.cuda import MissingKernelError
from polyconv.cuda.jit import cache
from polyconv.cuda.jit.bundle import Bundle, BundleError
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, all_kernels, plan_cuda
from polyconv.measure.workloads import find
from polyconv.model.aot import CLOSE, wanted_by
from polyconv.problem import Pass
from polyconv.selection import Preference
from polyconv.util.atomic_files import Folder
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, axpy_spec
from virtual_gpu.gpu import VirtualGpu

SPEC, ARCH = axpy_spec(), "sm_70"

MODEL = """
import torch


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, (5, 9), padding=(2, 4), dilation=(2, 3), bias=False),  # W1, shrunk
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3),  # W2
        torch.nn.Conv2d(32, 32, 3, groups=32),
    )
"""
SHAPE = (2, 8, 24, 40)


# ---- which kernels


@pytest.mark.parametrize("kind", list(Pass), ids=str)
def test_all_that_a_plan_names_and_what_comes_close(kind: Pass) -> None:
    (workload,) = find("W1")
    wanted = wanted_by([workload.problem(kind)], "sm_70")
    plan = plan_cuda(workload.problem(kind), DEVICES["v100"])
    assert set(plan.kernels) <= set(wanted.kernels) <= set(all_kernels())
    close = [c for c in plan.candidates if c.cost is not None and c.cost <= CLOSE * plan.cost_us]
    assert len(wanted.kernels) >= len(set(plan.kernels)) + len(close) - 1


def test_every_gpu_of_an_architecture_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (workload,) = find("resnet50-3b")
    problem = workload.problem("fprop")
    alone = wanted_by([problem], "sm_80").kernels
    other = replace(DEVICES["a100"], name="half of one", sms=4, clock_mhz=300)
    monkeypatch.setitem(DEVICES, "half", other)
    both = wanted_by([problem], "sm_80").kernels
    assert set(alone) | set(plan_cuda(problem, other).kernels) <= set(both)


def test_what_a_tuning_file_chooses_counts(tmp_path: Path) -> None:
    (workload,) = find("W1")
    problem = workload.problem("fprop")
    plan = plan_cuda(problem, DEVICES["v100"])
    slow = max((c for c in plan.candidates if c.cost is not None), key=lambda c: c.cost or 0.0).name
    path = tmp_path / "tuning.json"
    entry = tuning_file.Entry(slow, {slow: 1.0}, 1.0)
    there = tuning_key.Environment.of_cuda("Tesla V100-SXM2-16GB", "sm_70", "12.4", "12.9")
    tuning_file.update(path, tuning_file.Tuning.of(there, {tuning_key.problem_key(problem): entry}))
    usual = wanted_by([problem], "sm_70").kernels
    chosen = plan_cuda(problem, DEVICES["v100"], prefer=Preference(slow)).kernels
    assert not set(chosen) <= set(usual)
    with settings.use(tuning_file=(path,)):
        assert set(wanted_by([problem], "sm_70").kernels) == set(usual) | set(chosen)
        assert set(wanted_by([problem], "sm_80").kernels).isdisjoint(set(chosen) - set(usual))


def test_a_tuning_file_that_cannot_be_read_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{}")
    problem = find("W1")[0].problem(Pass.FPROP)
    expected = wanted_by([problem], "sm_70")
    with settings.use(tuning_file=(path,)), pytest.warns(RuntimeWarning, match="ignores a tuning file"):
        assert wanted_by([problem], "sm_70") == expected


def test_what_no_kernel_runs_is_said() -> None:
    (workload,) = find("W1")
    wanted = wanted_by([replace(workload.problem("fprop"), dtype="float64")], "sm_70")
    assert not wanted.kernels
    assert "float64" in next(iter(wanted.skipped.values()))


# ---- a bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with one small kernel."""
    folder = tmp_path / "kernels"
    machine = KernelCache(tmp_path / "machine", include_dirs=[KERNELS], compiler=lambda *_: b"machine code")
    writer = BundleWriter(folder, machine)
    writer.add(SPEC, ARCH)
    writer.finish(["a test"])
    return folder


@pytest.fixture
def no_compiler(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler: after bundling it cannot be run, queried or imported."""

    def poisoned(*_: object) -> None:
        raise AssertionError("the compiler was asked")

    for name in ("compiler_id", "flags", "compile_kernel"):
        monkeypatch.setattr(cache, name, poisoned)
    for name in ("cuda.core", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)


def served(folder: Path, tmp_path: Path, include: Path = KERNELS, *, jit: bool = False) -> bytes:
    """The kernel as a program gets it on another machine."""
    with settings.use(kernels=folder, jit=jit):
        return KernelCache(tmp_path / "empty", include_dirs=[include]).get(SPEC, ARCH)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("jit", [False, True], ids=["JIT off", "JIT on"])
def test_a_bundle_needs_no_compiler(bundle: Path, tmp_path: Path, jit: bool) -> None:
    assert served(bundle, tmp_path, jit=jit) == b"machine code"
    assert not (tmp_path / "empty").exists()


@pytest.mark.usefixtures("no_compiler")
def test_the_machines_own_cache_serves_without_a_compiler_too(tmp_path: Path, bundle: Path) -> None:
    with settings.use(jit=False):
        assert KernelCache(tmp_path / "machine", include_dirs=[KERNELS]).get(SPEC, ARCH) == b"machine code"


def test_everybody_can_read_a_bundle(bundle: Path) -> None:
    for path in [bundle, *bundle.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    assert Bundle(bundle).check() == {}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("damage", ["cubin", "cubin and meta", "manifest", "not in the manifest", "no manifest"])
def test_a_bundle_that_was_tampered_with_is_refused(bundle: Path, tmp_path: Path, damage: str) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    manifest = json.loads((bundle / "manifest.json").read_text())
    if damage.startswith("cubin"):
        (entry / "kernel.cubin").write_bytes(b"other code")
        if damage == "cubin and meta":
            meta = json.loads((entry / "meta.json").read_text())
            meta["cubin"] = "c6b3e4b1d7a6f1d1e5ca3d1c7cba1e1f4cf47d0bd8be1e4ed5a6f3a3e0a6ed07"
            (entry / "meta.json").write_text(json.dumps(meta))
    elif damage == "manifest":
        manifest["kernels"][entry.name]["cubin"] = "0" * 64
    elif damage == "not in the manifest":
        manifest["kernels"] = {}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    if damage == "no manifest":
        (bundle / "manifest.json").unlink()
    with pytest.raises(MissingKernelError, match=r"checksum|does not name it|no manifest\.json"):
        served(bundle, tmp_path)
    if damage != "no manifest":
        assert list(Bundle(bundle).check()) == [entry.name]
    else:
        with pytest.raises(BundleError, match=r"no manifest\.json"):
            Bundle(bundle).check()


def test_with_a_compiler_a_refused_kernel_is_compiled_and_a_warning_says_so(bundle: Path, tmp_path: Path) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    (entry / "kernel.cubin").write_bytes(b"other code")
    with settings.use(kernels=bundle), pytest.warns(RuntimeWarning, match="is refused: kernel.cubin is not the file"):
        found = KernelCache(tmp_path / "empty", include_dirs=[KERNELS], compiler=lambda *_: b"new").get(SPEC, ARCH)
    assert found == b"new"


@pytest.mark.usefixtures("no_compiler")
def test_a_kernel_whose_header_changed_is_not_in_the_bundle(bundle: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(KERNELS, changed)
    (changed / "axpy.cuh").write_text((changed / "axpy.cuh").read_text() + "// another version\n")
    with pytest.raises(MissingKernelError, match=r"axpy_128 for sm_70 is not in the cache .* nor in the bundle"):
        served(bundle, tmp_path, changed)


def test_adding_keeps_what_is_there(bundle: Path, tmp_path: Path) -> None:
    machine = KernelCache(tmp_path / "machine", include_dirs=[KERNELS], compiler=lambda *_: b"second")
    writer = BundleWriter(bundle, machine)
    writer.add(axpy_spec(64), ARCH)
    manifest = writer.finish(["more"])
    assert sorted(one["symbol"] for one in manifest["kernels"].values()) == ["axpy_128", "axpy_64"]
    assert manifest["made_for"] == ["a test", "more"]
    assert Bundle(bundle).check() == {}


def test_two_that_write_at_once_both_get_their_part_in(tmp_path: Path) -> None:
    one, other = (BundleWriter(tmp_path / "kernels", KernelCache(tmp_path / "cache")) for _ in range(2))
    one._added["first"] = {"symbol": "a", "arch": ARCH, "cubin": ""}
    other._added["second"] = {"symbol": "b", "arch": ARCH, "cubin": ""}
    one.finish(["one"])
    manifest = other.finish(["other"])
    assert list(manifest["kernels"]) == ["first", "second"]
    assert manifest["made_for"] == ["one", "other"]
    assert Bundle(tmp_path / "kernels").manifest == manifest


def test_an_entry_is_added_by_one_process_at_a_time(bundle: Path, tmp_path: Path) -> None:
    """Two processes must not both put the folder in place."""
    other = KernelCache(tmp_path / "other", include_dirs=[KERNELS], compiler=lambda *_: b"other machine code")
    writer = BundleWriter(bundle, other)
    done = threading.Event()
    adding = threading.Thread(target=lambda: (writer.add(SPEC, ARCH), done.set()))
    with Folder(bundle) as folder, folder.locked():
        adding.start()
        assert not done.wait(0.3)
    adding.join()
    assert done.is_set()


def test_what_was_interrupted_can_be_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    interrupted = BundleWriter(folder, KernelCache(tmp_path / "cache"))
    (folder / "an entry").mkdir()
    del interrupted
    assert BundleWriter(folder, KernelCache(tmp_path / "cache")).finish(()) == Bundle(folder).manifest


def test_nothing_is_written_into_a_folder_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="is not a bundle"):
        BundleWriter(tmp_path, KernelCache(tmp_path / "machine"))


# ---- the command, then a machine without a compiler


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a bundle of its kernels, made by the command."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "small_net.py").write_text(MODEL)
    shape = ",".join(map(str, SHAPE))
    arguments = ["warmup", "small_net:network", "--input-shape", shape, "--arch", ARCH, "-o", "kernels", "--json"]
    ran = command(*arguments, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["folder"] == str(folder / "kernels")
    assert found["archs"][ARCH]["skipped"] == {}
    manifest = json.loads((folder / "kernels" / "manifest.json").read_text())
    assert {one["symbol"] for one in manifest["kernels"].values()} == set(found["archs"][ARCH]["kernels"])
    return folder


def serving(bundle: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "POLYCONV_JIT": "off",
        "POLYCONV_KERNELS": str(bundle),
        "POLYCONV_CACHE_DIR": str(tmp_path / "no cache"),
    }


def test_a_machine_without_a_compiler_trains_from_the_bundle(warmed: Path, tmp_path: Path) -> None:
    launched = run_in_virtual_gpu(_train, environment=serving(warmed / "kernels", tmp_path))
    assert launched >= 9  # three layers, three passes
    assert not (tmp_path / "no cache").exists()


def test_a_missing_kernel_is_an_error_with_the_command_that_makes_it(warmed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(warmed / "kernels", folder)
    gone = sorted(path for path in folder.iterdir() if path.name.startswith(("implicit_gemm", "winograd")))[0]
    symbol = gone.name.partition(f"-{ARCH}-")[0]
    shutil.rmtree(gone)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["kernels"][gone.name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MissingKernelError) as raised:
        run_in_virtual_gpu(_every_kernel, [symbol], environment=serving(folder, tmp_path))
    message = str(raised.value)
    assert f"{symbol} for {ARCH}, wanted for a test, is not in the cache" in message
    (advice,) = re.findall(r"^    (polyconv warmup --kernels .*)$", message, re.MULTILINE)
    ran = command(*shlex.split(advice)[1:])
    assert ran.returncode == 0, ran.stderr
    run_in_virtual_gpu(_every_kernel, [symbol], environment=serving(folder, tmp_path))


def test_the_error_names_the_problem(tmp_path: Path) -> None:
    with pytest.raises(MissingKernelError, match="wanted for fprop 1x4x8x8, 4 channels, kernel 3x3"):
        run_in_virtual_gpu(_convolve, environment={"POLYCONV_JIT": "off", "POLYCONV_CACHE_DIR": str(tmp_path)})


def _poison() -> None:
    for name in ("cuda.core", "cuda.bindings.nvrtc"):
        sys.modules[name] = None  # type: ignore[assignment]


def _train() -> int:
    _poison()
    network: dict[str, torch.nn.Module] = {}
    exec(MODEL, network)
    model = network["network"]()
    x = torch.randn(SHAPE, requires_grad=True)
    y = model(x)
    gradient = torch.randn_like(y)
    exact = torch.autograd.grad(y, [x, *model.parameters()], gradient)
    polyconv.replace(model, policy="own")
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        ours = model(x)
        found = torch.autograd.grad(ours, [x, *model.parameters()], gradient)
        launches = len(gpu.launches)
    for got, want in zip((ours, *found), (y, *exact), strict=True):
        assert (got - want).abs().max() <= 1e-3 * want.square().mean().sqrt()
    return launches


def _every_kernel(symbols: list[str]) -> None:
    _poison()
    specs = [spec for spec in all_kernels() if spec.symbol in symbols]
    KernelCache().get_many(specs, ARCH, wanted_for="a test")


def _convolve() -> None:
    _poison()
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        polyconv.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3))


# ---- wrong usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name one thing to compile"),
        (["W1", "--all-kernels"], "name one thing to compile"),
        (["W1", "--input-shape", "1,2,3,4"], "--input-shape is for a model"),
        (["os:getcwd"], "--input-shape is needed"),
        (["os:getcwd", "--input-shape", "1,2,3,4"], "gives a str, not a torch.nn.Module"),
        (["os:nothing", "--input-shape", "1,2,3,4"], "no model can be had from os:nothing"),
        (["torch.nn:Identity", "--input-shape", "1,2,3,4"], "makes no convolution"),
        (["W1", "--arch", "sm_999"], "no GPU of sm_999 is described"),
        (["--kernels", "nonsense"], "no kernel of this version of polyconv is called nonsense"),
        (["W1", "--input-shape", "1,x"], "is not a shape"),
        (["W1", "--arch", "volta"], "'volta' is not a GPU architecture"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(["warmup", *(arguments if "--arch" in arguments else [*arguments, "--arch", ARCH])]))
    assert words in capsys.readouterr().err


def test_nothing_is_compiled_that_could_not_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with settings.use(cache_dir=tmp_path / "file"):
        assert cli.main(["warmup", "W1", "--arch", "sm_70", "--pass", "fprop"]) == 2
    assert "cannot write into" in capsys.readouterr().err
