"""Activations in exported files: the C++ function, and who applies it. ``tools/export_check`` executes whole files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gpu_emulator
import nvrtc_11_8
from exported_files import V100, Builds, with_activation
from nightly import nightly
from other_nvrtc import nvrtc
from polyconv.activation import ACTIVATIONS, Activation
from polyconv.tools.export import ExportError, Model, convolution_model, exported_file, named_model
from polyconv.tools.export.device_code import _body
from polyconv.tools.export.epilogue import Epilogue

EVERY = [
    *(name for name in ACTIVATIONS if name != "none"),
    "leaky_relu(-0.3)",
    "hardtanh(-inf, 2)",
    "hardtanh(-1, inf)",
]
KERNEL = """
typedef long long i64;
{definitions}
extern "C" __global__ void apply(float* y, const float* x) {{
  y[threadIdx.x] = activated(x[threadIdx.x]{flag});
  float two[2] = {{x[threadIdx.x], 0.f}};
  activate(two{flag});
  y[64 + threadIdx.x] = two[0];
  const float4 four = activated4(make_float4(0.f, 0.f, 0.f, x[threadIdx.x]){flag});
  y[128 + threadIdx.x] = four.w;
}}
"""
FUSED = convolution_model((8, 32, 56, 56), in_channels=32, out_channels=32, kernel_size=3, padding=1)
MODEL = convolution_model((2, 4, 9, 9), in_channels=4, out_channels=6, kernel_size=3)


@pytest.mark.parametrize("always", [True, False], ids=["forward only", ""])
@pytest.mark.parametrize("name", EVERY)
def test_computes_what_torch_does(name: str, always: bool) -> None:
    """As machine code of the oldest CUDA that a file promises to work with."""
    activation = Activation(name)
    text = "".join(Epilogue(activation, always).definitions(_body("common/epilogue")))
    source = KERNEL.format(definitions=text, flag="" if always else ", 1")
    cubin = nvrtc("11.8.89").cubin(source, "apply.cu", ["-arch=sm_70", "--std=c++17"])
    edges = [0.0, -0.0, 3.0, -3.0, 6.0, 100.0, -100.0, 1e30, -1e30, float("nan")]
    x = np.array([*edges, *np.linspace(-8, 8, 64 - len(edges))], np.float32)
    y = np.zeros((3, 64), np.float32)
    gpu_emulator.run(cubin, "apply", 1, 64, [y, x])
    exact = activation(torch.from_numpy(x).double())
    for found in torch.from_numpy(y).double():
        # Far below 0 the tails of GELU and SiLU are zero here, and tiny in float64.
        torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(FUSED, {}, id="fused"),
        pytest.param(FUSED, {"forward_only": True}, id="fused, forward only"),
        pytest.param(named_model("kb80"), {"tensor_cores": True}, id="tensor cores", marks=nightly),
    ],
)
def test_compiles_without_a_warning(model: Model, options: dict[str, Any], imported: Any, builds: Builds) -> None:
    imported(with_activation(model, "silu"), **options)
    (source,) = builds.sources
    assert ("g.activates = c.activates" in source) == ("tensor_cores" in options)
    said = nvrtc_11_8.warnings_of(source).strip("\n\0").splitlines()
    assert not [line for line in said if line and "^" not in line and '" was declared but' not in line]


class Calls(list[tuple[str, bool]]):
    """Replaces the calls of compiled functions, and records them with the flag."""

    def __call__(self, function: Any, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, on: bool = False) -> None:
        self.append((function.__name__, on))
        {"forward": y, "input_gradient": x, "weight_gradient": w}[function.__name__].fill_(-1.0)
        if bias is not None and function.__name__ == "weight_gradient":
            bias.fill_(0)


def test_kernels_apply_it_unless_there_is_a_gradient(imported: Any) -> None:
    module = imported(with_activation(MODEL, "leaky_relu(0.25)"))
    module._call = calls = Calls()
    model, x = module.ModelNew(), torch.zeros(2, 4, 9, 9)
    with torch.no_grad():
        assert (model(x) == -1.0).all()
    model.requires_grad_(False)
    assert (model(x) == -1.0).all()
    assert calls == [("forward", True)] * 2
    calls.clear()
    y = model(x.requires_grad_())
    assert (y == -0.25).all()
    seen: list[Tensor] = []
    y.grad_fn.next_functions[0][0].register_prehook(lambda gradients: seen.append(gradients[0]))  # type: ignore[union-attr]
    y.sum().backward()
    assert calls == [("forward", False), ("input_gradient", False)]
    assert (seen[0] == 0.25).all()


def test_layers_with_and_without(imported: Any) -> None:
    """All take the flag; a layer without an activation never sets it."""
    second = convolution_model((2, 6, 7, 7), in_channels=6, out_channels=4, kernel_size=1)
    (first,), (plain,) = with_activation(MODEL, "relu").layers, second.layers
    plain = replace(plain, attribute="plain")
    module = imported(replace(MODEL, layers=(first, plain), signature=("in_channels", "out_channels", "kernel_size")))
    assert [source[-1] for source in (module.CONV2D, module.PLAIN)] == [("relu", (), {}), None]


def test_a_residual_is_refused() -> None:
    (layer,) = MODEL.layers
    added = replace(MODEL, layers=(replace(layer, problem=replace(layer.problem, residual=True)),))
    with pytest.raises(ExportError, match=r"conv2d would add a residual .* leave the sum"):
        exported_file(added, V100)
