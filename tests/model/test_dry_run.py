"""A dry run finds the problems of a real step, and touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv
from networks import DeepLab, ResNet18
from polyconv.backend import PrepareRequest, override
from polyconv.cpu.backend import CpuBackend
from polyconv.dispatch.prepare import Ran, observed
from polyconv.model.dry_run import dry_run
from polyconv.runtime.frozen_weights import is_frozen

CPU = torch.device("cpu")


class Varied(nn.Module):
    """Groups, strides, a bias, activations with and without their own derivative, a residual, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = polyconv.Conv2d(3, 8, 5, stride=2, padding=2, activation="relu")
        self.depthwise = polyconv.Conv2d(8, 8, 3, padding=1, groups=8, activation="silu")
        self.norm = nn.BatchNorm2d(8)
        self.second = polyconv.Conv2d(8, 8, (1, 3), padding="same", padding_mode="reflect")

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = nn.functional.dropout(self.norm(self.depthwise(self.first(x))), 0.5, self.training)
        z = polyconv.conv2d(y, self.second.weight[:, :, :1, :1], residual=y)
        return {"one": self.second(y) * scale, "other": z}


def _far(model: Varied) -> Varied:
    """Extreme geometry, reduced before it is planned."""
    model.second = polyconv.Conv2d(8, 8, 3, dilation=5000, padding=5000)
    return model


def _half_frozen(model: Varied) -> Varied:
    """The first layer needs no input gradient."""
    model.first.requires_grad_(False)
    return model


def _frozen(model: Varied) -> Varied:
    polyconv.freeze(model)
    return model


def _channels_last(model: Varied) -> Varied:
    return model.to(memory_format=torch.channels_last)


def really_asked(model: nn.Module, inputs: tuple[Any, ...], *, backward: bool) -> set[PrepareRequest]:
    """Problems of a copy of the model when it runs."""
    found: list[Ran] = []
    frozen = is_frozen(next(m for m in model.modules() if isinstance(m, nn.Conv2d)))
    model = deepcopy(model)
    if frozen:
        polyconv.freeze(model)
    with observed(found.append), torch.set_grad_enabled(backward):
        output = model(*inputs)
        if backward:
            leaves = list(output.values()) if isinstance(output, dict) else [output]
            torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    return {PrepareRequest(ran.problem, ran.inference) for ran in found}


@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("change", [lambda model: model, _far, _half_frozen, _frozen, _channels_last])
def test_what_it_finds_is_what_a_step_asks_for(change: Callable[[Varied], Varied], backward: bool) -> None:
    model, x = change(Varied()).train(backward), torch.randn(2, 3, 24, 30)
    if change is _channels_last:
        x = x.to(memory_format=torch.channels_last)
    with override("cpu", CpuBackend()):
        found = dry_run(model, [x], backward=backward)
        assert set(found) == {CPU}
        assert set(found[CPU]) == really_asked(model, (x,), backward=backward)
        assert len(found[CPU]) == len(set(found[CPU]))


@pytest.mark.parametrize("network", [ResNet18, DeepLab])
def test_whole_networks(network: type[nn.Module]) -> None:
    model = network(width=8) if network is ResNet18 else network()
    polyconv.replace(model)
    x = torch.randn(2, 3, 64, 64)
    with override("cpu", CpuBackend()):
        assert set(dry_run(model, [x], backward=True)[CPU]) == really_asked(model, (x,), backward=True)


def test_a_shape_a_name_and_what_is_nested_do_as_well() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Varied()

        def forward(self, batch: dict[str, list[Tensor]], scale: Tensor) -> Tensor:
            return self.inner(batch["images"][0])["one"] * scale

    x = torch.randn(2, 3, 24, 30)
    wanted = dry_run(Varied(), [x], backward=True)[CPU]
    assert dry_run(Varied(), [(2, 3, 24, 30)], {"scale": 2.0}, backward=True)[CPU] == wanted
    nested = dry_run(Nested(), [{"images": [x]}], {"scale": torch.ones(())}, backward=True)[CPU]
    assert set(nested) <= set(wanted)


def test_a_wrapped_model_stands_for_what_it_wraps() -> None:
    model, x = Varied(), torch.randn(2, 3, 24, 30)
    wanted = dry_run(model, [x], backward=True)
    assert dry_run(nn.DataParallel(model), [x], backward=True) == wanted
    assert dry_run(torch.compile(model), [x], backward=True) == wanted


def test_a_loss_decides_what_has_a_gradient() -> None:
    model, x = Varied(), torch.randn(2, 3, 24, 30)
    all_of_it = dry_run(model, [x], backward=True)[CPU]
    part = dry_run(model, [x], backward=True, loss=lambda output: output["other"].square().mean())[CPU]
    assert set(part) < set(all_of_it)


def test_nothing_is_touched() -> None:
    model, x = Varied(), torch.randn(2, 3, 24, 30, requires_grad=True)
    hidden = nn.Parameter(torch.ones(1))
    model.hidden = [hidden]  # type: ignore[assignment]  # a parameter that no module knows of
    model.register_forward_hook(lambda module, args, output: {"one": output["one"] * module.hidden[0]})
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    dry_run(model, [x], backward=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(tensor.grad is None for tensor in (x, hidden, *model.parameters()))
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert type(value) is type(before[name])


def test_nothing_that_has_a_gradient() -> None:
    model = Varied().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing that the model returns has a gradient"):
        dry_run(model, [(2, 3, 24, 30)], backward=True)
