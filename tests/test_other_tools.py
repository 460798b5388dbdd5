"""Tools of torch and others that take a model elsewhere: they work, or an error says what to do."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx.experimental import optimization
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

import polyconv
from commands import python
from polyconv.dispatch.transforms.interop import ExchangeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's, about most of its tools
    pytest.mark.filterwarnings("ignore:Please use quant_min:UserWarning"),
    pytest.mark.filterwarnings("ignore:must run observer:UserWarning"),
]

X = torch.randn(2, 3, 10, 12, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """Convolutions, a trained normalisation, and further layers; in eval mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model(torch.randn(8, 3, 10, 12))
    return model.eval()


def replaced() -> nn.Sequential:
    model = network()
    polyconv.replace(model)
    return model


def check(found: Tensor, model: nn.Module = network(), x: Tensor = X) -> None:  # noqa: B008
    """Per element against float64, in units of the output's scale."""
    exact = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(found.double() / exact.std(), exact / exact.std(), rtol=0, atol=1e-4)


# ---- wrappers around forward


class Wrapper:
    """As ``accelerate.hooks``: the bound method is stored, and called by a function of the instance."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules, self.calls = modules, 0
        for module in modules:
            module._old_forward = module.forward  # type: ignore[assignment]
            wrapped = functools.partial(self.forward, module)
            module.forward = functools.update_wrapper(wrapped, module._old_forward)  # type: ignore[arg-type]

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return module._old_forward(*args, **kwargs)

    def remove(self) -> None:
        for module in self.modules:
            module.forward = module._old_forward
            del module._old_forward


def convolutions(model: nn.Sequential) -> list[nn.Module]:
    return [model[0], model[3]]


def test_wrapped_then_restored() -> None:
    model = replaced()
    wrapper = Wrapper(*convolutions(model))
    check(model(X))
    polyconv.restore(model)
    assert [type(conv) for conv in convolutions(model)] == [nn.Conv2d] * 2
    assert torch.equal(model(X), network()(X))
    assert wrapper.calls == 4
    wrapper.remove()
    assert torch.equal(model(X), network()(X))
    polyconv.replace(model)
    check(model(X))


def test_wrapped_then_replaced() -> None:
    model = network()
    wrapper = Wrapper(*convolutions(model))
    polyconv.replace(model)
    assert counted(model) == 2
    wrapper.remove()
    assert counted(model) == 2
    polyconv.restore(model)
    assert counted(model) == 0


def test_a_method_that_was_kept_follows_the_class() -> None:
    """A closure, which cannot be inspected, holds the method of a class that the module no longer has."""
    conv = polyconv.Conv2d(3, 4, 3)
    kept = conv.forward
    polyconv.restore(conv)
    assert torch.equal(kept(X), conv(X))
    polyconv.replace(conv)
    residual = torch.randn(2, 4, 8, 10)
    torch.testing.assert_close(kept(X, residual), conv(X) + residual)


def counted(model: nn.Module) -> int:
    """Number of polyconv's convolutions in a call."""
    with torch.profiler.profile() as profile:
        check(model(X))
    return sum(event.name == "polyconv::conv2d_fprop" for event in profile.events())


# ---- ONNX


class Several(nn.Module):
    """All outputs of several convolutions: one file for all."""

    def __init__(self, convs: Sequence[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, residual: Tensor) -> list[Tensor]:
        *plain, last = self.convs
        return [*(conv(x) for conv in plain), last(x, residual)]


def geometries() -> list[nn.Module]:
    modes = ("zeros", "reflect", "replicate", "circular")
    paddings = (0, (2, 1), "same", (0, 1, 2, 3), (-1, 2, 1, -2))
    convs: list[nn.Module] = [
        polyconv.Conv2d(4, 6, (3, 2), padding=padding, padding_mode=mode)  # type: ignore[arg-type]
        for mode in modes
        for padding in paddings
    ]
    convs += [
        polyconv.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
        polyconv.Conv2d(4, 4, (1, 5), dilation=(1, 2), groups=4),
        polyconv.Conv2d(4, 4, 3, stride=(2, 3), activation="relu"),
        polyconv.Conv2d(4, 4, 3, padding=1, activation="silu"),  # with a residual
    ]
    return convs


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """torch's exporters report every step, and warn of their own age."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def exported(model: nn.Module, inputs: tuple[Tensor, ...], path: Path, dynamo: bool) -> tuple[set[str], list[Any]]:
    """The operators of a model's ONNX file, and their results by ONNX's reference."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    with quietly():
        torch.onnx.export(model, inputs, path, dynamo=dynamo, opset_version=18)
    file = onnx.load(path)
    onnx.checker.check_model(file)
    names = [value.name for value in file.graph.input]
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return {node.op_type for node in file.graph.node}, ReferenceEvaluator(file).run(None, feeds)


exporters = pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])


