"""Batch normalisations folded into convolutions: what is folded, what is not, and models that change afterwards."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import polyconv
from polyconv.cpu import native
from polyconv.tools.optimize import fusion_trace
from polyconv.tools.optimize.swapping import Folded, folded
from told_times import FASTER, MODEL, Times, everything_faster

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

X = torch.randn(2, 3, 12, 14, generator=torch.Generator().manual_seed(0))


def settled(model: nn.Module) -> Any:
    """The model in evaluation, with statistics and parameters of normalisations as if it had been trained."""
    draw = torch.Generator().manual_seed(1)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            for tensor in (norm.running_mean, norm.weight, norm.bias):
                if tensor is not None:
                    tensor.data.normal_(generator=draw)
            if norm.running_var is not None:
                norm.running_var.uniform_(0.2, 3.0, generator=draw)
    return model.eval()


class Net(nn.Module):
    """Two convolutions, a normalisation each, and one activation, combined by a function."""

    def __init__(self, body: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1)
        self.one, self.two, self.relu = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.ReLU()
        self.body = body
        settled(self)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(net: Net, x: Tensor) -> Any:
    """Two layers, the first with an activation; can be pickled."""
    return net.two(net.b(net.relu(net.one(net.a(x)))))


def optimize(model: nn.Module, x: Tensor = X, **options: Any) -> polyconv.OptimizationReport:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd)]
    return polyconv.optimize(model, x, timer=everything_faster(*names), quiet=True, **options)[1]


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.detach().abs().max()))


def assert_same(model: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    """Without gradients, twice, so that cached weights are used; and with gradients."""
    for mode in (torch.inference_mode, torch.no_grad, torch.no_grad, torch.enable_grad):
        with mode():
            y, expected = model(x), other(x)
            assert_near(y, expected)
    if next(model.parameters()).requires_grad:
        probe = torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) * y.detach().sign()
        found, wanted = (
            torch.autograd.grad((result * probe).sum(), list(net.parameters()), allow_unused=True)
            for result, net in ((y, model), (expected, other))
        )
        assert [one is None for one in found] == [two is None for two in wanted]
        # Together, since those before a normalisation by batch statistics may be zero but for rounding.
        assert_near(*(torch.cat([each.flatten() for each in all_ if each is not None]) for all_ in (found, wanted)))


def is_folded(model: Net) -> bool:
    states = {type(model.one) is Folded, type(model.relu) is nn.Identity, model.a.activation == "relu"}
    assert len(states) == 1
    return states.pop()


# ---- what is folded


def test_a_normalisation_and_the_activation_after_it() -> None:
    model = Net(plain)
    original = copy.deepcopy(model)
    report = optimize(model)
    assert [row.why for row in report.rows] == [
        "faster, with BatchNorm2d one and relu inside",
        "faster, with BatchNorm2d two inside",
    ]
    assert [row.after for row in report.rows] == [0.4, 0.5]
    assert is_folded(model)
    assert type(model.two) is Folded
    assert report.not_fused == {"b": "its output is returned by the model"}
    assert all("BatchNorm2d" in line for line in str(report).splitlines() if "swapped: " in line)
    assert_same(model, original)


def test_a_residual_after_a_normalisation() -> None:
    for body in (lambda n, x: n.relu(n.one(n.a(x)) + x), lambda n, x: n.relu(n.one(n.a(x)).add_(x))):
        model = Net(body)
        original = copy.deepcopy(model)
        report = optimize(model)
        assert "aten::add" in report.not_fused["a"]
        assert report.rows[0].why == "faster, with BatchNorm2d one inside"
        assert [type(model.one), type(model.relu)] == [Folded, nn.ReLU]
        assert_same(model, original)


CONVOLUTIONS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "1-D": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 20)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (2, 4, 9, 8)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), (2, 4, 9, 8)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6), (2, 4, 9, 8)),
    "3-D": (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (1, 2, 5, 6, 7)),
    "transposed, 1-D": (nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 20)),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6), (2, 4, 9, 8)),
    "transposed, 3-D": (nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d(3), (1, 2, 5, 6, 7)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_all_kinds_of_convolutions(kind: str, channels_last: bool) -> None:
    *layers, shape = CONVOLUTIONS[kind]
    model, x = settled(nn.Sequential(*copy.deepcopy(layers))), torch.randn(shape)
    if channels_last and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    original = copy.deepcopy(model)
    report = optimize(model, x)
    assert type(model[1]) is Folded, report
    assert report.rows[0].error < 1e-4
    assert_same(model, original, x)
    report.undo()
    assert [type(module) for module in model] == [type(module) for module in layers]


def test_the_error_against_float64() -> None:
    """The folded model is as exact as the original: weights are rounded twice, biases once."""
    model = Net(plain)
    model.one.running_mean.mul_(30.0)
    exact = copy.deepcopy(model).double()(X.double())
    original = copy.deepcopy(model)
    report = optimize(model)
    errors = [float((net(X).double() - exact).detach().abs().max()) for net in (model, original)]
    assert errors[0] < 1e-5 + 8 * errors[1]
    assert all(0 < row.error < 1e-4 for row in report.rows)
    weight, bias = folded(model.b, model.two)
    wanted = folded(original.b.double(), original.two.double())
    torch.testing.assert_close(weight.double(), wanted[0], rtol=2.0**-22, atol=0.0)
    assert torch.equal(bias, wanted[1].float())


def test_nothing_is_folded_unless_the_whole_model_gains() -> None:
    model = Net(plain)
    y, state = model(X), {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    report = polyconv.optimize(model, X, timer=Times({"a": FASTER, "b": FASTER}), quiet=True)[1]
    assert report.swapped == ()
    assert [type(module) for module in (model.one, model.two)] == [nn.BatchNorm2d] * 2
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == state
    assert torch.equal(model(X), y)


def test_folding_gains_where_both_kernels_are_the_same() -> None:
    """PyTorch's convolution with folded weights is another call, and timed."""
    model = settled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))

    class AtenFirst(Times):
        def __call__(self, what: str, *rest: Any) -> Any:
            timings = dict(super().__call__(what, *rest))
            fastest = {name: type(timing)(0.1, 0.1) for name, timing in timings.items() if name.endswith("ATen")}
            return timings | fastest

    original = copy.deepcopy(model)
    report = polyconv.optimize(model, X, timer=AtenFirst({"0": FASTER, MODEL: FASTER}), quiet=True)[1]
    assert "ATen" in report.rows[0].plan
    assert not report.rows[0].same_kernel
    assert report.rows[0].why == "faster, with BatchNorm2d 1 inside"
    assert_same(model, original)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(X)  # no passthrough of the unfolded weights may be remembered
            original.train()(X)
        assert_near(model.eval()(X), original.eval()(X))
    assert_same(model, original)


