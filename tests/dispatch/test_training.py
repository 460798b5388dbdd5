"""Training with polyconv's convolutions follows the loss curve of torch's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import polyconv
from networks import DeepLab, ResNet18, step_times, trainer
from nightly import nightly

STEPS = 20
AGREEMENT = 1e-3
"""Largest relative difference of the loss at any step."""


def losses(model: nn.Module, x: Tensor, target: Tensor, rate: float) -> list[float]:
    step = trainer(model, x, target, rate)
    return [step() for _ in range(STEPS)]


def check(model: nn.Module, x: Tensor, target: Tensor, rate: float) -> None:
    copy = deepcopy(model)
    replacement = polyconv.replace(copy)
    assert replacement.count == replacement.total > 0
    expected, found = losses(model, x, target, rate), losses(copy, x, target, rate)
    assert expected[-1] < 0.9 * expected[0], f"nothing was learnt: {expected}"
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)]
    assert max(differences) < AGREEMENT, f"{differences}\n{expected}\n{found}"


# Where a value crosses zero, ReLU's gradient jumps: with large steps on few pixels any rounding grows to a thousandth
# within twenty steps. These rates and sizes keep a perturbation of 1e-5 in every weight below 2e-4.


def test_resnet() -> None:
    x, target = torch.randn(24, 3, 96, 96), torch.randint(10, (24,))
    check(ResNet18(width=16, classes=10), x, target, rate=1e-4)


def test_deeplab() -> None:
    x, labels = torch.randn(2, 3, 96, 144), torch.randint(21, (2, 8, 12))
    target = labels.repeat_interleave(12, 1).repeat_interleave(12, 2)
    check(DeepLab(width=24), x, target, rate=2e-3)


@nightly
def test_deeplab_steps_take_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    plain, replaced = step_times((2, 3, 256, 256), width=64, repeats=3)
    with capsys.disabled():
        print(f"\nDeepLab-like training step: {min(plain) / min(replaced):.2f} times as fast as with torch.nn.Conv2d")
    assert min(replaced) < min(plain)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_large_output_may_be_changed_in_place(memory_format: torch.memory_format) -> None:
    """Outputs of 16 MiB and more are in pooled memory; autograd must not treat them as views."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True)).to(memory_format=memory_format)
    x = torch.randn(2, 8, 384, 384).contiguous(memory_format=memory_format)
    expected = deepcopy(model)
    expected(x).sum().backward()
    polyconv.replace(model)
    y = model(x)
    assert y.is_contiguous(memory_format=memory_format)
    y.sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-2)
