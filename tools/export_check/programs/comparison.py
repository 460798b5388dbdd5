"""An exported file's results against PyTorch in float64 on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_emulator import elf

TOLERANCE = 1e-4
"""Per element, in units of the tensor's scale: sqrt(summed products) times the rms of both factors."""


def load(path: Path) -> Any:
    """An exported file as a module."""
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["model"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Comparison:
    """A model with one convolution, and PyTorch's in float64 with the same parameters under the same names."""

    def __init__(self, model: Any, arguments: Mapping[str, Any], module: str = "Conv2d", activation: str = "") -> None:
        ((_, self.ours),) = model.named_children()
        self.exact = getattr(torch.nn, module)(**arguments, dtype=torch.float64)
        self.exact.load_state_dict({name: value.cpu().double() for name, value in self.ours.state_dict().items()})
        self._activation = getattr(torch.nn.functional, activation) if activation else torch.nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> None:
        """Compare an output, given the input on the CPU."""
        weight = self.exact.weight
        scale = sqrt(weight.numel() / y.shape[1]) * _rms(x) * _rms(weight)
        _report("y", y, self._activation(self.exact(x.double())), scale)

    def backward(self, x: Tensor, dx: Tensor | None, dy: Tensor) -> None:
        """Compare the gradients, those of the parameters in the model itself, given that of the output."""
        weight, x_exact = self.exact.weight, x.double().requires_grad_()
        self._activation(self.exact(x_exact)).backward(dy.double())
        _report("dx", dx, x_exact.grad, sqrt(weight.numel() / x.shape[1]) * _rms(dy) * _rms(weight))
        pixels = (x if self.exact.transposed else dy)[:, 0].numel()
        scales = {"weight": sqrt(pixels) * _rms(dy) * _rms(x), "bias": sqrt(dy[:, 0].numel()) * _rms(dy)}
        for name, parameter in self.exact.named_parameters():
            _report(f"d{name}", self.ours.get_parameter(name).grad, parameter.grad, scales[name])


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def _report(name: str, ours: Tensor | None, exact: Tensor | None, scale: float) -> None:
    """Print the error of a tensor, and fail if any element is too far off."""
    assert ours is not None, f"{name} is missing"
    assert exact is not None
    assert ours.shape == exact.shape, f"{name} has the shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    error = float((ours.detach().cpu().double() - exact.detach()).abs().max()) / scale
    print(f"  {name:8} {tuple(ours.shape)!s:18} largest error {error:.1e} of the scale {scale:.2g}")
    assert error <= TOLERANCE, f"{name} is wrong: at most {TOLERANCE} is allowed"  # also for NaN


def report_kernels(launches: Sequence[Any]) -> None:
    """Print which kernels of the file were launched, and which not; PyTorch's have mangled names."""
    ours = [launch for launch in launches if not launch.name.startswith("_ZN2at")]
    names = Counter(launch.name for launch in ours)
    print(f"  executed: {len(ours)} launches of the file's kernels, {len(launches) - len(ours)} of PyTorch's own")
    for name, count in sorted(names.items()):
        print(f"    {count:3} x {name[:100]}")
    carried = {name for cubin in {launch.cubin for launch in ours} for name in elf.load(cubin).kernel_names}
    for name in sorted(carried - set(names)):
        print(f"      not {name[:100]}")
