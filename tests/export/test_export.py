"""Exported files: what they import, what they promise to callers, and that their kernels compute what torch computes.

The CUDA source of each file is compiled by CUDA 11.8's compiler for a V100 and executed by the emulator, with the very
parameters that the file's own Python builds. `.ci/check_exported_model` builds one with nvcc and loads it.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nvrtc_11_8
import volta
from polyconv import cli
from polyconv.export import ExportError, Model, conv2d_model, exported_file, named_model
from polyconv.plan import DEVICES

ROOT = Path(__file__).resolve().parents[2]
KERNELBENCH = ("kb50", "kb55", "kb56", "kb62", "kb63", "kb80", "kb82", "kb83", "kb84", "kb85", "kb86", "kb87")
V100 = DEVICES["v100"]


def load(text: str, path: Path) -> ModuleType:
    """An exported file as a module. Nothing is built until a test says how."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_compiler(tmp_path: Path) -> Iterator[Any]:
    """Loads exported files whose extension is never built: constructors, checks, state."""

    def make(model: Model) -> ModuleType:
        module: Any = load(exported_file(model, V100), tmp_path / "exported_model.py")
        module.extension = lambda: None
        return module  # type: ignore[no-any-return]

    yield make
    sys.modules.pop("exported_model", None)


class Emulated:
    """An exported file on the emulator: CPU tensors are the device's memory."""

    def __init__(self, model: Model, directory: Path) -> None:
        text = exported_file(model, V100)
        self.module: Any = load(text, directory / "exported_model.py")
        self.cubin = nvrtc_11_8.compile_cubin(self.module.CUDA_SOURCE)
        self.launched: list[str] = []
        self.memory: dict[int, Tensor] = {}
        self.module.extension = lambda: None
        self.module._launch = self._launch
        self.module._check_device = lambda tensor: None
        self.module._multiprocessors = lambda device: 2
        self._run, self.module._run = self.module._run, self._remember
        self._empty, self.module._empty = self.module._empty, self._poisoned

    def _poisoned(self, *args: Any) -> Tensor:
        return self._empty(*args).fill_(float("nan"))  # type: ignore[no-any-return]

    def _remember(self, problem: Any, device: torch.device, **tensors: Tensor) -> None:
        self.tensors = list(tensors.values())
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            workspace = real(*args, **kwargs).fill_(0xFF)  # NaN in every word
            self.tensors.append(workspace)
            return workspace

        torch.empty = empty  # type: ignore[assignment]
        try:
            self._run(problem, device, **tensors)
        finally:
            torch.empty = real  # type: ignore[assignment]

    def _launch(self, symbol: str, device: int, grid: Any, block: Any, shared_bytes: int, params: bytes) -> None:
        self.launched.append(symbol)
        buffers = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in self.tensors if t.numel()]
        volta.run_raw(self.cubin, symbol, grid, block, params, buffers, shared_bytes, max_dynamic_shared=shared_bytes)


def double(module: torch.nn.Module) -> torch.nn.Module:
    """The module that KernelBench would have, in float64."""
    reference = torch.nn.Sequential()
    for layer in module.children():
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        arguments: Any = {name: getattr(layer, name) for name in names}
        conv = torch.nn.Conv2d(bias=layer.bias is not None, dtype=torch.float64, **arguments)
        conv.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
        reference.append(conv)
    return reference


def check(model: torch.nn.Module, x: Tensor, grad: Tensor | None = None) -> None:
    """Output and all gradients against float64 PyTorch, element by element. `grad` None: that of ``y.sum()``."""
    reference = double(model)
    x_double = x.detach().double().requires_grad_()
    before = x.detach().clone()
    x.requires_grad_()
    y, expected = model(x), reference(x_double)
    close(y, expected, "output")
    if grad is None:
        y.sum().backward()
        expected.sum().backward()
    else:
        y.backward(grad)
        expected.backward(grad.double())
    close(x.grad, x_double.grad, "gradient of the input")
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(ours.grad, theirs.grad, f"gradient of {name}")
    assert torch.equal(x.detach(), before)


def close(ours: Tensor | None, reference: Tensor | None, what: str) -> None:
    assert ours is not None
    assert reference is not None
    assert ours.shape == reference.shape
    wrong = ~((ours.double() - reference).abs() <= 1e-4 + 1e-4 * reference.abs())
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ"


# ---- the file itself


