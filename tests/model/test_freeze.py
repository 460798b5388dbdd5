"""``polyconv.freeze``: its promise, its savings and its limits. Without it, no result is ever stale."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrizations, parametrize, weight_norm

import polyconv
from moved_weights import MOVES, offloaded_and_loaded_there
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.costs import CHECK_BYTES, CHECK_CYCLES, MOST_FOR_THE_CHECK
from polyconv.cpu.planner import plan_cpu
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem
from polyconv.runtime.frozen_weights import frozen_marks, is_frozen
from polyconv.tuning_key import problem_key

native_only = pytest.mark.skipif(not native.is_available(), reason="PyTorch's kernels keep no weights")

KEPT, ANEW = 128, 10
"""Image sizes at which a 3x3 kernel of 16 channels is cached and read at each call; or not cached unless frozen."""


def conv_and_input(size: int) -> tuple[polyconv.Conv2d, Tensor]:
    return polyconv.Conv2d(16, 16, 3, padding=1, bias=False), torch.randn(1, 16, size, size)


def is_right(conv: polyconv.Conv2d, x: Tensor) -> bool:
    exact = F.conv2d(x.double(), conv.weight.double(), padding=1)
    problem = Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape), padding=(1, 1, 1, 1))
    unit = scales(problem, {"x": x, "w": conv.weight.detach()})["y"]
    return largest((conv(x).double() - exact).abs(), unit) <= 1e-4


def is_kept(conv: polyconv.Conv2d) -> bool:
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    return conv.weight.data_ptr() in {address for address, *_ in backend.weights._kept}


def _step(conv: polyconv.Conv2d, kind: type[torch.optim.Optimizer], **options: object) -> None:
    with torch.enable_grad():
        optimizer = kind(conv.parameters(), lr=0.5, **options)  # type: ignore[call-arg]
        conv(torch.randn(1, 16, 8, 8)).square().sum().backward()
        optimizer.step()


def _through_storage(conv: polyconv.Conv2d) -> None:
    memory = conv.weight.untyped_storage()
    torch.empty(0).set_(memory, 0, conv.weight.shape, conv.weight.stride()).mul_(-2)


COUNTED: dict[str, Callable[[polyconv.Conv2d], object]] = {
    "load_state_dict": lambda c: c.load_state_dict({"weight": torch.randn(16, 16, 3, 3)}),
    "load_state_dict, assigned": lambda c: c.load_state_dict({"weight": torch.randn(16, 16, 3, 3)}, assign=True),
    "SGD": lambda c: _step(c, torch.optim.SGD),
    "SGD, foreach": lambda c: _step(c, torch.optim.SGD, foreach=True),
    "Adam": lambda c: _step(c, torch.optim.Adam),
    "in place": lambda c: c.weight.mul_(-2),
    "another parameter": lambda c: setattr(c, "weight", Parameter(torch.randn(16, 16, 3, 3))),
    "other memory": lambda c: setattr(c.weight, "data", torch.randn(16, 16, 3, 3)),
    "channels_last": lambda c: c.to(memory_format=torch.channels_last),
}
"""Changes visible in the version counter or the address."""

UNSEEN: dict[str, Callable[[polyconv.Conv2d], object]] = {
    ".data": lambda c: c.weight.data.mul_(-2),
    "a NumPy view": lambda c: np.negative(c.weight.detach().numpy(), out=c.weight.detach().numpy()),
    "its storage": _through_storage,
    "SGD, fused": lambda c: _step(c, torch.optim.SGD, fused=True),  # resets the counter, in torch 2.13
    "Adam, fused": lambda c: _step(c, torch.optim.Adam, fused=True),
    "DLPack": lambda c: torch.from_dlpack(c.weight.detach()).mul_(-2),
}


@pytest.mark.parametrize("size", [KEPT, ANEW])
@pytest.mark.parametrize("change", {**COUNTED, **UNSEEN}.values(), ids={**COUNTED, **UNSEEN})
def test_never_stale_outside_a_frozen_model(change: Callable[[polyconv.Conv2d], object], size: int) -> None:
    conv, x = conv_and_input(size)
    with torch.no_grad():
        for _ in range(2):
            assert is_right(conv, x)
        change(conv)
        for _ in range(2):
            assert is_right(conv, x)


@pytest.mark.parametrize("size", [KEPT, ANEW])
def test_never_stale_on_a_memory_map(size: int, tmp_path: Path) -> None:
    """Another program writes to the file."""
    numbers = np.random.default_rng(0).standard_normal((16, 16, 3, 3), dtype=np.float32)
    numbers.tofile(tmp_path / "w")
    conv, x = conv_and_input(size)
    conv.weight = Parameter(torch.from_file(str(tmp_path / "w"), shared=True, size=numbers.size).view(16, 16, 3, 3))
    other = np.memmap(tmp_path / "w", np.float32, "r+", shape=numbers.shape)
    with torch.no_grad():
        assert is_right(conv, x)
        other *= -3
        assert conv.weight[0, 0, 0, 0] == -3 * numbers[0, 0, 0, 0]
        assert is_right(conv, x)


@pytest.mark.parametrize("size", [KEPT, ANEW])
@pytest.mark.parametrize("change", COUNTED.values(), ids=COUNTED)
def test_a_frozen_model_follows_what_the_counter_tells(change: Callable[[polyconv.Conv2d], object], size: int) -> None:
    conv, x = conv_and_input(size)
    polyconv.freeze(conv)
    with torch.no_grad():
        for _ in range(2):
            assert is_right(conv, x)
        change(conv)
        for _ in range(2):
            assert is_right(conv, x)


@native_only
@pytest.mark.parametrize("size", [KEPT, ANEW])
def test_frozen_weights_are_kept_and_not_read(size: int) -> None:
    conv, x = conv_and_input(size)
    with torch.no_grad():
        conv(x)
        assert is_kept(conv) == (size == KEPT)
        assert int(polyconv.freeze(conv)) == 1
        before = conv(x)
        assert is_kept(conv)
        conv.weight.data.mul_(2)
        assert torch.equal(conv(x), before)  # the freeze was violated
        assert int(polyconv.unfreeze(conv)) == 1
        assert is_right(conv, x)


@pytest.mark.parametrize("size", [KEPT, ANEW])
def test_a_new_promise_is_about_the_weights_of_then(size: int) -> None:
    """Writes between two freezes violate neither."""
    conv, x = conv_and_input(size)
    polyconv.freeze(conv)
    with torch.no_grad():
        assert is_right(conv, x)
        polyconv.unfreeze(conv)
        conv.weight.data.mul_(-2)
        polyconv.freeze(conv)
        for _ in range(2):
            assert is_right(conv, x)


@pytest.mark.parametrize("size", [KEPT, ANEW])
@pytest.mark.parametrize("move", MOVES)
def test_other_memory_at_the_same_address_is_seen(move: Callable[[Tensor], None], size: int) -> None:
    """Even with the weight's old version: only the memory itself differs."""
    conv, x = conv_and_input(size)
    polyconv.freeze(conv)
    places, wrong = [], 0
    with torch.no_grad():
        assert is_right(conv, x)
        for _ in range(50):
            before = conv.weight.data_ptr(), conv.weight._version
            move(conv.weight)
            places.append((conv.weight.data_ptr(), conv.weight._version) == before)
            wrong += not is_right(conv, x)
    assert all(places[1:]) or move is not offloaded_and_loaded_there
    assert wrong == 0
    assert is_frozen(conv)