def test_fusing_can_be_declined() -> None:
    model = Net(plain)
    report = optimize(model, fuse=False)
    assert [row.why for row in report.rows] == ["faster", "faster"]
    assert type(model.one) is nn.BatchNorm2d


# ---- what is not


def shares(net: Net) -> None:
    net.two.running_mean = net.one.running_mean


class Own(nn.BatchNorm2d):
    """A subclass."""


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def replaced(**modules: Callable[[], nn.Module]) -> Callable[[Net], None]:
    return lambda net: [setattr(net, name, settled(make())) for name, make in modules.items()] and None


BODIES: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "convolution called twice": (lambda n, x: n.one(n.a(n.one(n.a(x)))), "it is called more than once"),
    "two normalisations": (lambda n, x: n.two(n.a(n.one(n.a(x)))), "not only BatchNorm2d"),
    "normalisation after two": (lambda n, x: n.one(n.b(n.one(n.a(x)))), "one is also called on something else"),
    "normalisation of the input": (lambda n, x: n.one(n.a(n.one(x))), "one is also called on something else"),
    "second reader": (lambda n, x: (y := n.a(x), n.one(y) + y)[1], "its output is read by aten::add"),
    "returned": (lambda n, x: (y := n.a(x), [n.one(y), y])[1], "returned by the model"),
    "without a module": (lambda n, x: n.one.forward(n.a(x)), "its output is read by"),
    "by name": (lambda n, x: n.one(input=n.a(x)), "its output is read by"),
    "an activation first": (lambda n, x: n.one(n.relu(n.a(x))), ""),
}

CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "hook of the convolution": (lambda n: n.a.register_forward_hook(lambda *_: None), "it has hooks"),
    "hook of the normalisation": (lambda n: n.one.register_forward_hook(lambda *_: None), "a hook of one"),
    "forward of its own": (lambda n: setattr(n.one, "forward", n.one.forward), "a hook of one sees"),
    "training": (lambda n: n.one.train(), "BatchNorm2d one, which follows it, is in training mode"),
    "batch statistics": (replaced(one=lambda: nn.BatchNorm2d(3, track_running_stats=False)), "no running statistics"),
    "subclass": (replaced(one=lambda: Own(3)), "Own one, which follows it, is of a class of its own"),
    "another norm": (replaced(one=lambda: nn.InstanceNorm2d(3)), "its output is read by"),
    "parametrised": (lambda n: parametrize.register_parametrization(n.one, "weight", Same()), "or parametrised"),
    "parametrised convolution": (
        lambda n: parametrize.register_parametrization(n.a, "weight", Same()),
        "is parametrised",
    ),
    "shared parameter": (lambda n: setattr(n.b, "weight", n.a.weight), "shares a parameter or buffer"),
    "shared buffer": (shares, "it or BatchNorm2d one shares a parameter or buffer"),
}


def assert_not_folded(model: Net, why: str) -> None:
    kind, y = type(model.one), tree_leaves(model(X))
    report = optimize(model)
    assert type(model.one) is kind
    assert why in (report.not_fused | report.left_alone).get("a", "")  # type: ignore[operator]
    for one, two in zip(tree_leaves(model(X)), y, strict=True):
        assert_near(one, two)


@pytest.mark.parametrize("body", BODIES)
def test_pairs_that_are_none(body: str) -> None:
    assert_not_folded(Net(BODIES[body][0]), BODIES[body][1])


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_cannot_be_folded(change: str) -> None:
    model = Net(plain)
    CHANGES[change][0](model)
    assert_not_folded(model, CHANGES[change][1])


def test_another_dtype_or_device() -> None:
    """PyTorch's own kernels take some of these pairs."""
    conv = nn.Conv2d(3, 3, 3)
    for norm in (nn.BatchNorm2d(3).double().eval(), nn.BatchNorm2d(3, device="meta").eval()):
        assert fusion_trace._why_not_norm(conv, norm, "1") == "1, which follows it, has another dtype or device"


def test_an_output_without_a_batch_is_normalised_along_another_axis() -> None:
    model = settled(nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)))
    x = torch.randn(3, 8)
    y = model(x)
    report = optimize(model, x)
    assert report.not_fused["0"] == "BatchNorm1d 1 normalises an output without a batch"
    assert type(model[1]) is nn.BatchNorm1d
    assert_near(model(x), y)


def test_nothing_is_folded_in_training() -> None:
    model = Net(plain).train()
    model.one.eval()
    report = optimize(model)
    assert type(model.one) is nn.BatchNorm2d
    assert "its output is read by" in report.not_fused["a"]


# ---- undoing


