"""If ATen is the plan of every pass, ATen's convolution is called directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv
from entered import entered
from polyconv import settings
from polyconv.autotune import preferences, tuning_file
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native, planner
from polyconv.cpu.engines import aten
from polyconv.dispatch import fastpath, prepare
from polyconv.model.explain import problems_of
from polyconv.problem import Pass, Problem, planned_length
from polyconv.runtime.guards import alike
from polyconv.tuning_key import problem_key

SIZE = (2, 8, 9, 11)


def forced(target: Callable[..., Any], *inputs: Any, only: tuple[Pass, ...] = tuple(Pass)) -> preferences.Forced:
    """ATen's kernel for these passes, another candidate for the others."""
    backend, found = backend_for(torch.device("cpu")), {}
    for problem in problems_of(target, *inputs):
        for kept in (False, True):
            names = candidate_names(backend, problem, inference=kept)
            wanted = [name for name in names if name.endswith(aten.NAME) == (problem.kind in only)]
            if wanted:
                found[problem_key(problem, kept_weights=kept)] = min(wanted, key=lambda name: " in float32" in name)
    return preferences.Forced(found)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "training": nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a bias": {"bias": False},
    "other numbers along each axis": {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    "depthwise": {"groups": 8},
    "same": {"padding": "same"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_is_torchs_own(mode: str, layer: str) -> None:
    options = {"kernel_size": 3, **LAYERS[layer]}
    theirs, ours = nn.Conv2d(8, 8, **options), polyconv.Conv2d(8, 8, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(SIZE, requires_grad=mode == "training")
    with forced(ours, x), MODES[mode]():
        ours(x)
        found = entered(lambda: ours(x))
        assert found[0] == "polyconv.nn.forward"
        in_python = {
            "polyconv.dispatch.passthrough.again",
            "polyconv.dispatch.passthrough.<genexpr>",
            "polyconv.runtime.state_version.current",
        }
        assert set(found[1:]) in (set(), in_python)  # none with native code
        y, z = theirs(x), ours(x)
        assert torch.equal(y, z)
        assert y.stride() == z.stride()
        if mode != "training":
            return
        assert type(z.grad_fn) is type(y.grad_fn)
        wanted = [[x, *module.parameters()] for module in (theirs, ours)]
        gradients = [torch.autograd.grad(out.square().sum(), each) for out, each in zip((y, z), wanted, strict=True)]
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, "none", "relu", "silu"])
@pytest.mark.parametrize("added", [False, True])
def test_an_epilogue_is_applied(mode: str, activation: str | None, added: bool) -> None:
    conv, x = polyconv.Conv2d(8, 8, 3, padding=1, activation=activation), torch.randn(SIZE)
    residual = torch.randn(SIZE, requires_grad=mode == "training") if added else None
    before = None if residual is None else residual.detach().clone()

    def torchs() -> Tensor:
        y = F.conv2d(x, conv.weight, conv.bias, padding=1) + (0 if residual is None else residual)
        return {"relu": F.relu, "silu": F.silu}.get(activation or "none", lambda z: z)(y)

    with forced(conv, x, residual) if added else forced(conv, x), MODES[mode]():
        for _ in range(2):
            y = conv(x, residual)
        torch.testing.assert_close(y, torchs())
        if mode == "training":
            wanted = [conv.weight, conv.bias, *([] if residual is None else [residual])]
            for mine, theirs in zip(
                torch.autograd.grad(y.square().sum(), wanted),
                torch.autograd.grad(torchs().square().sum(), wanted),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert residual is None or before is None or torch.equal(residual, before)


@pytest.mark.parametrize("ours", list(Pass), ids=str)
def test_one_pass_of_polyconvs_is_enough_to_stand_between(ours: Pass) -> None:
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE, requires_grad=True)
    others = tuple(kind for kind in Pass if kind is not ours)
    with forced(conv, x, only=others):
        kind = type(conv(x).grad_fn).__name__
        without_dx = type(conv(x.detach()).grad_fn).__name__
    assert kind == "_RecordedBackward"
    assert without_dx == ("ConvolutionBackward0" if ours is Pass.DGRAD else "_RecordedBackward")


@pytest.mark.parametrize("ours", list(Pass), ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_mixed_passes_are_those_of_the_operators(ours: Pass, layer: str) -> None:
    """A backward pass prepared at the first call gives the same bits at the next, and without preparation."""
    conv, x = polyconv.Conv2d(8, 8, **{"kernel_size": 3, **LAYERS[layer]}), torch.randn(SIZE, requires_grad=True)
    wanted = [x, *conv.parameters()]

    def gradients() -> tuple[Tensor, ...]:
        y = conv(x)
        return torch.autograd.grad(y, wanted, torch.linspace(-1, 1, y.numel()).view_as(y))

    with forced(conv, x, only=tuple(kind for kind in Pass if kind is not ours)):
        first, second = gradients(), gradients()
        with torch.overrides.BaseTorchFunctionMode():  # observed: the operators are called
            plain = gradients()
    for one, two, three in zip(first, second, plain, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_left_to_torch_are_one_call() -> None:
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE, requires_grad=True)
    with forced(conv, x, only=(Pass.DGRAD, Pass.WGRAD)):
        y = conv(x)
        torch.autograd.grad(y, [x, *conv.parameters()], torch.ones_like(y))
        call = y.grad_fn.call  # type: ignore[union-attr]
        (prepared,) = call.backwards.values()
    assert (prepared.dgrad, prepared.wgrad) == (None, None)
    assert prepared.aten_arguments[-1] == [True, True, True]


def test_tensors_that_were_kept_elsewhere_have_gradients_of_their_own() -> None:
    """Hooks for saved tensors may return other tensors, for example in another layout."""
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE, requires_grad=True)
    with forced(conv, x, only=(Pass.DGRAD,)):
        wanted = torch.autograd.grad(conv(x).sum(), [x, conv.weight])
        last = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: tensor.detach().clone(memory_format=torch.channels_last)
        )
        with last:
            moved = torch.autograd.grad(conv(x).sum(), [x, conv.weight])
    for one, two in zip(wanted, moved, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_to_torch_if_it_has_kernels(dtype: torch.dtype) -> None:
    conv, x = polyconv.Conv2d(8, 8, 3, dtype=dtype), torch.randn(SIZE, dtype=dtype)
    with forced(conv, x):
        conv(x)
        passes = "polyconv.dispatch.execute.compute_fprop" not in entered(lambda: conv(x))
        assert passes is aten._runs_in_onednn(str(dtype).removeprefix("torch."))
        torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, conv.bias))


