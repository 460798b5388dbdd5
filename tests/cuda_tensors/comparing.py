"""Float64 references on the CPU, and the attribution of launches to polyconv or PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fake_cuda import LaunchRecord, PretendedGpu


def is_ours(launch: LaunchRecord) -> bool:
    """True for a polyconv launch: PyTorch's kernels have mangled C++ names."""
    return not launch.name.startswith("_Z")


def ours(gpu: PretendedGpu) -> list[LaunchRecord]:
    """polyconv's launches so far."""
    return [launch for launch in gpu.launches if is_ours(launch)]


def small_network(Conv2d: Callable[..., nn.Module] = nn.Conv2d) -> nn.Sequential:
    """A network of convolutions that polyconv takes and layers that PyTorch's kernels compute."""
    return nn.Sequential(
        Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        Conv2d(6, 8, 3, stride=2, padding=1, groups=2),
        nn.ReLU(),
        Conv2d(8, 4, 1),
    )


def passes(convolve: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], gradient: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a convolution of x, w and bias."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    y = convolve(*leaves)
    y.backward(gradient)
    gradients = {f"d{name}": leaf.grad for name, leaf in zip(("x", "w", "b"), leaves, strict=True) if leaf is not None}
    return {"y": y.detach(), **gradients}


def step(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Output, and the gradients of the input and of all parameters, of one training step."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = (run or model)(x)
    y.square().mean().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def exact_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Likewise by PyTorch in float64 on the CPU, for torch's or polyconv's modules: parameter names agree."""
    exact = small_network().double()
    exact.load_state_dict({name: value.detach().cpu().double() for name, value in model.state_dict().items()})
    return step(exact, x.detach().cpu().double())


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Every element, in units of the tensor's scale; a missing or doubled term is far outside."""
    assert found.keys() == exact.keys()
    for name, value in found.items():
        wanted = exact[name]
        assert value.shape == wanted.shape, name
        allowed = tolerance * (wanted.square().mean().sqrt() + wanted.abs())
        excess = ((value.detach().cpu().double() - wanted).abs() / allowed.clamp_min(1e-30)).nan_to_num(nan=torch.inf)
        assert excess.max() <= 1, f"{name} is off by {float(excess.max()):.3g} times what is allowed"


def replaced_on(device: Any) -> nn.Module:
    """The small network with polyconv's convolutions, on a device."""
    import polyconv

    model = deepcopy(small_network())
    assert polyconv.replace(model, policy="own").count == 3
    return model.to(device)
