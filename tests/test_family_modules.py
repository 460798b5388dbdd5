"""Every module of the family behaves as torch's, and every tool knows it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv
from polyconv.nn import OURS
from polyconv.tools.bench import model_zoo as networks

KINDS = [kind for kind in OURS if not kind.__name__.startswith("Lazy")]
LAZY = [kind for kind in OURS if kind.__name__.startswith("Lazy")]
CONSTRUCTIONS: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 4, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "dilation": 2, "groups": 2},
]


def image(module: nn.Module, channels: int = 4) -> Tensor:
    return torch.randn(2, channels, *(11 for _ in module.kernel_size))


def both(kind: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    made = []
    for each in (OURS[kind], kind):
        torch.manual_seed(1)
        made.append(each(4, 6, **options))
    return made[0], made[1]


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=["plain", "strided", "dilated"])
def test_same_as_torchs(kind: type[nn.Module], options: dict[str, Any]) -> None:
    ours, theirs = both(kind, **options)
    assert isinstance(ours, kind)
    assert repr(ours) == repr(theirs)
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    for (name, one), (other_name, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
    x = image(ours)
    for _ in range(2):  # the second call is cached
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(x), theirs(x))


@pytest.mark.parametrize("kind", [*KINDS, *LAZY])
def test_same_signature(kind: type[nn.Module]) -> None:
    ours, theirs = (inspect.signature(each.__init__).parameters for each in (OURS[kind], kind))
    own = ["tolerance"] if "Transpose" in kind.__name__ else ["tolerance", "activation"]
    assert list(ours) == [*theirs, *own]
    assert [p.default for p in ours.values()] == [*(p.default for p in theirs.values()), *(None for _ in own)]


@pytest.mark.parametrize("kind", LAZY)
def test_lazy(kind: type[nn.Module]) -> None:
    module = OURS[kind](6, 3, stride=2)
    module(torch.randn(2, 4, *(9 for _ in module.kernel_size)))
    assert type(module) is OURS[kind.cls_to_become]
    assert module.in_channels == 4


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_output_size(kind: type[nn.Module]) -> None:
    ours, theirs = both(kind, kernel_size=3, stride=3)
    x = image(ours)
    for size in (33, 34, 35):
        wanted = [size for _ in ours.kernel_size]
        torch.testing.assert_close(ours(x, wanted), theirs(x, output_size=wanted))
    with pytest.raises(ValueError, match="requested an output size"):
        ours(x, [36 for _ in ours.kernel_size])


@pytest.mark.parametrize("kind", KINDS)
def test_tools_know_it(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(4, 6, 3, padding=1), nn.ReLU())
    x, name = image(model[0]), kind.__name__
    y = model(x)
    audit = polyconv.audit(model.eval(), x, quiet=True)
    assert [row.kind for row in audit.rows] == ["forward"]
    assert str(polyconv.replace(model)) == "replaced 1 of 1 convolutions"
    assert type(model[0]) is getattr(polyconv, name)
    with torch.no_grad():
        torch.testing.assert_close(model(x), y.detach(), rtol=1e-3, atol=1e-4)
    assert str(polyconv.freeze(model)) == "froze the weights of 1 of 1 convolutions"
    text = str(polyconv.explain(model, tuple(x.shape)))
    assert f"0 ({name}, frozen)" in text
    assert text.count("runs ") >= 3
    assert ("of the transposed convolution, computed as" in text) == ("Transpose" in name)
    assert ("is computed, as a 2-D problem of height 1, as" in text) == ("1d" in name)
    for device in ("v100", "a100"):
        assert "cannot be asked" not in str(polyconv.explain(model, tuple(x.shape), device=device))
    polyconv.unfreeze(model)
    assert polyconv.warmup(model.train(), tuple(x.shape), quiet=True).devices["cpu"].problems == 2
    with polyconv.benchmark(), torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), y.detach(), rtol=1e-3, atol=1e-4)
    assert polyconv.restore(model).count == 1
    assert type(model[0]) is kind


def test_wrong_padding_mode_is_said_as_torch_says_it() -> None:
    with pytest.raises(ValueError, match='Only "zeros" padding mode is supported for ConvTranspose2d'):
        polyconv.ConvTranspose2d(3, 4, 3, padding_mode="reflect")


def test_frozen_weights_of_signals_are_kept() -> None:
    """The weight cache is keyed by the weight, not by the 2-D view of a call, and notices its changes."""
    conv = polyconv.Conv1d(64, 64, 3, padding=1)
    x = torch.randn(1, 64, 4000)
    polyconv.freeze(conv)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(
                conv(x), nn.functional.conv1d(x, conv.weight, conv.bias, padding=1), rtol=1e-3, atol=1e-3
            )
            conv.weight.mul_(-2)


# ---- networks


STEPS, AGREEMENT, RATE = 20, 1e-3, 1e-2
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vocoder": (lambda: networks.Vocoder(mels=20, width=32, steps=(8, 4)), (2, 20, 24)),
    "demucs": (lambda: networks.Demucs(width=8, depth=3), (2, 2, 1024)),
    "dcgan": (lambda: networks.dcgan(width=8, noise=24), (4, 24, 1, 1)),
    "unet": (lambda: networks.unet(width=4), (2, 3, 64, 64)),
    "unet over volumes": (lambda: networks.volume_unet(width=8), (2, 1, 8, 16, 16)),
}
"""Name -> narrow networks with their inputs."""


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_loss_curve(name: str) -> None:
    build, shape = NETWORKS[name]
    model, x = build(), torch.randn(shape)
    other = copy.deepcopy(model)
    assert polyconv.replace(other).left_alone == {}
    with torch.no_grad():
        target = torch.tanh(torch.randn_like(model(x)))
    curves = []
    for each in (model, other):
        optimiser, losses = torch.optim.SGD(each.parameters(), lr=RATE), []
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = (each(x) - target).abs().mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        curves.append(losses)
    expected, found = curves
    assert expected[-1] < expected[0]
    assert max(abs(a - b) / a for a, b in zip(expected, found, strict=True)) < AGREEMENT