def test_undo_is_exact() -> None:
    model = Net(plain)
    y, state = model(X), model.state_dict(keep_vars=True)
    before = [(type(module), sorted(module.__dict__), module.training) for module in model.modules()]
    values = copy.deepcopy(model.state_dict())
    metadata = copy.deepcopy(state._metadata)
    report = optimize(model)
    for now in (model.state_dict(keep_vars=True), (report.undo(), model.state_dict(keep_vars=True))[1]):
        assert list(now) == list(state)
        assert now._metadata == metadata
        assert all(now[name] is tensor for name, tensor in state.items())
        assert all(torch.equal(now[name], tensor) for name, tensor in values.items())
    report.undo()
    assert [(type(module), sorted(module.__dict__), module.training) for module in model.modules()] == before
    assert torch.equal(model(X), y)


def test_restore_does_not_take_half_of_it_back() -> None:
    model = Net(plain)
    report = optimize(model)
    assert "batch normalisation" in polyconv.restore(model).left_alone["b"]
    report.undo()


# ---- models that change afterwards


@pytest.fixture
def pair() -> Iterator[tuple[Net, Net]]:
    """An optimised model, whose folded weights are cached, and the original."""
    model = Net(plain)
    original = copy.deepcopy(model)
    optimize(model)
    assert_same(model, original)
    assert model.a.fold._kept is not None
    yield model, original
    assert_same(model, original)


def other_state() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: torch.rand_like(tensor.float()).to(tensor.dtype) for name, tensor in Net(plain).state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_is_in_force(pair: tuple[Net, Net], assign: bool) -> None:
    for net in pair:
        net.load_state_dict(other_state(), assign=assign)
    assert_same(*pair)
    for net in pair:
        net.load_state_dict({name: tensor * 2 for name, tensor in net.state_dict().items()})


WRITES: dict[str, Callable[[Net], object]] = {
    "weight": lambda n: n.a.weight.mul_(2),
    "bias": lambda n: n.b.bias.add_(1),
    "norm's weight": lambda n: n.one.weight.mul_(-1),
    "norm's bias": lambda n: n.one.bias.add_(1),
    "mean": lambda n: n.two.running_mean.add_(1),
    "variance": lambda n: n.two.running_var.mul_(4),
    "another mean": lambda n: setattr(n.one, "running_mean", n.one.running_mean + 1),
    "another parameter": lambda n: setattr(n.one, "weight", nn.Parameter(n.one.weight * 2)),
    "other memory": lambda n: setattr(n.one.weight, "data", n.one.weight.data * 2),
    "other strides": lambda n: setattr(n.a.weight, "data", n.a.weight.data.transpose(2, 3)),
    "eps": lambda n: setattr(n.two, "eps", 1.0),
    "no bias": lambda n: setattr(n.b, "bias", None),
    "no statistics": lambda n: setattr(n.two, "running_mean", None) or setattr(n.two, "running_var", None),
    "unfrozen": lambda n: (polyconv.unfreeze(n), n.one.weight.data.mul_(3)),
    "there and back": lambda n: n.double().float(),
    "inference tensors": lambda n: n.requires_grad_(False) and setattr(n.one, "running_mean", inference(n)),
}


