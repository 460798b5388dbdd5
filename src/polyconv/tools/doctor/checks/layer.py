"""Small convolution through the public interface, forward and backward, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....functional import conv2d
from ....problem import DEFAULT_TOLERANCE
from ..check import Result, judged
from ..device_under_test import GpuUnderTest

ALLOWED = 2 * DEFAULT_TOLERANCE
"""Allowed :func:`deviation`."""
ALLOWED_IN_HALF = 1e-2
"""The same under autocast, which rounds the weight and the result to float16."""


@dataclass(frozen=True)
class Layer:
    x: Tensor
    w: Tensor
    bias: Tensor
    dy: Tensor
    arguments: dict[str, Any]

    @classmethod
    def make(cls, x: tuple[int, ...] = (2, 16, 14, 18), out: int = 24, kernel: int = 3, **arguments: Any) -> Layer:
        random = torch.Generator().manual_seed(0)
        arguments = {"padding": kernel // 2, **arguments}
        channels = x[1] // arguments.get("groups", 1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        w, image = draw(out, channels, kernel, kernel), draw(*x)
        shape = torch.nn.functional.conv2d(image, w, **arguments).shape
        return cls(image, w, draw(out), draw(*shape), arguments)

    def on(self, device: torch.device) -> Layer:
        x, w, bias, dy = (tensor.to(device) for tensor in (self.x, self.w, self.bias, self.dy))
        return Layer(x, w, bias, dy, self.arguments)

    def run(self) -> dict[str, Tensor]:
        """Output and all gradients by polyconv."""
        return self._by(conv2d)

    def exact(self) -> dict[str, Tensor]:
        """Output and all gradients by PyTorch, in float64 on the CPU."""
        x, w, bias, dy = (tensor.cpu().double() for tensor in (self.x, self.w, self.bias, self.dy))
        return Layer(x, w, bias, dy, self.arguments)._by(torch.nn.functional.conv2d)

    def _by(self, convolve: Callable[..., Tensor]) -> dict[str, Tensor]:
        x, w, bias = (tensor.detach().requires_grad_() for tensor in (self.x, self.w, self.bias))
        with torch.enable_grad():
            y = convolve(x, w, bias, **self.arguments)
            dx, dw, db = torch.autograd.grad(y, (x, w, bias), self.dy)
        return {"y": y.detach(), "dx": dx, "dw": dw, "db": db}

    def judge(self, found: dict[str, Tensor], exact: dict[str, Tensor] | None = None) -> Result:
        """Compare results with ``exact``, by default those of :meth:`exact`."""
        exact = self.exact() if exact is None else exact
        errors = {name: deviation(found[name], want) for name, want in exact.items()}
        worst = max(errors, key=lambda name: errors[name])
        return judged(errors[worst], ALLOWED, f"error of {worst}")


def deviation(found: Tensor, exact: Tensor) -> float:
    """Largest error relative to the element's magnitude plus the rms of the tensor; infinite if there is a NaN."""
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    unit = exact.abs() + exact.square().mean().sqrt() + 1e-30
    return float(((found - exact).abs() / unit).nan_to_num(nan=float("inf")).max())


def on_the_gpu(subject: GpuUnderTest, arrange: Callable[[Layer], Layer] = lambda layer: layer) -> Result:
    """Run the layer, with its tensors in the given arrangement."""
    with subject.at_work():
        placed = arrange(Layer.make().on(subject.device))
        found = placed.run()
        subject.wait()
    return placed.judge(found)