@pytest.mark.parametrize("name", KERNELBENCH)
def test_imports_nothing_but_torch_and_the_standard_library(name: str) -> None:
    tree = ast.parse(exported_file(named_model(name), V100), feature_version=(3, 8))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add((node.module or "").partition(".")[0])
    assert roots <= {*sys.stdlib_module_names, "torch"}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not called & {"conv2d_forward", "_conv_forward", "convolution", "conv_transpose2d", "cudnn", "functional"}


def test_carries_only_what_it_needs() -> None:
    dense = exported_file(named_model("kb80"), V100)
    assert "polyconv::depthwise" not in dense
    assert "Depthwise" not in dense
    assert "gather_folded_" not in dense
    depthwise = exported_file(named_model("kb82"), V100)
    assert "struct GatherParams" not in depthwise
    assert "class GatherParams" not in depthwise


def test_the_example_is_current() -> None:
    written = (ROOT / "examples" / "model.py").read_text()
    current = exported_file(named_model("kb80"), V100)
    assert written == current, "write it again: polyconv export kb80 -o examples/model.py"


@pytest.mark.parametrize("name", ["kb50", "kb80", "kb85", "kb86"])
def test_is_formatted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(exported_file(named_model(name), V100))
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(path)]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


# ---- the module in it


def original(name: str) -> torch.nn.Module:
    """The convolutions of KernelBench's problems under their names, from the workload's own description."""
    spec = cli_workload(name)
    names = {"kb50": "conv1", "kb86": "depthwise", "kb87": "conv1d"}
    keys = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
    model = torch.nn.Module()
    conv = torch.nn.Conv2d(spec["input"][1], **{key: _tuple(spec[key]) for key in keys})
    model.add_module(names.get(name, "conv2d"), conv)
    if name == "kb86":
        model.add_module("pointwise", torch.nn.Conv2d(64, 128, 1, bias=False))
    return model


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def cli_workload(name: str) -> dict[str, Any]:
    from polyconv.measure.workloads import entries

    return entries()[name]


@pytest.mark.parametrize("name", KERNELBENCH)
def test_parameters_are_those_of_the_original(name: str, without_compiler: Any) -> None:
    module = without_compiler(named_model(name))
    torch.manual_seed(5)
    theirs = original(name).state_dict()
    for arguments in ([], module.get_init_inputs()):
        torch.manual_seed(5)
        ours = module.ModelNew(*arguments)
        assert list(ours.state_dict()) == list(theirs)
        assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.items())
        ours.load_state_dict(theirs)
    (x,) = (tuple(x.shape) for x in _meta_inputs(module))
    assert list(x) == cli_workload(name)["input"]


def _meta_inputs(module: ModuleType) -> list[Tensor]:
    with torch.device("meta"):
        return module.get_inputs()  # type: ignore[no-any-return]


