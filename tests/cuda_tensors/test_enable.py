"""``polyconv.enable`` on CUDA tensors: the kernels that ``polyconv.replace`` would run, for any caller."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyconv
from fake_cuda import PretendedGpu
from polyconv.dispatch import override
from polyconv.dispatch.op import CONV2D

from .comparing import assert_near, exact_step, ours, passes, replaced_on, small_network, step

X = (2, 3, 8, 9)
PATCHES = {1: (2, 3, 20), 2: (2, 3, 8, 12), 3: (1, 3, 4, 8, 8)}
"""Inputs by rank, cut into patches of 4."""


def names(gpu: PretendedGpu) -> list[str]:
    """polyconv's kernels since the last call."""
    found = [launch.name for launch in ours(gpu)]
    gpu.launches.clear()
    return found


def test_runs_what_replace_runs(gpu: PretendedGpu) -> None:
    """All three passes of torch's own modules, by the same kernels, with the same bits."""
    model, x = replaced_on("cuda"), torch.randn(X)
    wanted, kernels = step(model, x.cuda()), sorted(names(gpu))
    theirs = small_network().cuda()
    theirs.load_state_dict(model.state_dict())
    with polyconv.enable("own"):
        found = step(theirs, x.cuda())
    assert sorted(names(gpu)) == kernels
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert_near(found, exact_step(model, x))


class Halved(nn.Conv2d):
    """A subclass that ``replace`` leaves alone."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight * 0.5, self.bias)


def test_reaches_subclasses_and_functions(gpu: PretendedGpu) -> None:
    conv, x = Halved(3, 6, 3), torch.randn(X)
    exact = F.conv2d(x.double(), conv.weight.double() * 0.5, conv.bias.double())
    conv = conv.cuda()
    with polyconv.enable("own"), torch.no_grad():
        found = conv(x.cuda())
        again = F.conv2d(x.cuda(), conv.weight * 0.5, conv.bias)
    assert len(names(gpu)) >= 2
    assert torch.equal(found, again)
    assert_near({"y": found}, {"y": exact.detach()})
    assert not override.is_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_region_of_autocast(gpu: PretendedGpu, dtype: torch.dtype) -> None:
    x, w = torch.randn(X), torch.randn(6, 3, 3, 3)
    with polyconv.enable("own"), torch.autocast("cuda", dtype), torch.no_grad():
        y = F.conv2d(x.cuda(), w.cuda())
    assert y.dtype == dtype
    assert names(gpu)
    exact = F.conv2d(x.to(dtype).double(), w.to(dtype).double())
    assert_near({"y": y.float()}, {"y": exact}, tolerance=8 * torch.finfo(dtype).eps)


def test_autocast_is_pytorchs_own_where_a_layer_is_left_to_it(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced layer calls PyTorch's convolution on the tensors as they are, which autocast casts."""
    calls: list[torch.dtype] = []

    def recorded(x: Tensor, *_: object) -> Tensor:
        calls.append(x.dtype)
        return x

    monkeypatch.setattr(CONV2D, "aten", recorded)
    conv, x = nn.Conv2d(64, 64, 1).cuda(), torch.randn(1, 64, 8, 8).cuda()
    polyconv.replace(conv)
    for _ in range(3):
        with torch.autocast("cuda", torch.float16), torch.no_grad():
            conv(x)
    assert calls == 3 * [torch.float32]
    assert not names(gpu)


@pytest.mark.parametrize("rank", PATCHES)
def test_a_kernel_as_large_as_the_stride(gpu: PretendedGpu, rank: int) -> None:
    """Patch embeddings: both gradients, too, by the operator and through the override."""
    x, w, bias = torch.randn(PATCHES[rank]), torch.randn(5, 3, *[4] * rank), torch.randn(5)
    aten, own = (getattr(package, f"conv{rank}d") for package in (F, polyconv))
    tensors, gradient = (x, w, bias), torch.randn_like(aten(x, w, bias, stride=4))
    exact = passes(lambda *t: aten(*t, stride=4), tuple(t.double() for t in tensors), gradient.double())
    cuda = tuple(tensor.cuda() for tensor in tensors)
    found = passes(lambda *t: own(*t, stride=4), cuda, gradient.cuda())
    kernels = names(gpu)
    assert kernels
    assert_near(found, exact)
    with polyconv.enable("own"):
        again = passes(lambda *t: aten(*t, stride=4), cuda, gradient.cuda())
    assert sorted(names(gpu)) == sorted(kernels)
    assert all(torch.equal(again[name], found[name]) for name in found)
