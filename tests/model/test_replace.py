"""replace and restore: the same objects with another class, and a correct count."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv


class Standardised(nn.Conv2d):
    """A subclass that does more than a convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv1d(6, 6, 1)),
        nn.ConvTranspose2d(8, 4, 2),
    )


def test_counts_and_keeps_the_objects() -> None:
    net = model()
    modules, parameters = list(net.modules()), list(net.parameters())
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    result = polyconv.replace(net)
    assert (result.count, int(result), result.total, result.left_alone) == (4, 4, 4, {})
    assert str(result) == "replaced 4 of 4 convolutions"
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert type(net[0]) is polyconv.Conv2d
    assert type(net[2][2]) is polyconv.Conv1d
    assert type(net[3]) is polyconv.ConvTranspose2d
    net[0](torch.randn(1, 3, 6, 6))
    assert calls == [1]


def test_same_output_and_repr() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), nn.ReLU(), nn.Conv2d(8, 4, 3, 2))
    before, x = copy.deepcopy(net), torch.randn(2, 3, 9, 9)
    polyconv.replace(net)
    torch.testing.assert_close(net(x), before(x))
    assert repr(net) == repr(before)


def test_twice_is_once() -> None:
    net = model()
    polyconv.replace(net)
    assert polyconv.replace(net).count == 0


def test_restore_is_the_reverse() -> None:
    net = model()
    polyconv.replace(net)
    assert str(polyconv.restore(net)) == "restored 4 of 4 convolutions"
    assert type(net[0]) is nn.Conv2d
    assert not any(isinstance(module, polyconv.Conv2d) for module in net.modules())


def test_the_model_itself() -> None:
    conv = nn.Conv2d(3, 4, 3)
    assert polyconv.replace(conv).count == 1
    assert type(conv) is polyconv.Conv2d


def test_a_shared_module_counts_once() -> None:
    conv = nn.Conv2d(3, 3, 3)
    assert polyconv.replace(nn.Sequential(conv, conv)).count == 1


def test_what_is_left_alone_is_named_with_the_reason() -> None:
    net = nn.ModuleDict(
        {
            "plain": nn.Conv2d(3, 4, 3),
            "sub": Standardised(3, 4, 3),
            "complex": nn.Conv2d(3, 4, 3, dtype=torch.complex64),
        }
    )
    result = polyconv.replace(net)
    assert (result.count, result.total) == (1, 3)
    assert "may do more than a convolution" in result.left_alone["sub"]
    assert "complex64" in result.left_alone["complex"]
    assert str(result).splitlines()[0] == "replaced 1 of 3 convolutions"
    assert type(net["sub"]) is Standardised


def test_lazy_modules_turn_into_ours_at_their_first_input() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConv2d(2, 1))
    assert polyconv.replace(net).count == 2
    assert type(net[0]) is polyconv.LazyConv2d
    assert "lazy" not in str(polyconv.replace(net))
    x = torch.randn(1, 3, 5, 5)
    y = net(x)
    assert [type(module) for module in net] == [polyconv.Conv2d] * 2
    assert polyconv.restore(net).count == 2
    torch.testing.assert_close(net(x), y)
    lazy = nn.Sequential(polyconv.LazyConv2d(4, 3))
    assert polyconv.restore(lazy).count == 1
    assert type(lazy[0]) is nn.LazyConv2d
    lazy(x)
    assert type(lazy[0]) is nn.Conv2d


def test_parametrisations_are_kept() -> None:
    """The class that parametrize generates gets another base, and removing the parametrisation still works."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    x, state = torch.randn(1, 3, 6, 6), net.state_dict()
    y = net(x)
    assert str(polyconv.replace(net)) == "replaced 1 of 1 convolutions"
    assert isinstance(net[0], polyconv.Conv2d)
    assert net.state_dict().keys() == state.keys()
    torch.testing.assert_close(net(x), y)
    assert polyconv.replace(net).total == 0
    polyconv.restore(net)
    assert not isinstance(net[0], polyconv.Conv2d)
    polyconv.replace(net)
    nn.utils.parametrize.remove_parametrizations(net[0], "weight")
    assert type(net[0]) is polyconv.Conv2d
    torch.testing.assert_close(net(x), y)


def test_parametrised_subclasses_are_still_left_alone() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(Standardised(3, 4, 3)))
    assert "Standardised is a subclass" in polyconv.replace(net).left_alone["0"]


def test_four_sides_cannot_be_restored() -> None:
    net = nn.Sequential(polyconv.Conv2d(3, 4, 3, padding=(0, 1, 0, 1)))
    result = polyconv.restore(net)
    assert result.count == 0
    assert result.left_alone == {"0": "torch.nn.Conv2d has no padding of four sides (0, 1, 0, 1)"}
    assert type(net[0]) is polyconv.Conv2d


@pytest.mark.parametrize(
    ("name", "shape"), [("Conv2d", (2, 3, 9, 9)), ("Conv3d", (2, 3, 9, 9, 9)), ("ConvTranspose2d", (2, 3, 9, 9))]
)
def test_a_call_that_has_begun_survives_restore(name: str, shape: tuple[int, ...]) -> None:
    """Another thread restores the module after a call has entered polyconv's method."""
    module = getattr(polyconv, name)(3, 4, 3)
    x, ours = torch.randn(shape), type(module)
    expected = module(x)
    polyconv.restore(nn.Sequential(module))
    assert type(module) is not ours
    method = ours.forward if "Transpose" in name else ours._conv_forward
    begun = method(module, x) if "Transpose" in name else method(module, x, module.weight, module.bias)
    torch.testing.assert_close(begun, expected)


