"""The module in an exported file: constructor, parameters, refusals, autograd.

No kernel runs here: the libraries do nothing. ``python tools/export_check`` builds and executes the files.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from exported_files import EVERY, Builds
from polyconv.cuda.planner import DEVICES
from polyconv.measure.workloads import entries
from polyconv.tools.export import ExportError, convolution_model, exported_file, named_model


def original(name: str) -> torch.nn.Module:
    """The convolutions of KernelBench's problems by name, from the workloads' descriptions."""
    spec = entries()[name]
    names = {"kb50": "conv1", "kb86": "depthwise", "kb87": "conv1d"}
    usual = {
        "Conv1d": "conv1d",
        "Conv3d": "conv3d",
        "ConvTranspose1d": "conv1d_transpose",
        "ConvTranspose2d": "conv_transpose2d",
        "ConvTranspose3d": "conv_transpose3d",
    }
    keys = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "output_padding")
    arguments: Any = {k: tuple(spec[k]) if isinstance(spec[k], list) else spec[k] for k in keys if k in spec}
    model = torch.nn.Module()
    made = getattr(torch.nn, spec["module"])(spec["input"][1], **arguments)
    model.add_module(names.get(name, usual.get(spec["module"], "conv2d")), made)
    if name == "kb86":
        model.add_module("pointwise", torch.nn.Conv2d(64, 128, 1, bias=False))
    return model


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_those_of_the_original(name: str, imported: Any) -> None:
    module = imported(name)
    torch.manual_seed(5)
    theirs = original(name).state_dict()
    for arguments in ([], module.get_init_inputs()):
        torch.manual_seed(5)
        ours = module.ModelNew(*arguments)
        assert list(ours.state_dict()) == list(theirs)
        assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.items())
        ours.load_state_dict(theirs)
    with torch.device("meta"):
        (x,) = module.get_inputs()
    assert list(x.shape) == entries()[name]["input"]


def test_other_arguments_stand_for_another_convolution(imported: Any, builds: Builds) -> None:
    """Compiled for them, from the direct kernels only."""
    module = imported("kb80")
    (planned,) = builds.sources
    conv = module.ModelNew(16, 128, 3).conv2d
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (16, 128, (3, 3))
    assert (conv.padding, conv.dilation, conv.groups, conv.bias) == ((0, 0), (1, 1), 1, None)
    assert module.ModelNew(16, 32, 3, groups=4, bias=True).conv2d.weight.shape == (32, 4, 3, 3)
    _, direct, grouped = builds.sources
    assert "winograd_nonfused_gemm" in planned
    assert "winograd_nonfused_gemm" not in direct
    assert "direct_forward(*call)" in direct
    assert "kInChannels = 16, kOutChannels = 32, kGroups = 4" in grouped


def test_the_module_can_be_copied_and_pickled(imported: Any, builds: Builds) -> None:
    module = imported("kb80")
    model = module.ModelNew()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.conv2d.weight, model.conv2d.weight)
        assert other.conv2d.geometry == model.conv2d.geometry
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    module.ModelNew().load_state_dict(torch.load(kept, weights_only=True))
    assert len(builds) == 1


def test_tensors_that_it_cannot_compute_are_refused(imported: Any) -> None:
    model = imported("kb80").ModelNew()
    with pytest.raises(RuntimeError, match=r"float32 tensors on one CUDA device, not torch.float32 on cpu.*\.cuda\(\)"):
        model(torch.zeros(1, 32, 64, 64))
    with pytest.raises(RuntimeError, match=r"not torch\.float16 on cpu.*\.float\(\)"):
        model(torch.zeros(1, 32, 64, 64, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"shape \[1, 31, 64, 64\] does not have 32 channels"):
        model(torch.zeros(1, 31, 64, 64))
    with pytest.raises(RuntimeError, match=r"shape \[32, 64\] does not have 32 channels"):
        model(torch.zeros(32, 64))
    with pytest.raises(RuntimeError, match=r"kernel \(5, 9\) does not fit into an input of shape \[1, 32, 4, 64\]"):
        model(torch.zeros(1, 32, 4, 64))


class Calls(list[tuple[str, tuple[int, ...]]]):
    """Replaces the calls of compiled functions: fills their outputs, and records the calls."""

    def __call__(self, function: Any, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
        written = {"forward": y, "input_gradient": x, "weight_gradient": w}[function.__name__]
        self.append((function.__name__, tuple(written.shape)))
        self.strides = y.stride()
        assert written.is_contiguous()
        assert w.is_contiguous()
        written.fill_(len(self))
        if bias is not None and function.__name__ == "weight_gradient":
            bias.fill_(7)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_autograd_asks_for_what_is_wanted(imported: Any, calls: Calls) -> None:
    module = imported("kb80")
    module._call = calls
    model = module.ModelNew(4, 6, 3, 1, (1, 1), bias=True)
    x = torch.zeros(2, 4, 8, 9, requires_grad=True)
    model(x).sum().backward()
    assert [name for name, _ in calls] == ["forward", "input_gradient", "weight_gradient"]
    assert calls.strides == (0, 0, 0, 0), "the gradient of a sum is read where it is"
    assert x.grad is not None
    assert x.grad.unique().tolist() == [2]
    assert model.conv2d.weight.grad.unique().tolist() == [3]
    assert model.conv2d.bias.grad.unique().tolist() == [7]
    calls.clear()
    model.requires_grad_(False)
    model(x).sum().backward()
    assert [name for name, _ in calls] == ["forward", "input_gradient"]
    calls.clear()
    model.conv2d.weight.requires_grad_()
    model(x.detach()).sum().backward()
    assert [name for name, _ in calls] == ["forward", "weight_gradient"]


def test_the_bias_alone_is_wanted(imported: Any, calls: Calls) -> None:
    module = imported("kb80")
    module._call = calls
    model = module.ModelNew(4, 6, 3, bias=True)
    model.conv2d.weight.requires_grad_(False)
    y = model(torch.zeros(2, 4, 8, 9))
    gradient = torch.randn(y.shape)
    y.backward(gradient)
    assert [name for name, _ in calls] == ["forward"]
    torch.testing.assert_close(model.conv2d.bias.grad, gradient.sum((0, 2, 3)))


def test_weights_of_any_layout(imported: Any, calls: Calls) -> None:
    """The kernels read parameters in torch's layout; ``.to(memory_format=...)`` is undone."""
    module = imported("kb80")
    module._call = calls
    model = module.ModelNew().to(memory_format=torch.channels_last)
    assert not model.conv2d.weight.is_contiguous()
    model(torch.zeros(1, 32, 24, 40)).sum().backward()
    assert [name for name, _ in calls] == ["forward", "weight_gradient"]


