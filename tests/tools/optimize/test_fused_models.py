"""Models after optimize: unchanged results in either mode, for hooks and readers, too; and unchanged kernels."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv
from polyconv.cpu import native
from polyconv.measure.timing import Timing, Within
from told_times import FASTER, MODEL, Times, everything_faster

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

X = torch.randn(2, 3, 12, 14)


class Net(nn.Module):
    """A convolution, code that touches its output, an activation, and another convolution."""

    def __init__(self, way: Callable[[Net, Tensor], Any], kind: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.tail = nn.Conv2d(3, 8, 3, padding=1), kind(), nn.Conv2d(8, 4, 3)
        self.way = way
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.way(self, y)
        result: Tensor = self.tail(self.act(y))
        return result


def optimized(model: nn.Module, **options: Any) -> polyconv.OptimizationReport:
    return polyconv.optimize(model, X, timer=everything_faster("conv", "tail"), quiet=True, **options)[1]


def gradients(model: nn.Module) -> list[Tensor]:
    y = model(X)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def assert_as_before(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-3, atol=1e-3)


def in_a_thread(net: Net, y: Tensor) -> None:
    thread = threading.Thread(target=lambda: net.log.append(y.tolist()))
    thread.start()
    thread.join()


def hooked(net: Net, y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(net.log.append)


def hooked_before_the_node(net: Net, y: Tensor) -> None:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: net.log.append(gradients[0]))


READERS: dict[str, Callable[[Net, Tensor], Any]] = {
    "tolist": lambda net, y: net.log.append(y.tolist()),
    "copy": lambda net, y: net.log.append(copy.copy(y.detach()).detach()),
    "a parameter": lambda net, y: net.log.append(nn.Parameter(y.detach()).detach()),
    "as_subclass": lambda net, y: net.log.append(y.as_subclass(Tensor).detach()),
    "pickle": lambda net, y: net.log.append(pickle.loads(pickle.dumps(y.detach()))),
    "set_": lambda net, y: net.log.append(torch.empty(0).set_(y.detach())),
    "another thread": in_a_thread,
    "a hook of the tensor": hooked,
    "a hook of its node": hooked_before_the_node,
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_see_what_they_saw(reader: str, training: bool) -> None:
    model = Net(READERS[reader]).train(training)
    expected = gradients(model)
    seen = model.log[:]
    report = optimized(model)
    assert report.swapped == ("conv", "tail")
    assert report.not_fused["conv"]
    model.log.clear()
    assert_as_before(gradients(model), expected)
    assert_as_before(model.log, seen)


# ---- the other mode


def read_in(training: bool) -> Callable[[Net, Tensor], None]:
    def way(net: Net, y: Tensor) -> None:
        if net.training is training:
            hooked(net, y)
            net.log.append(y.tolist())

    return way


def is_fused(model: Net) -> bool:
    assert (type(model.act) is nn.Identity) == (model.conv.activation is not None)
    return type(model.act) is nn.Identity


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
def test_a_fusion_holds_in_the_mode_in_which_it_was_proved(kind: type[nn.Module], training: bool) -> None:
    model = Net(read_in(not training), kind).train(training)
    plain = copy.deepcopy(model)
    report = optimized(model)
    assert is_fused(model)
    assert_as_before(gradients(model), gradients(plain))
    for net in (model, plain):
        net.train(not training)
    assert not is_fused(model)
    assert_as_before(gradients(model), gradients(plain))
    assert len(model.log) == 2
    assert_as_before(model.log, plain.log)
    model.train(training)
    assert is_fused(model)
    model.train(not training)
    report.undo()
    assert type(model.act) is kind
    assert type(model.conv) is nn.Conv2d
    assert not {"fusion", "activation"} & model.conv.__dict__.keys()
    model.train(training)
    assert type(model.act) is kind


def test_a_part_in_the_other_mode() -> None:
    model = Net(lambda net, y: None).eval()
    y = model(X)
    optimized(model)
    model.conv.train()
    assert not is_fused(model)
    torch.testing.assert_close(model(X), y, rtol=1e-3, atol=1e-3)
    model.conv.eval()
    model.act.train()
    assert is_fused(model)
    torch.testing.assert_close(model(X), y, rtol=1e-3, atol=1e-3)


def nothing(net: Net, y: Tensor) -> None:
    """Reads nothing, and can be pickled."""


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_fusions_of_their_own(again: Callable[[Net], Net]) -> None:
    model = Net(nothing).eval()
    y = model(X)
    optimized(model)
    other = again(model)
    assert is_fused(other)
    other.train()
    assert not is_fused(other)
    assert is_fused(model)
    for net in (model, other):
        torch.testing.assert_close(net(X), y, rtol=1e-3, atol=1e-3)


def test_steps_of_training_after_optimize_in_evaluation() -> None:
    model = Net(lambda net, y: None, nn.ReLU).eval()
    plain = copy.deepcopy(model)
    optimized(model)
    for net in (model, plain):
        net.train()
        steps = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(3):
            steps.zero_grad()
            net(X).square().mean().backward()
            steps.step()
        net.eval()
    assert is_fused(model)
    assert_as_before(gradients(model), gradients(plain))


# ---- the whole model's results


class Different(Net):
    """Its result changes slightly, in outputs or gradients, if its convolution has another class."""

    def __init__(self, what: str) -> None:
        super().__init__(lambda net, y: None)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if isinstance(self.conv, polyconv.Conv2d):
            return y * 1.01 if self.what == "output" else y.detach() * 0.01 + y * 0.99
        return y


@pytest.mark.parametrize(("what", "training"), [("output", False), ("output", True), ("gradient", True)])
def test_a_model_that_computes_something_else_comes_back_as_it_was(what: str, training: bool) -> None:
    model = Different(what).train(training)
    expected = gradients(model)
    report = optimized(model)
    assert report.swapped == ()
    assert what in report.verdict
    assert "was predicted, so all of them were undone" in report.verdict
    assert all("differs by" in row.why for row in report.rows)
    assert report.choices == {}
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_random_numbers_and_statistics_are_no_difference(training: bool) -> None:
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.SiLU()]
    model = nn.Sequential(*body, nn.Conv2d(8, 4, 1)).train(training)
    statistics = copy.deepcopy(model[1].state_dict())
    timer = everything_faster("0", "4", "6")
    report = polyconv.optimize(model, X, timer=timer, quiet=True)[1]
    assert report.swapped == ("0", "4", "6"), report.verdict
    assert type(model[5]) is nn.Identity
    assert all(torch.equal(statistics[name], tensor) for name, tensor in model[1].state_dict().items())


# ---- the same kernel


class AtenFirst(Times):
    """ATen's convolution is the fastest plan of these passes; the modules' times are given."""

    def __call__(self, what: str, calls: Mapping[str, Callable[[], object]], within: Within) -> Mapping[str, Timing]:
        timings = dict(super().__call__(what, calls, within))
        if what.split()[0] in ("fprop", "dgrad", "wgrad"):
            timings.update({name: Timing(0.1, 0.1) for name in timings if name.endswith("ATen")})
        return timings


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("ours", [0.15, 1.07, 3.0])
def test_the_same_kernel_is_no_gain_and_no_loss(ours: float, training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).train(training)
    told = {"PyTorch": 0.5, "polyconv": ours, "polyconv, fused": ours}
    report = polyconv.optimize(model, X, timer=AtenFirst({"0": told, "2": told, MODEL: FASTER}), quiet=True)[1]
    assert report.swapped == ()
    assert report.verdict == "no convolution is faster in polyconv"
    for row in report.rows:
        assert "ATen" in row.plan
        assert row.same_kernel
        assert row.before == row.after == row.ours == 0.5
        assert row.why == "same kernel: PyTorch's own is the fastest plan"
    lines = [line for line in str(report).splitlines() if "3×3" in line]
    assert len(lines) == 2
    for line in lines:
        assert "same kernel" in line
        assert line.count("500") == 1
        assert f"{0.5 / ours:.2f}x" not in line
    assert [row["same_kernel"] for row in report.as_json()["rows"]] == [True, True]


def test_the_same_kernel_in_a_group_counts_as_equal() -> None:
    """An activation shared by two convolutions is fused for both or for none; only one of them gains."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.tail, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.act(self.tail(self.act(self.conv(x))))
            return result + 1

    class AtenForTheFirst(AtenFirst):
        def __call__(self, what: str, *rest: Any) -> Mapping[str, Timing]:
            return Times.__call__(self, what, *rest) if "x8x" in what else super().__call__(what, *rest)

    model = Shared().eval()
    y = model(X)
    told = {"conv": {"polyconv": 9.0, "polyconv, fused": 9.0}, "tail": FASTER, MODEL: FASTER}
    report = polyconv.optimize(model, X, timer=AtenForTheFirst(told), quiet=True)[1]
    assert report.swapped == ("conv", "tail")
    assert type(model.act) is nn.Identity
    same, ours = report.rows
    assert (same.same_kernel, same.before, same.after) == (True, 1.0, 1.0)
    assert (ours.same_kernel, ours.before, ours.after) == (False, 1.0, 0.4)
    torch.testing.assert_close(model(X), y, rtol=1e-3, atol=1e-3)