@pytest.mark.parametrize("size", [KEPT, ANEW])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autotuned", [False, True])
def test_tensors_may_be_swapped(size: int, frozen: bool, autotuned: bool) -> None:
    """As ``module.to()`` does with ``torch.__future__.set_swap_module_params_on_conversion``."""
    conv, x = conv_and_input(size)
    other = Parameter(torch.randn_like(conv.weight))
    if frozen:
        polyconv.freeze(conv)
    with torch.no_grad(), polyconv.benchmark(autotuned):
        for _ in range(3):
            assert is_right(conv, x)
            torch.utils.swap_tensors(conv.weight, other)
            assert is_right(conv, x)
            assert not is_frozen(conv)  # the freeze covers the tensor that was swapped away
            conv.weight.data.mul_(-2)
            assert is_right(conv, x)
            if frozen:
                polyconv.freeze(conv)


def test_a_promise_leaves_no_trace_in_copies_and_files(tmp_path: Path) -> None:
    conv, _ = conv_and_input(ANEW)
    conv.weight.mark = "kept"
    polyconv.freeze(conv)
    torch.save(conv, tmp_path / "frozen.pt")
    for twin in (copy.deepcopy(conv.weight), torch.load(tmp_path / "frozen.pt", weights_only=False).weight):
        assert type(twin.__dict__) is dict
    assert b"vouching" not in (tmp_path / "frozen.pt").read_bytes()
    assert conv.weight.mark == "kept"
    polyconv.unfreeze(conv)
    assert type(conv.weight.__dict__) is dict
    assert conv.weight.mark == "kept"


def test_a_weight_with_the_attributes_of_a_frozen_one_is_not_frozen() -> None:
    conv, _ = conv_and_input(ANEW)
    polyconv.freeze(conv)
    attributes = vars(conv.weight)
    key = id(conv.weight)
    del conv
    gc.collect()
    assert key in frozen_marks
    others = [polyconv.Conv2d(16, 16, 3) for _ in range(20)]
    assert not any(map(is_frozen, others))
    del attributes
    assert key not in frozen_marks


def test_a_gradient_is_computed_with_the_weights_that_are_there() -> None:
    conv, x = conv_and_input(ANEW)
    polyconv.freeze(conv)
    with torch.no_grad():
        conv(x)
    conv.weight.data.mul_(2)
    exact = F.conv2d(x.double(), conv.weight.double(), padding=1)
    torch.testing.assert_close(conv(x).double(), exact, rtol=0, atol=1e-4)