def test_an_image_without_a_batch(imported: Any, calls: Calls) -> None:
    module = imported("kb80")
    module._call = calls
    assert module.ModelNew()(torch.zeros(32, 24, 40)).shape == (64, 20, 24)


def test_nothing_to_compute(imported: Any, calls: Calls) -> None:
    module = imported("kb80")
    module._call = calls
    model = module.ModelNew()
    x = torch.zeros(0, 32, 64, 64, requires_grad=True)
    y = model(x)
    assert y.shape == (0, 64, 60, 48)
    y.sum().backward()
    assert x.grad is not None
    assert not model.conv2d.weight.grad.any()
    assert not calls


def test_gradients_of_gradients_are_refused(imported: Any, calls: Calls) -> None:
    """If the first gradient had no graph, a penalty on it would be lost silently."""
    module = imported("kb80")
    module._call = calls
    x = torch.zeros(1, 32, 24, 40, requires_grad=True)
    with pytest.raises(RuntimeError, match="leave out create_graph"):
        torch.autograd.grad(module.ModelNew()(x).sum(), x, create_graph=True)


def test_forward_only_has_no_gradient(imported: Any, calls: Calls) -> None:
    module = imported("kb82", forward_only=True)
    module._call = calls
    x = torch.zeros(1, 64, 8, 8, requires_grad=True)
    y = module.ModelNew()(x)
    assert calls == [("forward", (1, 64, 6, 6))]
    with pytest.raises(RuntimeError, match="forward direction alone: export it without --forward-only"):
        y.sum().backward()


def test_a_launch_that_fails_is_an_error(imported: Any) -> None:
    """The user sees the compiled function's error text."""
    module = imported("kb82")
    kernels = module._kernels(module.CONV2D, module.CONV2D[2])
    assert kernels.forward(None) is None
    assert kernels.weight_gradient(None) == b"weight_gradient could not be launched: no reason"


def test_another_name_of_the_class(imported: Any) -> None:
    module = imported("kb82", class_name="Depthwise")
    assert module.Depthwise().conv2d.groups == 64
    assert not hasattr(module, "ModelNew")
    with pytest.raises(ExportError, match="'two words' is no name"):
        exported_file(named_model("kb82"), DEVICES["v100"], class_name="two words")