def inference(net: Net) -> Tensor:
    with torch.inference_mode():
        return net.one.running_mean + 1  # type: ignore[operator]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_in_force(pair: tuple[Net, Net], write: str) -> None:
    with torch.no_grad():
        for net in pair:
            WRITES[write](net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_writes_after_a_trace(pair: tuple[Net, Net]) -> None:
    """TorchScript sees the parameters, not the cached weights."""
    model, original = pair
    with torch.no_grad():
        traced = torch.jit.trace(model, X)
        for net in pair:
            net.one.bias.add_(1)
        assert_near(traced(X), original(X))


def test_old_memory_is_not_reused_before_the_next_call(pair: tuple[Net, Net]) -> None:
    """New memory at its address could not be told from it."""
    model, _ = pair
    storage = weakref.ref(model.one.weight.untyped_storage())
    model.one.weight.data = model.one.weight.data.clone()
    assert storage() is not None
    with torch.no_grad():
        model(X)
    assert storage() is None


def test_weights_folded_in_inference_mode_serve_autograd(pair: tuple[Net, Net]) -> None:
    x = X.clone().requires_grad_()
    for net in pair:
        net.requires_grad_(False)
        net.one.running_mean.add_(1)
        with torch.inference_mode():
            net(X)
    assert_near(*(torch.autograd.grad(net(x).square().sum(), x)[0] for net in pair))


def test_training_suspends_and_evaluation_resumes(pair: tuple[Net, Net]) -> None:
    """The statistics of a normalisation change in training without a change of their version counters."""
    for _ in range(2):
        for net in pair:
            net.train()
            steps = torch.optim.SGD(net.parameters(), lr=1e-2)
            for _ in range(2):
                steps.zero_grad()
                net(X).square().mean().backward()
                steps.step()
        model, original = pair
        assert not is_folded(model)
        assert type(model.one) is nn.BatchNorm2d
        for one, two in zip(model.buffers(), original.buffers(), strict=True):
            assert_near(one, two)
        for net in pair:
            net.eval()
        assert is_folded(model)
        assert_same(*pair)


def test_a_normalisation_alone_in_training(pair: tuple[Net, Net]) -> None:
    model, _ = pair
    for training in (True, False):
        for net in pair:
            net.one.train(training)
        for _ in range(2):
            with torch.no_grad():
                assert_near(*(net(X) for net in pair))
        assert is_folded(model) is not training
    for net in pair:
        net.a.train()
    assert not is_folded(model)
    assert_same(*pair)
    for net in pair:
        net.a.eval()
    assert is_folded(model)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_folds_of_their_own(pair: tuple[Net, Net], again: Callable[[Net], Net]) -> None:
    model, original = pair
    other = again(model)
    assert is_folded(other)
    assert other.a.fold._kept is None
    with torch.no_grad():
        other.one.weight.mul_(2)
    twice = copy.deepcopy(original)
    twice.one.weight.data.mul_(2)
    assert_same(other, twice)
    polyconv.freeze(other)
    assert_same(other, twice)
    assert other.a.fold._kept is not None
    other.train()
    assert is_folded(model)


def test_replicas(pair: tuple[Net, Net]) -> None:
    """As of ``nn.DataParallel``: a shallow copy with other tensors as attributes."""
    model, original = pair
    replica = model.b._replicate_for_data_parallel()
    replica.weight, replica.bias = model.b.weight * 2, model.b.bias * 2
    with torch.no_grad():
        for parameter in original.b.parameters():
            parameter.mul_(2)
        assert_near(replica(X), original.two(original.b(X)))
        for parameter in original.b.parameters():
            parameter.div_(2)


def test_parameters_of_a_call(pair: tuple[Net, Net]) -> None:
    """``torch.func``: other parameters for one call, and gradients of them."""
    given = {name: tensor * 2 for name, tensor in other_state().items() if "num" not in name and "running" not in name}

    def loss(given: dict[str, Tensor], net: Net) -> Tensor:
        return torch.func.functional_call(net, given, (X,)).square().sum()

    found, wanted = (torch.func.grad(loss)(given, net) for net in pair)
    for name, gradient in wanted.items():
        assert_near(found[name], gradient)
    stacked = {"one.weight": torch.stack([pair[0].one.weight.detach(), torch.ones(3)])}
    with torch.no_grad():
        one, two = (torch.vmap(loss, in_dims=(0, None))(stacked, net) for net in pair)
    assert_near(one, two)


def test_compiled_and_explained(pair: tuple[Net, Net]) -> None:
    model, original = pair
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            assert_near(compiled(X), original(X))
            for net in pair:
                net.one.bias.add_(1)
    with torch.no_grad():
        program = torch.export.export(model, (X,)).module()
        assert_near(program(X), original(X))
    assert "relu" in str(polyconv.explain(model, X))
