"""Whole models by ``polyconv.enable()`` alone: subclasses, functions and parametrisations that ``replace`` leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native
from polyconv.cpu.engines import aten

pytestmark = pytest.mark.skipif(not native.is_available(), reason="without native kernels, ATen runs everywhere")


class WhisperConv(nn.Conv1d):
    """Casts its weights to the dtype of the input, as Whisper's does."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class WhisperEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = WhisperConv(16, 24, 3, padding=1), WhisperConv(24, 24, 3, stride=2, padding=1)
        self.block = nn.TransformerEncoderLayer(24, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.two(F.gelu(self.one(x))))
        return self.block(x.permute(0, 2, 1))


class CausalConv3d(nn.Conv3d):
    """Pads the frames before the first, as video autoencoders do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1, 2, 0)))


class VideoDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = CausalConv3d(4, 16, 3), CausalConv3d(16, 16, 3), CausalConv3d(16, 3, 3)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, z: Tensor) -> Tensor:
        h = self.one(z)
        h = h + self.two(F.silu(self.norm(h)))
        return self.last(F.interpolate(h, scale_factor=(1, 2, 2)))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.within, self.out = nn.Linear(12, 48), nn.Linear(24, 12)
        self.conv = nn.Conv1d(24, 24, 4, groups=24, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        a, gate = self.within(x).chunk(2, -1)
        a = F.silu(self.conv(a.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        return self.out(a.cumsum(1) * F.silu(gate))


class UNet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = lambda i, o, s=1: nn.Sequential(  # noqa: E731
            nn.Conv3d(i, o, 3, s, 1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01)
        )
        self.down, self.low, self.up = block(1, 8), block(8, 16, 2), nn.ConvTranspose3d(16, 8, 2, 2)
        self.merge, self.head = block(16, 8), nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(self.merge(torch.cat([self.up(self.low(skip)), skip], 1)))


class HifiGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(20, 32, 7, padding=3))
        self.up = weight_norm(nn.ConvTranspose1d(32, 16, 8, 4, padding=2))
        self.dilated = nn.ModuleList(weight_norm(nn.Conv1d(16, 16, 3, dilation=d, padding=d)) for d in (1, 3, 5))
        self.last = weight_norm(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.first(x), 0.1))
        for conv in self.dilated:
            x = x + conv(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "Whisper's encoder": (WhisperEncoder, (2, 16, 40), 2),
    "decoder of a video autoencoder": (VideoDecoder, (1, 4, 3, 8, 8), 3),
    "Mamba": (Mamba, (2, 17, 12), 1),
    "3-D U-Net": (UNet3d, (1, 1, 8, 12, 12), 5),
    "HiFi-GAN": (HifiGan, (1, 20, 16), 6),
}


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and all gradients of a training step."""
    net.zero_grad()
    y = net(x)
    y.square().mean().backward()
    return [y.detach(), *(each.grad for each in net.parameters() if each.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, shape, convolutions = MODELS[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    expected = step(net, x)
    with polyconv.enable():
        usual = step(net, x)
        with preferences.watched() as seen:
            step(net, x)
        assert len({one.problem for one in seen}) >= convolutions
        with preferences.Forced(_others(seen)), preferences.watched() as seen:
            found = step(net, x)
            with torch.inference_mode():
                inferred = net(x)
        assert any(not one.choice.endswith(aten.NAME) for one in seen)
    after = step(net, x)
    # A bias before a normalisation has a gradient of zero: its roundings are those of the other gradients.
    scales = [float(expected[0].abs().max()), *(max(float(one.abs().max()) for one in expected[1:]) for _ in usual[1:])]
    for *results, other, scale in zip(usual, found, [inferred, *found[1:]], expected, scales, strict=True):
        for result in results:
            torch.testing.assert_close(result, other, rtol=2e-3, atol=1e-3 * scale)
    assert all(torch.equal(one, other) for one, other in zip(after, expected, strict=True))


def _others(seen: list[preferences.Decision]) -> dict[str, str]:
    """A candidate that is not ATen's for each decision."""
    backend, found = backend_for(torch.device("cpu")), {}
    for one in seen:
        names = candidate_names(backend, one.problem, inference=one.inference)
        ours = [name for name in names if not name.endswith(aten.NAME)]
        if ours:
            found[one.key] = ours[0]
    return found