def test_the_extension_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads construct a model at once. How it is really built: .ci/check_exported_model."""
    built = []

    def load_inline(**arguments: Any) -> object:
        time.sleep(0.1)
        built.append(arguments)
        return object()

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    module: Any = load(exported_file(named_model("kb80"), V100), tmp_path / "exported_model.py")
    assert not built, "importing the file must not compile"
    threads = [threading.Thread(target=module.ModelNew) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (arguments,) = built
    assert arguments["cuda_sources"] == [module.CUDA_SOURCE]
    assert arguments["functions"] == ["launch"]
    assert not any(flag.startswith("-std") for flag in arguments["extra_cuda_cflags"]), "torch knows which it needs"


def test_arguments_stand_for_another_convolution(without_compiler: Any) -> None:
    module = without_compiler(named_model("kb80"))
    conv = module.ModelNew(16, 128, 3).conv2d
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (16, 128, (3, 3))
    assert (conv.padding, conv.dilation, conv.groups, conv.bias) == ((0, 0), (1, 1), 1, None)
    assert module.ModelNew(16, 32, 3, groups=4, bias=True).conv2d.weight.shape == (32, 4, 3, 3)


def test_tensors_it_cannot_compute_are_refused(without_compiler: Any) -> None:
    module = without_compiler(named_model("kb80"))
    model = module.ModelNew()
    with pytest.raises(RuntimeError, match=r"CUDA kernels only.*'cpu'.*\.cuda\(\)"):
        model(torch.zeros(1, 32, 64, 64))
    module._check_device = lambda tensor: None
    with pytest.raises(RuntimeError, match="expected an input with 32 channels"):
        model(torch.zeros(1, 31, 64, 64))
    with pytest.raises(RuntimeError, match=r"float32.*input is torch\.float16"):
        model(torch.zeros(1, 32, 64, 64, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"float32.*weight is torch\.float64"):
        copy.deepcopy(model).double()(torch.zeros(1, 32, 64, 64))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        model(torch.zeros(1, 32, 4, 64))
    with pytest.raises(RuntimeError, match="4 dimensions"):
        model(torch.zeros(32, 64))


def test_a_depthwise_file_says_when_arguments_are_beyond_it(tmp_path: Path) -> None:
    emulated = Emulated(named_model("kb82"), tmp_path)
    with pytest.raises(RuntimeError, match=r"exported for 16x64x512x512.*export it again"):
        emulated.module.ModelNew(8, 63)(torch.zeros(1, 8, 64, 64))


def test_nothing_to_compute(tmp_path: Path) -> None:
    emulated = Emulated(named_model("kb80"), tmp_path)
    model = emulated.module.ModelNew()
    x = torch.zeros(0, 32, 64, 64, requires_grad=True)
    y = model(x)
    assert y.shape == (0, 64, 60, 48)
    y.sum().backward()
    assert x.grad is not None
    assert not model.conv2d.weight.grad.any()
    assert not emulated.launched


# ---- the kernels in it

SIZES = {
    "kb50": (2, 31, 34),
    "kb55": (1, 6, 14),
    "kb56": (1, 8, 12),
    "kb62": (2, 9, 16),
    "kb63": (2, 8, 11),
    "kb80": (2, 12, 28),
    "kb82": (2, 10, 21),
    "kb83": (3, 20, 17),
    "kb84": (2, 9, 12),
    "kb85": (2, 8, 15),
    "kb86": (1, 7, 12),
    "kb87": (1, 6, 10),
}
"""Batch, height and width to emulate each problem at; its channels stay."""
SLOW = {"kb50", "kb55", "kb56", "kb63", "kb86"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in KERNELBENCH])
def test_computes_what_torch_computes(name: str, tmp_path: Path) -> None:
    emulated = Emulated(named_model(name), tmp_path)
    model = emulated.module.ModelNew()
    n, height, width = SIZES[name]
    channels = cli_workload(name)["input"][1]
    x = torch.rand(n, channels, height, width)
    y_shape = model(x).shape
    check(model, x, torch.randn(y_shape))


def test_any_strides_without_a_copy(tmp_path: Path) -> None:
    emulated = Emulated(named_model("kb80"), tmp_path)
    model = emulated.module.ModelNew(8, 8, (2, 3), 1, (1, 0), (1, 2))
    base = torch.randn(2, 8, 9, 24)
    check(model, base.to(memory_format=torch.channels_last))
    assert model(base.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    model.zero_grad()
    check(model, base[:, :, 1::2, 3:-4])
    model.zero_grad()
    check(model, base[:1, :1].expand(2, 8, 9, 24))
    model.zero_grad()
    check(model, torch.randn(2, 1, 1, 24).expand(2, 8, 5, 24), torch.randn(2, 8, 1, 1).expand(2, 8, 6, 20))


def test_every_kernel_of_the_file_runs(tmp_path: Path) -> None:
    emulated = Emulated(named_model("kb80"), tmp_path)
    check(emulated.module.ModelNew(), torch.rand(1, 32, 10, 28), torch.randn(1, 64, 6, 12))
    other = emulated.module.ModelNew(32, 64, (2, 3))  # not what the fast ways are for
    check(other, torch.rand(1, 32, 9, 14), torch.randn(1, 64, 8, 12))
    check(emulated.module.ModelNew(5, 7, (2, 3), 2, bias=True), torch.randn(2, 5, 8, 9))
    carried = re.findall(r'^    {"(\w+)", ', emulated.module.CUDA_SOURCE, re.MULTILINE)
    assert set(emulated.launched) == set(carried)


ARGUMENTS = {
    "bias, groups, strides, uneven sides": (
        (2, 6, 13, 14),
        {"out_channels": 9, "kernel_size": (5, 3), "stride": (3, 2), "padding": (2, 1, 0, 3), "groups": 3},
    ),
    "reflect": (
        (2, 4, 9, 10),
        {"out_channels": 5, "kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect", "stride": 2},
    ),
    "circular, depthwise": (
        (2, 6, 9, 10),
        {"out_channels": 12, "kernel_size": 3, "padding": "same", "padding_mode": "circular", "groups": 6},
    ),
    "replicate, no bias": (
        (1, 8, 7, 9),
        {"out_channels": 16, "kernel_size": (2, 3), "padding": 2, "padding_mode": "replicate", "bias": False},
    ),
    "cropped": ((2, 8, 12, 11), {"out_channels": 8, "kernel_size": 3, "padding": (-1, 0, 2, -2)}),
}


def padded(x: Tensor, sides: Any, mode: str) -> Tensor:
    top, bottom, left, right = sides
    mode = "constant" if mode == "zeros" else mode
    return torch.nn.functional.pad(x, (left, right, top, bottom), mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", ARGUMENTS)
def test_any_convolution(case: str, tmp_path: Path) -> None:
    shape, arguments = ARGUMENTS[case]
    emulated = Emulated(conv2d_model(shape, in_channels=shape[1], **arguments), tmp_path)
    conv = emulated.module.ModelNew().conv2d
    x = torch.randn(shape, requires_grad=True)
    y = conv(x)
    x_double, w_double = x.detach().double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    b_double = None if conv.bias is None else conv.bias.detach().double().requires_grad_()
    expected = torch.nn.functional.conv2d(
        padded(x_double, conv._sides(), conv.padding_mode),
        w_double,
        b_double,
        conv.stride,
        dilation=conv.dilation,
        groups=conv.groups,
    )
    close(y, expected, "output")
    grad = torch.randn(y.shape)
    y.backward(grad)
    expected.backward(grad.double())
    close(x.grad, x_double.grad, "gradient of the input")
    close(conv.weight.grad, w_double.grad, "gradient of the weight")
    if b_double is not None:
        close(conv.bias.grad, b_double.grad, "gradient of the bias")


@pytest.mark.slow
def test_gradients_of_gradients(tmp_path: Path) -> None:
    emulated = Emulated(named_model("kb80"), tmp_path)
    model = emulated.module.ModelNew(3, 4, 2, 1, 1, 1, bias=True)
    x = torch.randn(1, 3, 4, 4, requires_grad=True)
    ours = [x, model.conv2d.weight, model.conv2d.bias]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    gradients = []
    for tensors, conv in ((ours, model), (theirs, None)):
        y = model(x) if conv else torch.nn.functional.conv2d(*tensors, padding=1)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        gradients.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))  # type: ignore[arg-type]
    for a, b in zip(*gradients, strict=True):
        close(a / b.abs().max(), b / b.abs().max(), "second derivative")


# ---- the command


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    assert cli.main(["export", "kb80", "-o", str(path)]) == 0
    assert path.read_text() == exported_file(named_model("kb80"), V100)
    assert "wrote" in capsys.readouterr().err


def test_the_command_takes_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    words = "--in-channels 32 --out-channels 64 --kernel-size 5 9 --stride 1 --padding 2 4 --dilation 2 3 --groups 1"
    words += " --bias --padding-mode zeros --input 8 32 512 512"
    assert cli.main(["export", *words.split(), "-o", str(path)]) == 0
    expected = conv2d_model(
        (8, 32, 512, 512), in_channels=32, out_channels=64, kernel_size=(5, 9), padding=(2, 4), dilation=(2, 3)
    )
    assert path.read_text() == exported_file(expected, V100)
    again = tmp_path / "again.py"
    assert cli.main(["export", *expected.command.split(), "-o", str(again)]) == 0
    assert again.read_text() == path.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kb57", "no Conv2d workload 'kb57'"),
        ("kb80 --groups 2", "leave out --groups"),
        ("--in-channels 3", "missing are --out-channels, --kernel-size, --input"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --input 1 2 8 8", "an input of 2 channels"),
        ("--in-channels 3 --out-channels 4 --kernel-size 9 --input 1 3 8 8", "nothing to compute"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --groups 2 --input 1 3 8 8", "cannot be split"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --padding some --input 1 3 8 8", "got 'some'"),
    ],
)
def test_the_command_explains_what_is_wrong(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", *words.split(), "-o", os.devnull]) == 2
    assert message in capsys.readouterr().err


def test_negative_padding_needs_zeros() -> None:
    with pytest.raises(ExportError, match="zeros"):
        conv2d_model(
            (1, 3, 8, 8), in_channels=3, out_channels=3, kernel_size=3, padding=(-1, 0, 0, 0), padding_mode="reflect"
        )
