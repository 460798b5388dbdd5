"""Files of ``polyconv export --simple``: their text, their module, and what is refused. No kernel runs here."""

from __future__ import annotations

import ast
import copy
import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelbench_rules
import nvrtc_11_8
from exported_files import PROBLEMS, check_format, load, original_of, weights, with_activation
from nightly import sampled
from polyconv import cli
from polyconv.numerics import reference
from polyconv.problem import Problem
from polyconv.tools.export import ExportError, convolution_model, named_model, simple_file
from polyconv.tools.export.simple_model import CONSTANTS, GEMM, geometry_of

MOST_LINES, CONSTRUCTOR = 350, {"kb85": 21}
"""Limit of a file, and lines beyond it for a constructor of 14 parameters, of which each has a line."""


class Kernels:
    """Replaces torch's ``load_inline``: records the builds, whose functions compute on the CPU."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.calls: list[str] = []
        self.problem: Problem | None = None

    def __call__(self, name: str, cpp: str, cuda: str, functions: list[str]) -> SimpleNamespace:
        self.sources.append(cuda)
        assert name.isidentifier()
        assert [line.split("(")[0].split()[1] for line in cpp.splitlines()] == functions
        return SimpleNamespace(**{function: getattr(self, function) for function in functions})

    def forward(self, x: Tensor, w: Tensor, bias: Tensor, height: int, width: int) -> Tensor:
        self.calls.append("forward")
        y = reference.fprop(self._of(x, w), x, w, bias if bias.numel() else None).float()
        assert y.shape[2:] == (height, width)
        return y

    def input_gradient(self, dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
        self.calls.append("input_gradient")
        return reference.dgrad(self._of(x, w), dy, w, x.shape).float()

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        self.calls.append("weight_gradient")
        assert self.problem is not None
        self.strides = dy.stride()
        return reference.wgrad(self.problem, x, dy, self.problem.w_shape)[0].float()

    def _of(self, x: Tensor, w: Tensor) -> Problem:
        assert self.problem is not None
        assert w.is_contiguous()
        return self.problem


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", kernels)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Volta")
    return kernels


def text_of(name: str) -> str:
    return simple_file(named_model(name))


# ---- the text


@pytest.mark.parametrize("name", PROBLEMS)
def test_is_short_enough_to_be_read(name: str) -> None:
    lines = text_of(name).splitlines()
    assert len(lines) <= MOST_LINES + CONSTRUCTOR.get(name, 0)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", sampled(PROBLEMS, 2, "simple format"))
def test_is_formatted(name: str, tmp_path: Path) -> None:
    check_format(text_of(name), tmp_path / "model.py")


def test_imports_only_torch() -> None:
    tree = ast.parse(text_of("kb80"), feature_version=(3, 8))
    roots = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    roots |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernelbench_accepts_it_without_a_warning(name: str) -> None:
    text = text_of(name)
    assert not kernelbench_rules.found(text, kernelbench_rules.REFUSED)
    assert not kernelbench_rules.found(text, kernelbench_rules.WARNED)
    assert not kernelbench_rules.missing(text)


@pytest.mark.parametrize("loader", kernelbench_rules.LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize("name", PROBLEMS)
def test_kernelbench_loads_it(name: str, loader: kernelbench_rules.Loader, kernels: Kernels) -> None:
    """Loading builds what the file was exported for, and draws no random number."""
    torch.manual_seed(42)
    before = torch.get_rng_state()
    context = loader(text_of(name), {variable: object() for variable in kernelbench_rules.VARIABLES})
    assert torch.equal(torch.get_rng_state(), before)
    assert len(kernels.sources) == len(named_model(name).layers)
    torch.manual_seed(42)
    state = context["ModelNew"](*context["get_init_inputs"]()).state_dict()
    torch.manual_seed(42)
    originals = [original_of(weight).weight for weight in weights(state)]
    assert torch.equal(weights(state)[0], originals[0])


@pytest.mark.slow
def test_the_oldest_compiler_has_no_warning() -> None:
    jobs = ("Forward", "InputGradient", "WeightGradient")
    source = CONSTANTS.format(*geometry_of(named_model("kb80").layers[0].problem)) + GEMM.read_text(encoding="utf-8")
    source += "".join(f"template __global__ void gemm({job});\n" for job in jobs)
    assert nvrtc_11_8.warnings_of(source).strip("\n\0") == ""


# ---- the module


@pytest.fixture
def module(kernels: Kernels, tmp_path: Path) -> Iterator[Any]:
    yield load(text_of("kb80"), tmp_path / "simple_model.py")
    del sys.modules["simple_model"]


def test_autograd_agrees(module: Any, kernels: Kernels) -> None:
    arguments: Any = {"stride": (2, 1), "padding": (1, -1, 2, 3), "dilation": (1, 2), "groups": 2}
    conv = module.Conv2d(4, 6, (3, 2), bias=True, **arguments)
    kernels.problem = Problem.make("fprop", (2, 4, 9, 8), conv.weight.shape, bias=True, **arguments)
    assert conv.geometry == geometry_of(kernels.problem)
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    y = module.Convolution.apply(x, conv.weight, conv.bias, conv.geometry, *kernels.problem.y_shape[2:])
    y.sum().backward()
    assert kernels.calls == ["forward", "input_gradient", "weight_gradient"]
    assert kernels.strides == (0, 0, 0, 0), "the gradient of a sum is read where it is"
    exact_x, exact_w = x.detach().double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    reference.fprop(kernels.problem, exact_x, exact_w).sum().backward()
    torch.testing.assert_close(x.grad, exact_x.grad.float())
    torch.testing.assert_close(conv.weight.grad, exact_w.grad.float())
    torch.testing.assert_close(conv.bias.grad, torch.full((6,), y[:, 0].numel() * 1.0))


def test_only_wanted_gradients_are_computed(module: Any, kernels: Kernels) -> None:
    conv = module.Conv2d(4, 6, 3, bias=False).requires_grad_(False)
    kernels.problem = Problem.make("fprop", (1, 4, 5, 5), conv.weight.shape)
    x = torch.randn(1, 4, 5, 5, requires_grad=True)
    module.Convolution.apply(x, conv.weight, None, conv.geometry, 3, 3).sum().backward()
    assert kernels.calls == ["forward", "input_gradient"]


def test_gradients_of_gradients_are_refused(module: Any, kernels: Kernels) -> None:
    conv = module.Conv2d(4, 6, 3, bias=False)
    kernels.problem = Problem.make("fprop", (1, 4, 5, 5), conv.weight.shape)
    x = torch.randn(1, 4, 5, 5, requires_grad=True)
    y = module.Convolution.apply(x, conv.weight, None, conv.geometry, 3, 3)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("padding", "kernel", "sides"),
    [
        ("same", 4, (1, 2, 1, 2)),
        ("valid", 3, (0, 0, 0, 0)),
        (2, 3, (2, 2, 2, 2)),
        ((1, 2), 3, (1, 1, 2, 2)),
        ((-1, 2, 3, 0), 3, (-1, 2, 3, 0)),
    ],
)
def test_padding_in_every_form(padding: Any, kernel: int, sides: tuple[int, ...], module: Any) -> None:
    conv = module.Conv2d(3, 4, kernel, padding=padding)
    assert tuple(conv.sides) == sides
    assert conv.geometry[-2:] == (sides[0], sides[2])


def test_other_arguments_are_built_when_they_are_used(module: Any, kernels: Kernels) -> None:
    assert len(kernels.sources) == 1
    conv = module.ModelNew(4, 6, 3, groups=2, bias=True).conv2d
    kernels.problem = Problem.make("fprop", (1, 4, 5, 5), conv.weight.shape, groups=2, bias=True)
    module.Convolution.apply(torch.randn(1, 4, 5, 5), conv.weight, conv.bias, conv.geometry, 3, 3)
    assert "kInChannels = 4, kOutChannels = 6, kGroups = 2, kKernelH = 3" in kernels.sources[1]


def test_can_be_copied_and_pickled(module: Any) -> None:
    model = module.ModelNew()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.conv2d.weight, model.conv2d.weight)
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    module.ModelNew().load_state_dict(torch.load(kept, weights_only=True))


def test_tensors_that_it_cannot_compute_are_refused(module: Any) -> None:
    model = module.ModelNew()
    with pytest.raises(RuntimeError, match=r"float32 tensors on one CUDA device, not torch.float32 on cpu.*\.cuda\(\)"):
        model(torch.zeros(1, 32, 64, 64))
    with pytest.raises(RuntimeError, match=r"not torch\.float16 on cpu.*\.float\(\)"):
        model(torch.zeros(32, 64, 64, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"shape \[1, 31, 64, 64\] does not have 32 channels"):
        model(torch.zeros(1, 31, 64, 64))
    with pytest.raises(ValueError, match="padding_mode='reflect': this file pads with zeros only"):
        module.Conv2d(3, 4, 3, padding_mode="reflect")


# ---- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kb57 --simple", "conv_transpose2d is a ConvTranspose2d: a file of --simple has Conv2d alone"),
        ("kb67 --simple", "conv1d is a Conv1d: a file"),
        ("kb54 --simple", "conv3d is a Conv3d: a file"),
        ("kb80 --simple --tensor-cores", "leave out --tensor-cores"),
        ("kb80 --simple --forward-only", "leave out --forward-only"),
        (
            "--simple --in-channels 3 --out-channels 4 --kernel-size 3 --padding-mode reflect --input 1 3 8 8",
            "conv2d is padded by padding_mode='reflect'",
        ),
        ("kb80 --simple --class-name Conv2d", "the file itself uses the name 'Conv2d'"),
    ],
)
def test_refuses_in_words(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", *words.split(), "-o", os.devnull]) == 2
    assert message in capsys.readouterr().err


def test_refuses_an_activation() -> None:
    with pytest.raises(ExportError, match="conv2d is followed by an activation"):
        simple_file(with_activation(named_model("kb80"), "relu"))


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    words = "--in-channels 3 --out-channels 4 --kernel-size 3 --input 1 3 8 8"
    assert cli.main(["export", *words.split(), "--simple", "--class-name", "Net", "-o", str(path)]) == 0
    model = convolution_model((1, 3, 8, 8), in_channels=3, out_channels=4, kernel_size=3)
    assert path.read_text() == simple_file(model, class_name="Net")
    assert f"polyconv export {words} --simple" in " ".join(path.read_text().split())
    again = tmp_path / "again.py"
    assert cli.main(["export", "kb80", "--simple", "--arch", "sm_70,sm_80", "-o", str(again)]) == 0
    assert 'os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.0;8.0")' in again.read_text()