def test_six_sides_cannot_be_restored() -> None:
    model = nn.Sequential(polyconv.Conv3d(2, 3, 3, padding=(0, 1, 0, 1, 0, 1)))
    result = polyconv.restore(model)
    assert result.left_alone == {"0": "torch.nn.Conv3d has no padding of six sides (0, 1, 0, 1, 0, 1)"}


def test_restored_modules_run_in_torch() -> None:
    conv = polyconv.Conv2d(3, 4, (2, 3), padding="same", padding_mode="reflect")
    x = torch.randn(1, 3, 6, 6)
    y = conv(x)
    polyconv.restore(conv)
    torch.testing.assert_close(conv(x), y)


def test_optimiser_keeps_working() -> None:
    net = model()[0]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    polyconv.replace(net)
    before = net.weight.detach().clone()
    net(torch.randn(1, 3, 6, 6)).sum().backward()
    optimiser.step()
    assert not torch.equal(net.weight, before)


class Named(nn.Conv2d):
    """A subclass that adds to a convolution, but overrides neither forward nor _conv_forward."""

    def __init__(self, *args: Any, label: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.label = label

    def extra_repr(self) -> str:
        return f"{self.label}: {super().extra_repr()}"


class OwnActivation(nn.Conv2d):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.activation = nn.ReLU()


class Upsampling(nn.ConvTranspose1d):
    pass


class OwnLazy(nn.LazyConv2d):
    pass


def test_subclasses_keep_their_methods() -> None:
    net = nn.Sequential(Named(3, 8, 3, label="stem"), nn.utils.parametrizations.weight_norm(Named(8, 8, 3)))
    up = Upsampling(4, 4, 2)
    before, state, x = copy.deepcopy(net), net.state_dict(), torch.randn(2, 3, 9, 9)
    kinds = [type(each) for each in net]
    assert polyconv.replace(net).count == 2
    assert polyconv.replace(up).count == 1
    assert isinstance(up, Upsampling)
    assert isinstance(up, polyconv.ConvTranspose1d)
    assert isinstance(net[0], Named)
    assert isinstance(net[0], polyconv.Conv2d)
    assert type(net[0]).forward is polyconv.Conv2d.forward
    assert repr(net) == repr(before)
    assert net.state_dict().keys() == state.keys()
    torch.testing.assert_close(net(x), before(x))
    assert polyconv.replace(net).total == 0
    assert str(polyconv.restore(net)) == "restored 2 of 2 convolutions"
    assert type(net[0]) is kinds[0]
    assert type(net[1]).__mro__[1:] == kinds[1].__mro__[1:]
    assert torch.equal(net(x), before(x))


def test_swapped_subclasses_are_copied_and_pickled() -> None:
    net = nn.Sequential(Named(3, 8, 3, label="stem"))
    polyconv.replace(net)
    x = torch.randn(1, 3, 9, 9)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert type(other[0]) is type(net[0])
        assert other[0].label == "stem"
        assert torch.equal(other(x), net(x))
        polyconv.restore(other)
        assert type(other[0]) is Named


def test_a_local_subclass_cannot_be_pickled_as_before() -> None:
    class Local(nn.Conv2d):
        pass

    conv = Local(3, 4, 3)
    assert polyconv.replace(conv).count == 1
    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(conv)


def test_subclasses_that_do_more_are_left_alone() -> None:
    own = nn.Conv2d(3, 4, 3)
    wrapped = Named(3, 4, 3)
    wrapped._conv_forward = own._conv_forward  # type: ignore[method-assign]
    why = polyconv.replace(nn.ModuleList([Standardised(3, 4, 3), OwnActivation(3, 4, 3), OwnLazy(4, 3), wrapped]))
    assert why.count == 0
    reasons = "overrides forward", "an attribute activation", "another class at its first input", "_conv_forward"
    for words, reason in zip(reasons, why.left_alone.values(), strict=True):
        assert words in reason
    assert "polyconv.enable() reaches it" in why.left_alone["0"]


def test_filter() -> None:
    net, asked = model(), []

    def wanted(module: nn.Module, name: str) -> bool:
        asked.append((name, type(module)))
        return isinstance(module, nn.Conv2d) and name != "0"

    result = polyconv.replace(net, filter_fn=wanted)
    assert asked == [("0", nn.Conv2d), ("2.0", nn.Conv2d), ("2.2", nn.Conv1d), ("3", nn.ConvTranspose2d)]
    assert result.left_alone == dict.fromkeys(("0", "2.2", "3"), "filter_fn excludes it")
    assert str(result).startswith("replaced 1 of 4 convolutions")
    assert type(net[2][0]) is polyconv.Conv2d