PADDING = {
    "same": ("same", 3, (1, 1, 1, 1)),
    "valid": ("valid", 3, (0, 0, 0, 0)),
    "same, of an even kernel": ("same", 4, (1, 2, 1, 2)),
    "one number": (2, 3, (2, 2, 2, 2)),
    "two": ((1, 2), 3, (1, 1, 2, 2)),
    "four sides": ((-1, 2, 3, 0), 3, (-1, 2, 3, 0)),
}


@pytest.mark.parametrize("case", PADDING)
def test_padding(case: str, imported: Any, calls: Calls, builds: Builds) -> None:
    padding, kernel, sides = PADDING[case]
    arguments: Any = {"in_channels": 3, "out_channels": 4, "kernel_size": kernel, "padding": padding}
    module = imported(convolution_model((1, 3, 12, 12), **arguments))
    module._call = calls
    conv = module.ModelNew().conv2d
    assert conv.geometry[9:13] == sides
    assert len(builds) == 1, "what it was exported for is what it is built for"
    top, bottom, left, right = sides
    assert conv(torch.zeros(1, 3, 12, 12)).shape[2:] == (13 + top + bottom - kernel, 13 + left + right - kernel)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_borders_are_those_of_the_argument(mode: str, imported: Any, builds: Builds) -> None:
    number = ["zeros", "reflect", "replicate", "circular"].index(mode)
    module = imported(convolution_model((1, 3, 9, 9), in_channels=3, out_channels=4, kernel_size=3, padding_mode=mode))
    module.ModelNew()
    (source,) = builds.sources
    assert f"constexpr int kBorder = {number};" in source
    module.ModelNew(3, 4, 3, padding_mode="reflect" if mode == "circular" else "circular")
    assert f"constexpr int kBorder = {1 if mode == 'circular' else 3};" in builds.sources[-1]


# ---- one axis, and transposed


def test_a_signal_is_an_image_of_height_one(imported: Any, calls: Calls) -> None:
    module = imported("kb76")
    module._call = calls
    model = module.ModelNew(4, 6, 3, 2, bias=True)
    x = torch.zeros(2, 4, 21, requires_grad=True)
    y = model(x)
    assert y.shape == (2, 6, 10)
    y.sum().backward()
    assert calls == [
        ("forward", (2, 6, 1, 10)),
        ("input_gradient", (2, 4, 1, 21)),
        ("weight_gradient", (6, 4, 1, 3)),
    ]
    assert (x.grad is not None, model.conv1d.weight.grad.shape) == (True, (6, 4, 3))
    assert model.conv1d.bias.grad.unique().tolist() == [7]
    assert model(x[0]).shape == (6, 10)
    with pytest.raises(RuntimeError, match=r"kernel \(3,\) does not fit into an input of shape \[1, 4, 2\]"):
        model(torch.zeros(1, 4, 2))


def test_a_transposed_convolution_is_an_input_gradient(imported: Any, calls: Calls, builds: Builds) -> None:
    module = imported("kb64")
    module._call = calls
    model = module.ModelNew(4, 6, 5, stride=3, padding=1, output_padding=2, groups=2, bias=True)
    assert "kInChannels = 6, kOutChannels = 4, kGroups = 2" in builds.sources[-1]
    x = torch.zeros(2, 4, 7, requires_grad=True)
    y = model(x)
    assert y.shape == torch.nn.ConvTranspose1d(4, 6, 5, 3, 1, 2, 2)(x).shape
    gradient = torch.randn(y.shape)
    y.backward(gradient)
    assert calls == [
        ("input_gradient", (2, 6, 1, 23)),
        ("forward", (2, 4, 1, 7)),
        ("weight_gradient", (4, 3, 1, 5)),
    ]
    torch.testing.assert_close(model.conv1d_transpose.bias.grad, gradient.sum((0, 2)))
    assert model(x[0]).shape == y.shape[1:]
    with pytest.raises(RuntimeError, match="leaves nothing of what an input of"):
        module.ModelNew(4, 6, 2, padding=3)(torch.zeros(1, 4, 2))


def test_outputs_past_the_stride_are_cropped(imported: Any) -> None:
    """With fewer, the transposed convolution is unchanged."""
    module = imported("kb64")
    for stride, sides in ((1, (1, -1)), (3, (1, 1))):
        conv = module.ConvTranspose1d(module.CONV1D_TRANSPOSE, 2, 2, 3, stride, 1, output_padding=2, dilation=3)
        assert conv.geometry[11:13] == sides


def test_layers_follow_one_another(imported: Any, calls: Calls) -> None:
    module = imported("kb86")
    module._call = calls
    assert module.ModelNew()(torch.zeros(1, 64, 8, 9)).shape == (1, 128, 8, 9)
    assert [name for name, _ in calls] == ["forward", "forward"]