@exporters
def test_onnx(dynamo: bool, tmp_path: Path) -> None:
    """In float64, so that only the geometry can differ."""
    model = Several(geometries()).double().eval()
    x, residual = torch.randn(2, 4, 9, 11).double(), torch.randn(2, 4, 9, 11).double()
    operators, results = exported(model, (x, residual), tmp_path / "model.onnx", dynamo)
    assert {"Conv", "Pad", "Add", "Relu", "Sigmoid"} <= operators
    for found, expected in zip(results, model(x, residual), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-12, atol=1e-12)


@exporters
@pytest.mark.parametrize("make", [network, replaced], ids=["torch", "polyconv"])
def test_onnx_of_a_network(make: Any, dynamo: bool, tmp_path: Path) -> None:
    operators, (found,) = exported(make(), (X,), tmp_path / "model.onnx", dynamo)
    assert "Conv" in operators
    assert "Pad" not in operators
    check(torch.from_numpy(found))


@exporters
def test_onnx_of_one_axis_and_of_transposed_convolutions(dynamo: bool, tmp_path: Path) -> None:
    signal = [polyconv.Conv1d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), polyconv.ConvTranspose1d(4, 4, 4, 2, 1)]
    model = nn.Sequential(*signal, nn.Unflatten(2, (4, 6)), polyconv.ConvTranspose2d(4, 2, 3, 2, 1, 1)).double().eval()
    x = torch.randn(2, 3, 11).double()
    operators, (found,) = exported(model, (x,), tmp_path / "model.onnx", dynamo)
    assert {"Conv", "ConvTranspose", "Pad"} <= operators
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-12, atol=1e-12)


@exporters
def test_a_model_runs_on_polyconv_after_its_export(dynamo: bool, tmp_path: Path) -> None:
    model = replaced()
    exported(model, (X,), tmp_path / "model.onnx", dynamo)
    assert counted(model) == 2


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = polyconv.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.conv(x)


@exporters
def test_an_exported_autocast_region_keeps_to_float32_if_told_so(dynamo: bool, tmp_path: Path) -> None:
    model = Autocast().eval()
    with polyconv.allow_low_precision(False):
        operators, (found,) = exported(model, (X,), tmp_path / "model.onnx", dynamo)
    assert "Conv" in operators
    check(torch.from_numpy(found), model.conv)


def test_onnx_is_imported_by_an_export_and_by_nothing_else() -> None:
    script = (
        "import sys, torch, polyconv\n"
        "polyconv.Conv2d(3, 4, 3)(torch.randn(3, 8, 8))\n"
        "assert 'torch.onnx' not in sys.modules"
    )
    python(script)


# ---- TorchScript


def convolved(x: Tensor) -> Tensor:
    return polyconv.conv2d(x, x)


def test_script_says_what_to_do() -> None:
    model = replaced()
    torch.jit.script(network())
    for what in (model, model[0], polyconv.conv2d, convolved):
        with pytest.raises(ExchangeError, match=r"torch\.jit\.trace.*polyconv\.restore"):
            torch.jit.script(what)
    assert counted(model) == 2
    polyconv.restore(model)
    check(torch.jit.script(model)(X))


# ---- fusing normalisations


@pytest.mark.parametrize("make", [network, replaced], ids=["torch", "polyconv"])
def test_fuse_conv_bn_eval(make: Any) -> None:
    model = make()
    fused = fuse_conv_bn_eval(model[0], model[1])
    assert type(fused) is type(model[0])
    check(nn.Sequential(fused, *model[2:])(X))


@pytest.mark.parametrize("traced", [False, True], ids=["model", "graph"])
def test_fx_fusion_then_replace(traced: bool) -> None:
    """FX finds a module to fuse by its type: torch's. In a graph it leaves them, too, and replace finds them there."""
    model = replaced()
    polyconv.restore(model)
    fused = optimization.fuse(torch.fx.symbolic_trace(model) if traced else model)
    assert not [module for module in fused.modules() if isinstance(module, nn.BatchNorm2d)]
    assert polyconv.replace(fused).count == 2
    assert counted(fused) == 2


@pytest.mark.parametrize("names", [["0", "1"], ["0", "1", "2"]], ids=["conv-bn", "conv-bn-relu"])
def test_fuse_modules_then_replace(names: list[str]) -> None:
    model = replaced()
    with pytest.raises(Exception, match=r"polyconv\.nn\.Conv2d"):
        quantization.fuse_modules(model, names)
    polyconv.restore(model)
    fused = quantization.fuse_modules(model, names)
    assert polyconv.replace(fused).count == 2
    assert counted(fused) == 2


# ---- quantisation


def stubs(model: nn.Module) -> nn.Sequential:
    return nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub())


def prepared(model: nn.Sequential, *, training: bool) -> nn.Module:
    if training:
        model.train().qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
        return quantization.prepare_qat(model)
    model.eval().qconfig = quantization.get_default_qconfig("x86")  # type: ignore[assignment]
    return quantization.prepare(model)


def quantised(model: nn.Module) -> nn.Module:
    model(X)
    return quantization.convert(model.eval())


