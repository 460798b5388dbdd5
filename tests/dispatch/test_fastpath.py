"""The fast path is taken for plain calls only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import polyconv
from entered import entered
from polyconv import settings
from polyconv.backend import backend_for, override
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.weight_cache import MOST_PLANS, TransformedWeights
from polyconv.dispatch import fastpath, operator_path
from polyconv.dispatch import prepare as dispatch_prepare
from polyconv.dispatch.op import CONV2D
from polyconv.dispatch.operator_path import call as by_operator
from recording import Recorder

native_only = pytest.mark.skipif(not native.is_available(), reason="PyTorch's kernels keep no weights")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Records for each convolution whether it took the fast path."""
    taken: list[bool] = []
    find, operator = fastpath._find, operator_path.call

    def found(*args: Any) -> fastpath.GuardedCall | None:
        call = find(*args)
        taken.extend([True] if call is not None else [])
        return call

    def declined(*args: Any) -> Tensor:
        taken.append(False)
        return operator(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fastpath, "_find", found)
        patch.setattr(operator_path, "call", declined)
        yield taken


def tensors(**options: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, 9, 11, **options), torch.randn(6, 4, 3, 3, **options)


PLAIN: dict[str, Callable[[], Any]] = {
    "grad mode": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("trained", [False, True])
def test_taken(mode: str, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    w.requires_grad_(trained)
    bias = torch.randn(6)
    with counted(monkeypatch) as taken, PLAIN[mode]():
        for _ in range(3):
            y = polyconv.conv2d(x, w, bias, padding=1, dilation=(1, 2))
    assert taken == [True, True, True]
    assert y.requires_grad == (trained and mode == "grad mode")
    torch.testing.assert_close(y, F.conv2d(x, w, bias, padding=1, dilation=(1, 2)), rtol=1e-4, atol=1e-3)


def test_gradients_are_the_operators_own(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [t.requires_grad_() for t in (*tensors(), torch.randn(6))]
    with counted(monkeypatch) as taken:
        short = polyconv.conv2d(*leaves, stride=2)
        grads = torch.autograd.grad(short.square().sum(), leaves)
        again = torch.autograd.grad(polyconv.conv2d(*leaves, stride=2).square().sum(), leaves, create_graph=True)
    assert taken == [True, True]
    long = by_operator(CONV2D, *leaves, (2, 0, 1, 1, "zeros"), None)
    assert torch.equal(short, long)
    for ours, others, recorded in zip(grads, torch.autograd.grad(long.square().sum(), leaves), again, strict=True):
        assert torch.equal(ours, others)
        assert torch.equal(ours, recorded.detach())
        assert recorded.requires_grad


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("activation", "added"), [("relu", False), ("relu", True), ("silu", True), (None, True)])
def test_taken_with_an_epilogue(
    mode: str, trained: bool, activation: str | None, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = tensors()
    w.requires_grad_(trained)
    residual = torch.randn(2, 6, 7, 9) if added else None
    with counted(monkeypatch) as taken, PLAIN[mode]():
        for _ in range(3):
            y = polyconv.conv2d(x, w, activation=activation, residual=residual)
        long = by_operator(CONV2D, x, w, None, (1, 0, 1, 1, "zeros"), None, activation, residual)
    assert len(taken) >= 3
    assert all(taken)
    assert y.requires_grad == (trained and mode == "grad mode")
    assert torch.equal(y, long)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (3,), (1, 3), (0, 2)])
def test_gradients_through_an_epilogue_are_the_operators_own(activation: str | None, wanted: tuple[int, ...]) -> None:
    x, w = tensors()
    given = [x, w, torch.randn(6), torch.randn(2, 6, 4, 5)]
    leaves = [given[place].requires_grad_() for place in wanted]

    for create_graph in (False, True):
        short = polyconv.conv2d(x, w, given[2], stride=2, activation=activation, residual=given[3])
        long = by_operator(CONV2D, x, w, given[2], (2, 0, 1, 1, "zeros"), None, activation, given[3])
        assert torch.equal(short, long)
        gradients = [torch.autograd.grad(y.square().sum(), leaves, create_graph=create_graph) for y in (short, long)]
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.requires_grad == create_graph


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def _dual(x: Tensor, w: Tensor) -> None:
    with forward_ad.dual_level():
        y = polyconv.conv2d(forward_ad.make_dual(x, torch.ones_like(x)), w)
        assert forward_ad.unpack_dual(y).tangent is not None


def _within(mode: Callable[[], Any]) -> Callable[[Tensor, Tensor], None]:
    def run(x: Tensor, w: Tensor) -> None:
        with mode():
            polyconv.conv2d(x, w)

    return run


DECLINED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dispatch mode": _within(_Seen),
    "a function mode": _within(_Functions),
    "autocast": _within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "a profiler": _within(profile),
    "fake mode": _within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "forward mode": _dual,
    "torch.func.grad": lambda x, w: torch.func.grad(lambda x: polyconv.conv2d(x, w).sum())(x),
    "a tracer": lambda x, w: torch.jit.trace(lambda x: polyconv.conv2d(x, w), x, check_trace=False),
    "a subclass": lambda x, w: polyconv.conv2d(x.as_subclass(_Subclass), w),
    "a meta tensor": lambda x, w: polyconv.conv2d(x.to("meta"), w.to("meta")),
    "negative bit": lambda x, w: polyconv.conv2d(torch.complex(x, x).conj().imag, w),
    "no batch": lambda x, w: polyconv.conv2d(x[0], w),
    "a list": lambda x, w: polyconv.conv2d(x, w, stride=[1, 1]),
    "four sides": lambda x, w: polyconv.conv2d(x, w, padding=(0, 1, 0, 1)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", DECLINED)
def test_declined(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = tensors()
    polyconv.conv2d(x, w)  # the same call in a plain state is cached
    with counted(monkeypatch) as taken:
        DECLINED[case](x, w)
        assert taken
        assert not any(taken)
        taken.clear()
        polyconv.conv2d(x, w)
    assert taken == [True]


def test_a_profiler_sees_the_operator() -> None:
    x, w = tensors()
    polyconv.conv2d(x, w)
    with profile() as profiler:
        polyconv.conv2d(x, w)
    assert any(event.name == "polyconv::conv2d_fprop" for event in profiler.events())


@pytest.mark.parametrize("stride", [1.0, True, (1.0, 1.0), (True, 1)])
def test_what_equals_an_integer_is_none(stride: Any) -> None:
    x, w = tensors()
    polyconv.conv2d(x, w, stride=1)
    polyconv.conv2d(x, w, stride=(1, 1))
    with pytest.raises(TypeError, match="integers"):
        polyconv.conv2d(x, w, stride=stride)


def test_follows_settings_and_backends() -> None:
    x, w = tensors()
    polyconv.conv2d(x, w)
    with override("cpu", Recorder()) as recorder:
        polyconv.conv2d(x, w)
        with polyconv.tolerance(0.125):
            polyconv.conv2d(x, w)
        polyconv.conv2d(x, w, tolerance=0.25)
    assert [problem.tolerance for problem in recorder.problems] == [1e-4, 0.125, 0.25]


def test_wrong_arguments_raise_in_a_known_state() -> None:
    x, w = tensors()
    polyconv.conv2d(x, w)
    with pytest.raises(RuntimeError, match="same type"):
        polyconv.conv2d(x, w.double())
    with pytest.raises(RuntimeError, match="4 channels"):
        polyconv.conv2d(x[:, :3], w)
    with pytest.raises(RuntimeError, match="bias"):
        polyconv.conv2d(x, w, torch.randn(5))


@native_only
def test_weights_are_kept_in_inference_and_not_in_training() -> None:
    with override("cpu", CpuBackend()) as backend:
        module = polyconv.Conv2d(16, 32, (5, 9), padding=(2, 4))
        x = torch.randn(1, 16, 64, 96)
        module(x).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # through the operator
            module(x).sum().backward()
        assert backend.weights.size == 0
        with torch.no_grad():
            module(x)
        assert backend.weights.size > 0
    assert backend_for(torch.device("cpu")) is not backend


@native_only
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
def test_kept_weights_follow_the_weight(weight_format: torch.memory_format) -> None:
    """In either layout, and after writes that no version counter shows."""
    weight = torch.randn(16, 32, 3, 3).to(memory_format=weight_format)
    with override("cpu", CpuBackend()) as backend, torch.no_grad():
        x = torch.randn(1, 32, 128, 160)
        before = polyconv.conv2d(x, weight)
        assert backend.weights.size > 0
        (kept,) = backend.weights._kept.values()
        assert torch.equal(polyconv.conv2d(x, weight), before)
        assert next(iter(backend.weights._kept.values())) is kept
        weight.data.mul_(2)
        torch.testing.assert_close(polyconv.conv2d(x, weight), 2 * before, rtol=1e-4, atol=1e-3)


@native_only
def test_a_model_too_large_to_be_kept_is_kept_in_part() -> None:
    model = torch.nn.Sequential(*(polyconv.Conv2d(16, 16, (5, 9), padding=(2, 4)) for _ in range(4)))
    x = torch.randn(1, 16, 64, 96)
    with override("cpu", CpuBackend()) as backend, torch.no_grad():
        model[0](x)
        backend.weights.limit = 2 * backend.weights.size
        model(x)
        model(x)
        assert {address for address, *_ in backend.weights._kept} == {layer.weight.data_ptr() for layer in model[:2]}
        assert backend.weights.size == backend.weights.limit
        del model[0]
        model(x)
        assert {address for address, *_ in backend.weights._kept} == {layer.weight.data_ptr() for layer in model[:2]}


@native_only
def test_each_plan_of_a_weight_is_kept() -> None:
    """A head that several levels of a pyramid share has images of several sizes, and plans, in each call."""
    cache, made = TransformedWeights(), []
    x, w, other = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(16, 16, 3, 3)

    def of(weight: Tensor, *plans: int) -> int:
        """Transforms that are made in two rounds of these plans."""
        made.clear()
        for plan in (*plans, *plans):
            cache.of(x, weight, x, [], [plan], transform=lambda: made.append(0) or torch.zeros(100))
        return len(made)

    assert of(w, 0, 1, 2) == 3
    assert cache.size == 1200
    w.add_(1.0)
    assert of(w, 1) == 1
    assert cache.size == 400  # those of the former weight are dropped
    assert of(w, *range(MOST_PLANS)) == MOST_PLANS - 1
    assert of(w, MOST_PLANS) == 1
    assert cache.size == MOST_PLANS * 400
    assert of(other, 0) == 1
    cache.limit = cache.size
    assert of(other, 1) == 1  # in place of plan 0
    assert of(other, 0, 1) == 4
    assert cache.size == cache.limit
    assert of(w, *range(2, MOST_PLANS)) == 0


def modules_entered(call: Callable[[], object]) -> set[str]:
    """Modules of polyconv whose functions a call enters."""
    return {name.rpartition(".")[0] for name in entered(call)}


@native_only
@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_warm_call_is_short(mode: str, activation: str | None) -> None:
    """Counterpart of the times in ``benchmarks/cpu/overhead.py``. Two of the modes include the weight cache."""
    module = polyconv.Conv2d(64, 64, 3, activation=activation)
    x, residual = torch.randn(1, 64, 34, 34), torch.randn(1, 64, 32, 32)
    with PLAIN[mode]():
        for given in ((x,), (x, residual)):
            module(*given)
            before = len(dispatch_prepare.known)
            found = modules_entered(lambda given=given: module(*given))  # type: ignore[misc]
            assert len(found) <= 8, sorted(found)
            assert "polyconv.dispatch.prepare" not in found  # where calls are prepared and cached
            assert len(dispatch_prepare.known) == before


def test_what_was_prepared_amid_a_change_is_not_remembered() -> None:
    """A plan of one state must not be found in another."""
    x, w = tensors()

    class Changing(Recorder):
        def prepare(self, plan: Any, *, trial: bool = False) -> Any:
            polyconv.set_tolerance(0.5)
            return super().prepare(plan, trial=trial)

    with override("cpu", Changing()), settings.use(tolerance=0.25):
        before = set(dispatch_prepare.known)
        polyconv.conv2d(x, w)
        assert set(dispatch_prepare.known) == before


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch_prepare.known.clear()
    monkeypatch.setattr(dispatch_prepare.known, "capacity", 4)
    w = torch.randn(2, 2, 1, 1)
    for size in range(1, 12):
        polyconv.conv2d(torch.randn(1, 2, size, size), w)
        assert len(dispatch_prepare.known) <= 4