def test_the_promise_is_about_one_weight() -> None:
    conv, _ = conv_and_input(ANEW)
    polyconv.freeze(conv)
    assert is_frozen(conv)
    assert not is_frozen(copy.deepcopy(conv))
    assert not is_frozen(pickle.loads(pickle.dumps(conv)))
    conv.weight = Parameter(conv.weight.detach().clone())
    assert not is_frozen(conv)


def test_a_weight_that_is_gone_is_forgotten() -> None:
    conv, _ = conv_and_input(ANEW)
    polyconv.freeze(conv)
    key = id(conv.weight)
    assert key in frozen_marks
    del conv
    gc.collect()
    assert key not in frozen_marks


def test_what_is_done_is_said() -> None:
    model = nn.Sequential(polyconv.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), polyconv.Conv2d(4, 4, 3))
    weight_norm(model[2])
    frozen = polyconv.freeze(model)
    assert int(frozen) == 1
    assert str(frozen).splitlines() == [
        "froze the weights of 1 of 2 convolutions",
        "  left alone: 2: its weight is made anew before each call",
    ]
    assert repr(model[0]).endswith(", frozen)")
    assert "0 (Conv2d, frozen)" in str(polyconv.explain(model, (1, 3, 12, 12)))
    assert str(polyconv.unfreeze(model)).startswith("unfroze the weights of 1 of 2")
    assert "frozen" not in repr(model[0])


@pytest.mark.parametrize("parametrise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrised_weight_is_computed_once(parametrise: Callable[[nn.Module], nn.Module]) -> None:
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(1, 8, 12, 12)
    parametrise(conv).eval()
    with torch.no_grad():
        wanted = conv(x)
        assert int(polyconv.freeze(conv)) == 1
        assert torch.equal(conv(x), wanted)
        assert conv.weight is conv.weight
        assert torch.equal(copy.deepcopy(conv)(x), wanted)
        assert torch.equal(pickle.loads(pickle.dumps(conv.parametrizations))["weight"](), conv.weight)
        next(conv.parametrizations["weight"].parameters()).add_(1.0)
        changed = conv(x)
    assert not torch.equal(changed, wanted)
    conv(x).sum().backward()
    assert all(parameter.grad is not None for parameter in conv.parameters())
    polyconv.unfreeze(conv)
    with torch.no_grad():
        assert conv.weight is not conv.weight
        assert torch.equal(conv(x), changed)


def test_a_parametrised_weight_follows_other_memory() -> None:
    """Also where a new object has the ``id`` of the one that it replaces."""
    conv = parametrizations.weight_norm(polyconv.Conv1d(4, 4, 3)).eval()
    polyconv.freeze(conv)
    with torch.no_grad():
        for _ in range(100):
            before = conv.weight
            other = torch.randn(4, 4, 3)
            conv.parametrizations.weight.original1.data = other
            other.untyped_storage()
            del other
            assert not torch.equal(conv.weight, before)
        for same_memory in torch.randn(2, 4, 4, 3):
            before = conv.weight
            conv.parametrizations.weight.original1.data = same_memory
            assert not torch.equal(conv.weight, before)
        before = conv.weight
        parametrize.register_parametrization(conv, "weight", nn.Tanh())
        assert torch.equal(conv.weight, before.tanh())


@native_only
def test_explain_says_what_is_kept() -> None:
    conv = polyconv.Conv2d(16, 16, 3, padding=1)
    assert "without gradients, with transformed weights kept and the weight read" in str(
        polyconv.explain(conv, (1, 16, KEPT, KEPT))
    )
    small = str(polyconv.explain(conv, (1, 16, ANEW, ANEW)))
    assert "the weight read" not in small
    assert "frozen, without gradients, with transformed weights kept: " in small


@native_only
@pytest.mark.parametrize("channels", [3, 16, 64, 256, 1024])
@pytest.mark.parametrize("size", [1, 7, 14, 56, 224])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_weight_is_read_only_where_that_costs_little(channels: int, size: int, kernel: int) -> None:
    half = kernel // 2
    problem = Problem.make("fprop", (1, channels, size, size), (64, channels, kernel, kernel), padding=(half,) * 4)
    plan = plan_cpu(problem, inference=True)
    read = CHECK_CYCLES + 4 * 64 * channels * kernel**2 / CHECK_BYTES
    if plan.keeps_weights:
        assert read <= MOST_FOR_THE_CHECK * (plan.chosen.cycles - plan.chosen.weight_cycles)
    assert not plan_cpu(problem).keeps_weights


def test_a_choice_for_frozen_weights_is_one_of_its_own() -> None:
    problem = Problem.make("fprop", (1, 16, 32, 32), (16, 16, 3, 3))
    frozen = replace(problem, frozen=True)
    assert problem_key(problem, kept_weights=True) != problem_key(frozen, kept_weights=True)
    assert frozen.for_pass(Pass.DGRAD) == problem.for_pass(Pass.DGRAD)
