"""The cached passthrough call of a module: repeated without planning while all guards hold."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import polyconv
from entered import entered
from polyconv import nn as nn_module
from polyconv.autotune import preferences
from polyconv.cpu import native, planner
from polyconv.dispatch import passthrough, prepare
from polyconv.nn import Convolution
from polyconv.problem import Problem

SIZE = (2, 8, 9, 11)

AGAIN = "polyconv.dispatch.fastpath.call"
"""Entered if the cached call is not valid."""


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = passthrough._cache()
    if memory is None:
        pytest.skip("this installation has no native code")
    monkeypatch.setattr(passthrough, "cache", memory)
    monkeypatch.setattr("polyconv.nn.again", memory.again)


def never(problem: Problem) -> bool:
    return False


@pytest.fixture(autouse=True)
def no_other_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ATen's convolution is the only candidate, as without native kernels."""

    def forget() -> None:
        for plans in (planner._plan, planner._offered_here, planner._gain):
            plans.cache_clear()
        prepare.known.clear()

    forget()
    monkeypatch.setattr(native, "takes", never)
    yield
    forget()


def left_to_torch(kind: type[polyconv.Conv2d] = polyconv.Conv2d, **options: Any) -> tuple[polyconv.Conv2d, Tensor]:
    """A module whose last call was a passthrough. There is no other plan."""
    conv = kind(8, 8, **{"kernel_size": 3, **options})
    x = torch.randn(SIZE)
    conv(x)
    assert AGAIN not in entered(lambda: conv(x))
    return conv, x


def double(x: Tensor) -> Tensor:
    return torch.cat([x, x], 3)


OTHERS: dict[str, Callable[[polyconv.Conv2d, Tensor], Tensor]] = {
    "a larger image": lambda _, x: double(x),
    "another layout": lambda _, x: x.contiguous(memory_format=torch.channels_last),
    "a gradient": lambda _, x: x.clone().requires_grad_(),
    "other strides": lambda _, x: double(x)[..., ::2],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_looked_up(other: Callable[[polyconv.Conv2d, Tensor], Tensor]) -> None:
    conv, x = left_to_torch()
    x = other(conv, x)
    assert AGAIN in entered(lambda: conv(x))
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias))


ATTRIBUTES = {"stride": (2, 2), "padding": (1, 1), "dilation": (2, 2), "padding_mode": "reflect", "tolerance": 0.5}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_another_attribute_is_seen(name: str) -> None:
    conv, x = left_to_torch()
    setattr(conv, name, ATTRIBUTES[name])
    assert AGAIN in entered(lambda: conv(x))
    if name in ("stride", "padding", "dilation"):
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation))


def _by_state(conv: polyconv.Conv2d, name: str, value: object) -> None:
    conv.__setstate__({**conv.__dict__, name: value})


def _by_property(conv: polyconv.Conv2d, name: str, value: object) -> None:
    setattr(type(conv), name, property(lambda _: value))


def _by_another_class(conv: polyconv.Conv2d, name: str, value: object) -> None:
    conv.__class__ = type("Another", (type(conv),), {name: property(lambda _: value)})


AROUND: dict[str, Callable[[polyconv.Conv2d, str, object], object]] = {
    "__dict__": lambda conv, name, value: conv.__dict__.update({name: value}),
    "object.__setattr__": object.__setattr__,
    "__setstate__": _by_state,
    "a property": _by_property,
    "another class": _by_another_class,
}
"""Writes that bypass ``torch.nn.Module.__setattr__``."""


class Own(polyconv.Conv2d):
    """A class to modify."""


@pytest.fixture
def own() -> Iterator[type[Own]]:
    """A class that is restored after the test."""
    before = dict(vars(Own))
    yield Own
    for name in set(vars(Own)) - set(before):
        delattr(Own, name)


@pytest.mark.parametrize("way", AROUND)
@pytest.mark.parametrize("name", [*ATTRIBUTES, "activation", "groups"])
def test_an_attribute_that_is_changed_behind_the_modules_back_is_seen(way: str, name: str, own: type[Own]) -> None:
    conv, x = left_to_torch(own)
    AROUND[way](conv, name, {"activation": "relu", "groups": 4, **ATTRIBUTES}[name])
    if name == "groups":
        conv.weight = nn.Parameter(conv.weight[:, :2].detach().clone())
    assert AGAIN in entered(lambda: conv(x))
    sizes = conv.stride, conv.padding, conv.dilation, conv.groups
    padded = F.pad(x, conv._reversed_padding_repeated_twice, conv.padding_mode) if name == "padding_mode" else x
    expected = F.conv2d(padded, conv.weight, conv.bias, *sizes)
    assert torch.equal(conv(x), expected.relu() if name == "activation" else expected)