@pytest.mark.parametrize("training", [False, True], ids=["prepare", "prepare_qat"])
def test_eager_quantisation(training: bool) -> None:
    model = stubs(replaced())
    with pytest.raises(ExchangeError, match=r"polyconv\.restore\(model\) first"):
        prepared(model, training=training)
    polyconv.restore(model)
    found = quantised(prepared(model, training=training))
    assert type(found[1][0]).__module__.startswith("torch.ao.nn.quantized")
    assert found(X).shape == network()(X).shape
    assert polyconv.replace(found).total == 0


def test_what_is_prepared_is_not_replaced() -> None:
    model = stubs(network())
    model[1][3].qconfig = None
    model = prepared(model, training=False)
    result = polyconv.replace(model)
    assert result.count == 1
    assert "qconfig" in result.left_alone["1.0"]
    assert type(quantised(model)[1][0]).__module__.startswith("torch.ao.nn.quantized")


def test_convolutions_may_stay_in_float() -> None:
    model = replaced()
    for conv in convolutions(model):
        conv.qconfig = None
    model.qconfig = quantization.get_default_qconfig("x86")  # type: ignore[assignment]
    found = quantised(quantization.prepare(model))
    assert [type(conv) for conv in convolutions(found)] == [polyconv.Conv2d] * 2


def test_prepare_fx() -> None:
    model, how = replaced(), quantization.get_default_qconfig_mapping("x86")
    as_leaves = PrepareCustomConfig().set_non_traceable_module_classes([polyconv.Conv2d])
    for custom in (None, as_leaves):
        with pytest.raises(ExchangeError, match=r"polyconv\.restore\(model\) first"):
            quantize_fx.prepare_fx(model, how, (X,), prepare_custom_config=custom)
    how.set_object_type(polyconv.Conv2d, None)
    in_float = quantize_fx.prepare_fx(model, how, (X,), prepare_custom_config=as_leaves)
    in_float(X)
    assert type(quantize_fx.convert_fx(in_float).get_submodule("0")) is polyconv.Conv2d
    polyconv.restore(model)
    observed = quantize_fx.prepare_fx(model, how, (X,))
    observed(X)
    converted = quantize_fx.convert_fx(observed)
    assert "quantized" in type(converted.get_submodule("0")).__module__


def test_a_quantised_input_says_what_to_do() -> None:
    x = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(RuntimeError, match=r"quantised.*dequantize\(\)"):
        polyconv.Conv2d(3, 4, 3)(x)


# ---- counting and profiling


def passes(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()


def layers(package: Any, groups: int) -> dict[str, nn.Module]:
    names = [f"{kind}{axes}d" for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)]
    return {name: getattr(package, name)(4, 6, 3, stride=2, padding=1, groups=groups) for name in names}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", layers(torch.nn, 1))
def test_flops_are_those_of_torchs_layer(name: str, groups: int) -> None:
    def count(module: nn.Module, wants: bool) -> list[int]:
        x = torch.randn(2, 4, *range(9, 9 + len(module.kernel_size)), requires_grad=wants)  # type: ignore[arg-type]
        found = []
        for run in (passes, lambda module, x: module(x)):
            with FlopCounterMode(display=False) as counter:
                run(module, x)
            found.append(counter.get_total_flops())
        return found

    for wants in (True, False):  # with and without the gradient of the input
        expected = count(layers(torch.nn, groups)[name], wants)
        assert min(expected) > 0
        assert count(layers(polyconv, groups)[name], wants) == expected


@pytest.mark.parametrize("first", ["polyconv", "torch.utils.flop_counter"])
def test_flops_are_counted_whatever_is_imported_first(first: str) -> None:
    """polyconv does not import the counter, which imports Triton."""
    program = f"""
import sys, torch, {first}
assert ("torch.utils.flop_counter" in sys.modules) == {first != "polyconv"}
import polyconv, torch.utils.flop_counter as counter
with counter.FlopCounterMode(display=False) as mode, torch.inference_mode():
    polyconv.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3))
assert mode.get_total_flops() == 2 * 2 * 3 * 9 * 9, mode.get_total_flops()
import inspect
assert "FlopCounterMode" in inspect.getsource(counter)
"""
    python(program)


@pytest.mark.parametrize("name", layers(torch.nn, 1))
def test_a_profiler_sees_the_operators(name: str) -> None:
    """Also after fast-path calls; a passthrough appears as PyTorch's convolution."""
    module, transposed = layers(polyconv, 1)[name], "Transpose" in name
    x = torch.randn(2, 4, *range(9, 9 + len(module.kernel_size)), requires_grad=True)  # type: ignore[arg-type]
    with polyconv.tolerance(1e-4), torch.no_grad():
        module(x)
    y = module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward, torch.inference_mode():
        module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        y.sum().backward()
    ours = "polyconv::conv2d_dgrad" if transposed else "polyconv::conv2d_fprop"
    theirs = "aten::conv" + name.removeprefix("Conv").replace("Transpose", "_transpose")
    assert {ours, theirs} & {event.key for event in forward.key_averages()}
    kinds = ("fprop", "wgrad") if transposed else ("dgrad", "wgrad")
    seen = {event.key for event in backward.key_averages()}
    assert "aten::convolution_backward" in seen or {f"polyconv::conv2d_{kind}" for kind in kinds} <= seen