def test_who_looks_on_is_told() -> None:
    conv, x, told = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE, requires_grad=True), []
    with forced(conv, x):
        conv(x)
        with prepare.observed(lambda ran: told.append(ran.problem.kind)):
            conv(x).square().sum().backward()
        conv(x).square().sum().backward()
    assert sorted(told) == sorted(Pass)


def test_what_is_decided_is_seen_pass_by_pass() -> None:
    conv, x = polyconv.Conv2d(8, 8, 3), torch.randn(SIZE, requires_grad=True)
    with forced(conv, x):
        conv(x)
        with preferences.watched() as seen:
            conv(x).square().sum().backward()
    assert {decision.problem.kind for decision in seen} == set(Pass)
    assert all(decision.choice.endswith(aten.NAME) for decision in seen)


# ---- tensor comparison


def test_tensors_that_look_alike() -> None:
    x, w = torch.randn(SIZE), torch.randn(8, 8, 3, 3, requires_grad=True)
    fits = alike(x, w)
    assert fits(torch.randn(SIZE), w)
    others = {
        "shape": (x[:1], w),
        "strides": (x.to(memory_format=torch.channels_last), w),
        "dtype": (x.double(), w),
        "device": (x.to("meta"), w),
        "type": (x, nn.Parameter(w.detach())),
        "requires_grad": (x, w.detach()),
        "negative bit": (torch.complex(x, x).conj().imag, w),
        "sparse": (x.to_sparse(), w),
        "twice": (x, x),
    }
    assert [name for name, tensors in others.items() if fits(*tensors)] == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fits(x, w)
    with torch.inference_mode():
        assert not fits(x, w)


def test_nested_tensors_do_not_end_the_process() -> None:
    """Comparing them would call user code: earlier guards tell them apart."""
    x, w, bias = torch.randn(SIZE), torch.randn(8, 8, 3, 3), torch.randn(8)
    nested = torch.nested.nested_tensor([bias])
    polyconv.conv2d(x, w, bias)
    polyconv.conv2d(x, w, residual=torch.randn(2, 8, 7, 9))
    for arguments in ((nested, w), (x, nested), (x, w, nested)):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            polyconv.conv2d(*arguments)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        polyconv.conv2d(x, w, residual=nested)


def test_the_same_tensor_twice() -> None:
    x = torch.randn(3, 3, 3, 3)
    for _ in range(2):
        torch.testing.assert_close(polyconv.conv2d(x, x), F.conv2d(x, x), rtol=1e-4, atol=1e-4)
    w = torch.randn(3, 3, 1, 1)
    for _ in range(2):
        torch.testing.assert_close(polyconv.conv2d(x, w, residual=x), F.conv2d(x, w) + x, rtol=1e-4, atol=1e-4)


