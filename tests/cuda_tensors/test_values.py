"""Convolutions of CUDA tensors through the public API, against float64 on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv
from fake_cuda import PretendedGpu, counts
from geometries import CASES, Case
from nightly import NIGHTLY
from polyconv.autotune import online

from .comparing import assert_near, exact_step, ours, passes, replaced_on, small_network, step

LARGER = {
    "W1, shrunk": Case((2, 8, 24, 40), (16, 8, 5, 9), bias=False, kwargs={"padding": (2, 4), "dilation": (2, 3)}),
    "groups across tiles": Case((1, 12, 12, 13), (72, 6, 3, 3), kwargs={"groups": 2, "padding": 1}),
    "depthwise, larger": Case((2, 8, 20, 37), (8, 1, 7, 7), kwargs={"groups": 8, "padding": 3}),
}
ALWAYS = ("plain 3x3", "strided, odd remainder", "depthwise", "reflect", "channels_last", "expanded")
CHOSEN = {**CASES, **LARGER} if NIGHTLY else {name: CASES[name] for name in ALWAYS}


@pytest.mark.parametrize("name", CHOSEN)
def test_all_passes(gpu: PretendedGpu, name: str) -> None:
    case = CHOSEN[name]
    tensors = case.tensors(torch.float32)
    convolve = partial(polyconv.conv2d, **case.kwargs)
    gradient = torch.randn_like(convolve(*tensors))
    exact = passes(convolve, tuple(None if t is None else t.double() for t in tensors), gradient.double())
    on_gpu = tuple(None if t is None else t.cuda() for t in tensors)
    gradient = gradient.cuda()
    waited = counts().synchronisations
    found = passes(convolve, on_gpu, gradient)
    assert counts().synchronisations == waited, "a convolution waited for the GPU"
    assert ours(gpu)
    assert all(tensor.is_cuda for tensor in found.values())
    assert_near(found, exact)


def test_a_replaced_network(gpu: PretendedGpu) -> None:
    model, x = replaced_on("cuda"), torch.randn(2, 3, 8, 9)
    assert_near(step(model, x.cuda()), exact_step(model, x))
    assert ours(gpu)


def test_moved_after_its_first_call() -> None:
    """The cached call of a layer belongs to the device that it was on."""
    model, x = replaced_on("cpu"), torch.randn(2, 3, 8, 9)
    with torch.no_grad():
        on_cpu = model(x)
        on_gpu = model.cuda()(x.cuda())
        assert on_gpu.is_cuda
        assert_near({"y": on_gpu}, {"y": on_cpu.double()})
        assert_near({"y": model.cpu()(x)}, {"y": on_cpu.double()})


def test_the_epilogue(gpu: PretendedGpu) -> None:
    x, w, bias, residual = (torch.randn(shape) for shape in ((2, 8, 9, 11), (16, 8, 3, 3), (16,), (2, 16, 9, 11)))
    y = polyconv.conv2d(x.cuda(), w.cuda(), bias.cuda(), padding=1, activation="relu", residual=residual.cuda())
    exact = F.relu(F.conv2d(x.double(), w.double(), bias.double(), padding=1) + residual.double())
    assert_near({"y": y}, {"y": exact})
    assert "_epilogue" in ours(gpu)[-1].name


def test_training_follows_the_curve_of_the_cpu() -> None:
    """Losses of a few steps of SGD with momentum, against PyTorch on the CPU."""
    model = replaced_on("cuda")
    expected = small_network().double()
    expected.load_state_dict(model.state_dict())
    x, target = torch.randn(2, 3, 8, 9), torch.randn(2, 4, 4, 5)
    found = losses(model, x.cuda(), target.cuda())
    wanted = losses(expected, x.double(), target.double())
    assert wanted[-1] < 0.97 * wanted[0], f"nothing was learnt: {wanted}"
    assert found == pytest.approx(wanted, rel=1e-4)


def losses(model: nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_autotuning_is_timed_by_events_of_the_gpu(gpu: PretendedGpu) -> None:
    """Every trial is correct, and one candidate is chosen."""
    x, w = torch.randn(1, 8, 9, 12), torch.randn(16, 8, 3, 3)
    on_gpu, exact = (x.cuda(), w.cuda()), F.conv2d(x.double(), w.double())
    turns = -1
    with polyconv.benchmark(), torch.no_grad():
        while turns != online.turns():
            turns = online.turns()
            assert_near({"y": polyconv.conv2d(*on_gpu)}, {"y": exact})
    assert turns > 1
    assert len({launch.name for launch in ours(gpu)}) > 2


def test_second_derivatives() -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(polyconv.conv2d(x, w, padding=1).square().sum(), x, create_graph=True)
        return dx.square().mean()

    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    exact, found = (
        torch.autograd.grad(penalty(a.requires_grad_(), b.requires_grad_()), (a, b))
        for a, b in ((x.double(), w.double()), (x.cuda(), w.cuda()))
    )
    assert_near(dict(zip("xw", found, strict=True)), dict(zip("xw", exact, strict=True)))


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    x, w = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="cuda"):
        polyconv.conv2d(x.cuda(), w)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="cuda:1"):
        polyconv.conv2d(x.cuda(), w.to("cuda:1"))
    with pytest.raises((RuntimeError, TypeError, ValueError), match="float32"):
        polyconv.conv2d(x.cuda().double(), w.cuda().double())
