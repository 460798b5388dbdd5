"""Conv2d behaves as torch.nn.Conv2d: same numbers, names and text."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch

import polyconv

CONSTRUCTIONS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((3, 8, 3), {}),
    ((3, 8, (3, 5)), {"stride": (2, 1), "padding": (1, 2), "bias": False}),
    ((4, 8, 3), {"padding": "same", "dilation": 2, "groups": 2}),
    ((4, 8, 2), {"padding": "valid", "stride": 2}),
    ((4, 8, 3), {"padding": 2, "padding_mode": "reflect"}),
    ((4, 8, 3), {"padding": [1, 2], "padding_mode": "circular"}),
    ((4, 8, (2, 3)), {"padding": "same", "padding_mode": "replicate"}),
    ((4, 8, 3), {"dtype": torch.float64}),
    ((4, 8, 3), {"device": "meta"}),
]


def both(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[polyconv.Conv2d, torch.nn.Conv2d]:
    torch.manual_seed(1)
    ours = polyconv.Conv2d(*args, **kwargs)
    torch.manual_seed(1)
    return ours, torch.nn.Conv2d(*args, **kwargs)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(("args", "kwargs"), CONSTRUCTIONS)
def test_same_as_torchs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = both(args, kwargs)
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.Conv2d)
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    for (name, one), (other_name, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert one.device == other.device
        assert one.device.type == "meta" or torch.equal(one, other)
    if kwargs.get("device") == "meta":
        return
    x = torch.randn(2, args[0], 9, 8, dtype=ours.weight.dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))


def test_same_signature() -> None:
    ours, theirs = (inspect.signature(c.__init__).parameters for c in (polyconv.Conv2d, torch.nn.Conv2d))
    own = ["tolerance", "activation"]
    assert list(ours) == [*theirs, *own]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in own)
    assert [p.default for p in ours.values()] == [*(p.default for p in theirs.values()), None, None]
    forward = inspect.signature(polyconv.Conv2d.forward).parameters
    assert list(forward) == [*inspect.signature(torch.nn.Conv2d.forward).parameters, "residual"]
    assert forward["residual"].default is None


@pytest.mark.parametrize(
    "kwargs",
    [{"groups": 0}, {"groups": 3}, {"padding": "full"}, {"padding": "same", "stride": 2}, {"padding_mode": "no"}],
)
def test_same_constructor_errors(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:
        torch.nn.Conv2d(4, 8, 3, **kwargs)
    with pytest.raises(ValueError) as ours:
        polyconv.Conv2d(4, 8, 3, **kwargs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_four_sides(mode: Any) -> None:
    conv = polyconv.Conv2d(3, 4, 3, padding=(0, 1, 2, 3), padding_mode=mode)
    assert "padding=(0, 1, 2, 3)" in repr(conv)
    assert conv._reversed_padding_repeated_twice == [2, 3, 0, 1]
    x = torch.randn(2, 3, 6, 6)
    padded = torch.nn.functional.pad(x, (2, 3, 0, 1), mode="constant" if mode == "zeros" else mode)
    torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(padded, conv.weight, conv.bias))


def test_state_dict_moves_both_ways() -> None:
    ours, theirs = polyconv.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3)
    x = torch.randn(1, 3, 6, 6)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), theirs(x))
    other = torch.nn.Conv2d(3, 8, 3)
    other.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours(x), other(x))


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_copies(copied: str) -> None:
    conv = polyconv.Conv2d(3, 8, 3, padding=(0, 1, 2, 3), padding_mode="circular")
    if copied == "deepcopy":
        other = copy.deepcopy(conv)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(conv))
    else:
        buffer = io.BytesIO()
        torch.save(conv, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    x = torch.randn(1, 3, 6, 6)
    assert type(other) is polyconv.Conv2d
    torch.testing.assert_close(conv(x), other(x))
    assert repr(conv) == repr(other)


def test_attributes_changed_after_construction_count() -> None:
    """Model surgery (for example dilating a trained backbone) sets stride, padding and dilation on the module."""
    conv = polyconv.Conv2d(3, 8, 3, stride=2, padding=1)
    conv.stride, conv.padding, conv.dilation = (1, 1), (2, 2), (2, 2)
    assert conv(torch.randn(1, 3, 9, 9)).shape == (1, 8, 9, 9)


def test_trains() -> None:
    """A few steps of both modules from the same seed end in the same weights."""
    ours, theirs = both((2, 4, 3), {"padding": 1})
    x, target = torch.randn(2, 2, 6, 6), torch.randn(2, 4, 6, 6)
    for module in (ours, theirs):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimiser.zero_grad()
            (module(x) - target).pow(2).mean().backward()
            optimiser.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