def test_a_class_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = left_to_torch()
    monkeypatch.setattr(Convolution, "activation", "relu")
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias).relu())


@pytest.mark.parametrize("owner", [polyconv.Conv2d, Own, nn_module._Forward])
def test_a_method_of_a_class_is_seen(owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = left_to_torch(Own, bias=False)
    ours = owner._conv_forward  # type: ignore[attr-defined]

    def doubled(self: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        doubled_weight: Tensor = ours(self, x, 2 * weight, *rest)
        return doubled_weight

    monkeypatch.setattr(owner, "_conv_forward", doubled)
    for _ in range(3):
        assert torch.equal(conv(x), F.conv2d(x, 2 * conv.weight))
    monkeypatch.undo()
    for _ in range(3):
        assert torch.equal(conv(x), F.conv2d(x, conv.weight))


@pytest.mark.parametrize("takes", [never, native.takes], ids=["ATen", "own kernels"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("layer", [polyconv.Conv2d, polyconv.ConvTranspose2d])
@pytest.mark.parametrize("by_class", [False, True])
def test_what_hides_a_parameter_is_used(
    by_class: bool, layer: type[Any], name: str, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with polyconv's kernels."""
    monkeypatch.setattr(native, "takes", takes)
    conv, x = type("Hiding", (layer,), {})(8, 8, 3), torch.randn(SIZE)
    for _ in range(2):
        conv(x)
    hiding = torch.randn(conv._parameters[name].shape)
    if by_class:
        setattr(type(conv), name, property(lambda _: hiding))
    else:
        conv.__dict__[name] = hiding
    tensors = {**conv._parameters, name: hiding}
    torchs = F.conv2d if layer is polyconv.Conv2d else F.conv_transpose2d
    for _ in range(3):
        expected = torchs(x, tensors["weight"], tensors["bias"])
        torch.testing.assert_close(conv(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((polyconv.Conv2d, name) for name in ("stride", "padding", "dilation", "activation", "padding_mode")),
        *((polyconv.ConvTranspose2d, name) for name in ("stride", "padding", "dilation", "padding_mode")),
    ],
)
def test_what_another_thread_sets_during_the_first_call_is_seen(
    layer: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, x = layer(8, 8, 3), torch.randn(SIZE)
    remember, value = passthrough.remember, {"activation": "relu", **ATTRIBUTES}[name]

    def meanwhile(*arguments: Any) -> None:
        thread = Thread(target=setattr, args=(conv, name, value))
        thread.start()
        thread.join()
        remember(*arguments)

    monkeypatch.setattr(passthrough, "remember", meanwhile)
    conv(x)
    monkeypatch.setattr(passthrough, "remember", remember)
    fresh = copy.deepcopy(conv)
    if layer is polyconv.ConvTranspose2d and name == "padding_mode":
        with pytest.raises(ValueError, match="zeros"):
            conv(x)
    else:
        assert torch.equal(conv(x), fresh(x))
        assert torch.equal(conv(x), fresh(x))


def test_a_promise_during_the_first_call_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE)
    remember = passthrough.remember

    def meanwhile(*arguments: Any) -> None:
        polyconv.freeze(conv)
        remember(*arguments)

    monkeypatch.setattr(passthrough, "remember", meanwhile)
    conv(x)
    monkeypatch.setattr(passthrough, "remember", remember)
    assert AGAIN in entered(lambda: conv(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_may_be_swapped(frozen: bool, mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    conv, _ = left_to_torch(bias=False)
    x = torch.randn(SIZE)
    if frozen:
        polyconv.freeze(conv)
    with mode():
        conv(x)
        conv(x)
    torch.utils.swap_tensors(conv.weight, nn.Parameter(torch.randn_like(conv.weight)))
    with mode():
        assert torch.equal(conv(x), F.conv2d(x, conv.weight))


def test_an_unpickled_module_is_left_to_torch_at_once() -> None:
    """Its strings are other objects than the program's."""
    for kind in (polyconv.Conv2d, polyconv.ConvTranspose2d):
        conv, x = kind(8, 8, 3), torch.randn(SIZE)
        twin = pickle.loads(pickle.dumps(conv))
        twin(x)
        again = entered(lambda twin=twin, x=x: twin(x))  # type: ignore[misc]
        assert AGAIN not in again


def test_an_activation_is_seen() -> None:
    conv, x = left_to_torch()
    conv.activation = "relu"
    assert float(conv(x).min()) == 0.0


def test_another_state_of_settings_is_seen() -> None:
    conv, x = left_to_torch()
    with polyconv.tolerance(0.5):
        assert AGAIN in entered(lambda: conv(x))
    with torch.no_grad():
        assert AGAIN in entered(lambda: conv(x))
    polyconv.freeze(conv)
    with torch.no_grad():
        conv(x)
        polyconv.unfreeze(conv)
        assert AGAIN in entered(lambda: conv(x))


def test_another_weight_is_used() -> None:
    conv, x = left_to_torch()
    conv.weight = nn.Parameter(torch.zeros_like(conv.weight))
    assert conv.bias is not None
    assert torch.equal(conv(x), conv.bias[None, :, None, None].expand_as(conv(x)))


def test_a_copy_and_a_pickle_know_nothing_of_it() -> None:
    conv, x = left_to_torch()
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert AGAIN in entered(lambda twin=twin: twin(x))  # type: ignore[misc]
    assert set(vars(conv)) == set(vars(nn.Conv2d(8, 8, 3)))


def test_it_is_forgotten_with_the_module() -> None:
    conv, _ = left_to_torch()
    known = len(passthrough.cache)
    del conv
    gc.collect()
    assert len(passthrough.cache) == known - 1


def test_a_subclass_that_changes_the_weight_has_its_way() -> None:
    class Doubled(polyconv.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            return super()._conv_forward(input, 2 * weight, *rest)

    conv = Doubled(8, 8, 3, bias=False)
    x = torch.randn(SIZE)
    for _ in range(3):
        assert torch.equal(conv(x), F.conv2d(x, 2 * conv.weight))


def test_a_method_that_was_set_has_its_way() -> None:
    conv, x = left_to_torch(bias=False)
    ours = conv._conv_forward
    conv._conv_forward = lambda x, weight, *rest: ours(x, 2 * weight, *rest)  # type: ignore[method-assign]
    for _ in range(3):
        assert torch.equal(conv(x), F.conv2d(x, 2 * conv.weight))


def test_a_bias_that_was_taken_away_is_missed() -> None:
    conv, x = left_to_torch()
    conv._parameters["bias"] = None
    assert torch.equal(conv(x), F.conv2d(x, conv.weight))


def test_forward_mode_sees_it() -> None:
    conv, x = left_to_torch()
    found = torch.func.jvp(conv, (x,), (x,))[1]
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(conv(forward_ad.make_dual(x, x))).tangent
    assert torch.equal(found, F.conv2d(x, conv.weight))
    assert tangent is not None
    assert torch.equal(tangent, found)


def test_someone_who_looks_on_sees_it() -> None:
    conv, x = left_to_torch()
    with preferences.watched() as seen:
        conv(x)
    assert seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert AGAIN in entered(lambda: conv(x))


def test_other_values_than_tensors_are_complained_about_as_ever() -> None:
    conv, _ = left_to_torch()
    for wrong in (None, [1.0], "x"):
        with pytest.raises((TypeError, AttributeError, RuntimeError)) as first:
            conv(wrong)  # type: ignore[arg-type]
        fresh = copy.deepcopy(conv)
        with pytest.raises(first.type):
            fresh(wrong)  # type: ignore[arg-type]


def test_a_nested_tensor_is_none_of_its_business() -> None:
    conv, x = left_to_torch()
    nested = torch.nested.nested_tensor([x[0], x[1]])
    assert AGAIN in entered(lambda: _attempt(conv, nested))


def _attempt(conv: polyconv.Conv2d, x: Tensor) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        conv(x)


def test_a_weight_of_another_shape_is_looked_at() -> None:
    conv, x = left_to_torch()
    conv.weight.data = torch.randn(8, 8, 5, 5)
    assert AGAIN in entered(lambda: conv(x))


def test_a_weight_that_is_made_anew_is_used() -> None:
    conv, x = left_to_torch()
    nn.utils.parametrize.register_parametrization(conv, "bias", nn.Tanh())
    for _ in range(3):
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias))


def test_a_process_group_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    conv, x = left_to_torch()

    class Group:
        """The smallest stand-in for a process group."""

        def size(self) -> int:
            return 1

    group = Group()
    monkeypatch.setattr(c10d._world, "_default_pg", group, raising=False)
    assert AGAIN in entered(lambda: _attempt(conv, x))


def test_it_may_be_forgotten_while_it_is_made() -> None:
    conv, x = left_to_torch()

    class Forgetful(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            conv.stride = (1, 1)
            return super().__torch_function__(func, types, args, kwargs or {})

    for _ in range(3):
        assert torch.equal(conv(x.as_subclass(Forgetful)).as_subclass(Tensor), conv(x))