def test_calls_of_the_same_shapes_do_not_pile_up() -> None:
    w = torch.randn(8, 8, 3, 3)
    for step in range(2, 40):
        x = torch.randn(2, 8, 9, 11 * step)[..., ::step]
        torch.testing.assert_close(polyconv.conv2d(x, w), F.conv2d(x, w), rtol=1e-4, atol=1e-3)
    rows = [call for call in prepare.known.values() if hasattr(call, "place")]
    assert max(call.place for call in rows) <= 8


# ---- signals of many lengths


def signal_layer(transposed: bool) -> nn.Module:
    if transposed:
        return polyconv.ConvTranspose1d(10, 1, 8, stride=2, padding=1, bias=False)
    return polyconv.Conv1d(25, 50, 3, padding=1)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the problems that are planned while a test runs. Only ATen takes those below 1000."""
    found: list[int] = []
    plan = preferences.plan

    def noted(backend: Any, problem: Any, **how: Any) -> Any:
        found.append(problem.in_size[-1])
        return plan(backend, problem, **how)

    def forget() -> None:
        for table in (planner._plan, planner._offered_here, planner._gain):
            table.cache_clear()
        prepare.known.clear()
        fastpath._signals.clear()

    monkeypatch.setattr(preferences, "plan", noted)
    monkeypatch.setattr(native, "takes", lambda problem: problem.in_size[-1] >= 1000)
    forget()
    yield found
    forget()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_lengths_with_one_choice_are_planned_once(mode: str, transposed: bool, planned: list[int]) -> None:
    torch.manual_seed(0)
    layer = signal_layer(transposed)
    op = F.conv_transpose1d if transposed else F.conv1d
    with MODES[mode]():
        for length in (*range(100, 140), 121, 122):
            x = torch.randn(2, layer.in_channels, length)
            y = layer(x)
            expected = op(x, layer.weight, layer.bias, layer.stride, layer.padding)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            if mode == "training":
                y.sum().backward()
    lengths = {2 * length + 4 if transposed else length for length in range(100, 140)}
    assert len(planned) < len(lengths)
    asked = set(planned)
    assert {planned_length(length, 2, 8) for length in lengths} <= {planned_length(length, 2, 8) for length in asked}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_length_that_is_not_planned_has_the_choice_of_its_plan(transposed: bool, planned: list[int]) -> None:
    layer = signal_layer(transposed)
    lengths = (*range(1, 70), *range(70, 3000, 61))

    def calls(*, alone: bool) -> Iterator[Any]:
        for length in lengths:
            if alone:
                fastpath._signals.clear()
                prepare.known.clear()
            layer(torch.randn(1, layer.in_channels, length))
            *_, last = prepare.known.values()
            yield last.aten_arguments

    with torch.inference_mode():
        together = list(calls(alone=False))
        assert len(planned) < len(lengths)
        assert together == list(calls(alone=True))


def test_other_tensors_and_preferences_are_planned(planned: list[int]) -> None:
    layer = signal_layer(False)
    with torch.inference_mode():
        layer(torch.randn(1, 25, 120))
        for other in (torch.randn(1, 121, 25).mT, torch.randn(2, 25, 121), torch.randn(1, 25, 121).double()):
            if other.dtype == torch.float64:
                layer.double()
            planned.clear()
            layer(other)
            assert planned, other.stride()
        layer.float()
        with preferences.Forced({}):
            for length in (120, 121, 122):
                planned.clear()
                layer(torch.randn(1, 25, length))
                assert planned
        with settings.use(tolerance=0.5):
            planned.clear()
            layer(torch.randn(1, 25, 121))
            assert planned


@pytest.mark.parametrize("taps", [3, 5])
def test_tuning_entries_of_other_layers_leave_lengths_shared(taps: int, planned: list[int], tmp_path: Path) -> None:
    """The default tuning file of a machine has entries of some other layer, sooner or later."""
    tuned = Problem.make("wgrad", (1, 25, 1, 500), (50, 25, 1, taps), padding=(0, 0, 1, 1))
    environment, path = backend_for(torch.device("cpu")).environment(), tmp_path / "tuning.json"
    entry = tuning_file.Entry("PyTorch's convolution, ATen", {"PyTorch's convolution, ATen": 1.0}, 1.0)
    tuning_file.update(path, tuning_file.Tuning.of(environment, {problem_key(tuned): entry}))
    layer = signal_layer(False)
    with settings.use(tuning_file=(path,)), torch.inference_mode():
        layer(torch.randn(1, 25, 120))
        planned.clear()
        layer(torch.randn(1, 25, 121))
        assert bool(planned) is (taps == layer.kernel_size[0])
