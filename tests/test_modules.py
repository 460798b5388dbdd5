"""Operations on modules: copy, save, share, hook, parametrise, prune, fuse, trace; compared with torch's modules."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import polyconv

pytestmark = pytest.mark.usefixtures("direct")

both = pytest.mark.parametrize("Conv2d", [nn.Conv2d, polyconv.Conv2d], ids=["torch", "polyconv"])
both_lazy = pytest.mark.parametrize(
    ("LazyConv2d", "Conv2d"),
    [(nn.LazyConv2d, nn.Conv2d), (polyconv.LazyConv2d, polyconv.Conv2d)],
    ids=["torch", "polyconv"],
)

Kind = type[nn.Conv2d]


def network(Conv2d: Kind) -> nn.Sequential:
    return nn.Sequential(Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Conv2d(8, 4, (3, 5), stride=2))


def image() -> Tensor:
    return torch.randn(2, 3, 9, 11)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# ---- activation checkpointing


@both
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_the_same_gradients(Conv2d: Kind, use_reentrant: bool) -> None:
    model, x = network(Conv2d).eval(), image().requires_grad_()
    plain = model(x)
    plain.pow(2).sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    for run in (
        lambda: checkpoint(model, x, use_reentrant=use_reentrant),
        lambda: checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant),
    ):
        x.grad = None
        model.zero_grad()
        y = run()
        y.pow(2).sum().backward()
        torch.testing.assert_close(y, plain)
        torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], expected)


@both
def test_saved_tensors_can_be_packed(Conv2d: Kind) -> None:
    """Saved-tensor hooks, as offloading uses them, see input and weight."""
    conv, x = Conv2d(3, 4, 3), image().requires_grad_()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        y = conv(x)
    assert {tuple(tensor.shape) for tensor in packed} == {tuple(x.shape), tuple(conv.weight.shape)}
    torch.testing.assert_close(gradients(conv, y.sum()), gradients(conv, conv(x).sum()))


@both
def test_changing_a_saved_tensor_is_noticed(Conv2d: Kind) -> None:
    conv = Conv2d(3, 4, 3)
    y = conv(image().requires_grad_())
    with torch.no_grad():
        conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- copies and files


@both
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_model(Conv2d: Kind, how: str) -> None:
    model, x = network(Conv2d).eval(), image()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert [type(module) for module in other] == [type(module) for module in model]
    assert torch.equal(other(x), model(x))
    assert other[0].weight.data_ptr() != model[0].weight.data_ptr()


@both
def test_a_file_of_weights_is_safe_to_load_and_fits_both_classes(Conv2d: Kind, tmp_path: Path) -> None:
    model, x = network(Conv2d).eval(), image()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(loaded) == list(network(nn.Conv2d).state_dict())
    for kind in (nn.Conv2d, polyconv.Conv2d):
        other = network(kind).eval()
        other.load_state_dict(loaded, strict=True)
        torch.testing.assert_close(other(x), model(x))
        other.load_state_dict(copy.deepcopy(loaded), strict=True, assign=True)
        torch.testing.assert_close(other(x), model(x))


@both
def test_weights_can_be_loaded_without_a_copy(Conv2d: Kind, tmp_path: Path) -> None:
    """A model on the meta device, filled from a mapped file."""
    model, x = network(Conv2d).eval(), image()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        empty = network(Conv2d).eval()
    assert empty(image().to("meta")).shape == model(x).shape
    empty.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True), assign=True)
    torch.testing.assert_close(empty(x), model(x))


@both
def test_to_empty_and_skip_init(Conv2d: Kind) -> None:
    conv = Conv2d(3, 4, 3)
    other = Conv2d(3, 4, 3, device="meta").to_empty(device="cpu")
    third = nn.utils.skip_init(Conv2d, 3, 4, 3)
    x = image()
    for module in (other, third):
        assert type(module) is Conv2d
        module.load_state_dict(conv.state_dict())
        assert torch.equal(module(x), conv(x))


@both
def test_missing_and_unexpected_keys_are_named(Conv2d: Kind) -> None:
    conv = Conv2d(3, 4, 3)
    assert str(conv.load_state_dict({"weight": conv.weight, "scale": conv.weight}, strict=False)) == str(
        nn.Conv2d(3, 4, 3).load_state_dict({"weight": conv.weight, "scale": conv.weight}, strict=False)
    )
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        conv.load_state_dict({"weight": conv.weight})


def test_a_state_dict_says_nothing_of_polyconv() -> None:
    """No setting is saved: old files load, and polyconv's load anywhere."""
    conv = polyconv.Conv2d(3, 4, 3, tolerance=1e-5)
    assert list(conv.state_dict()) == ["weight", "bias"]
    assert conv.state_dict()._metadata == nn.Conv2d(3, 4, 3).state_dict()._metadata
    assert pickle.loads(pickle.dumps(conv)).tolerance == 1e-5


# ---- several processes


def _in_another_process(model: nn.Module, x: Tensor, results: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        y = model(x)
        model[0].bias.add_(1)  # seen by the parent: shared memory
    results.put(y.numpy())


@both
def test_shared_memory_and_processes(Conv2d: Kind) -> None:
    model, x = network(Conv2d).eval().share_memory(), image()
    assert all(parameter.is_shared() for parameter in model.parameters())
    with torch.no_grad():
        expected, before = model(x), model[0].bias.clone()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_in_another_process, args=(model, x, results))
    process.start()
    got = torch.from_numpy(results.get(timeout=120))
    process.join()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model[0].bias.detach(), before + 1)


@both
def test_threads(Conv2d: Kind) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, inputs = network(Conv2d).eval(), [image() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(model, inputs))
    torch.testing.assert_close(outputs, [model(x) for x in inputs])


# ---- hooks


@both
def test_hooks_of_every_kind_are_called(Conv2d: Kind) -> None:
    conv, x = Conv2d(3, 4, 3), image().requires_grad_()
    called = []
    conv.register_forward_pre_hook(lambda m, args: called.append("before") or (args[0] * 2,))
    conv.register_forward_hook(lambda m, args, y: called.append("after") or y + 1)
    conv.register_full_backward_pre_hook(lambda m, dy: called.append("backward before"))
    conv.register_full_backward_hook(lambda m, dx, dy: called.append("backward after"))
    conv.register_state_dict_pre_hook(lambda *_: called.append("saved"))
    conv.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    conv.weight.register_hook(lambda g: called.append("weight"))
    conv.weight.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    y = conv(x)
    torch.testing.assert_close(y, nn.functional.conv2d(2 * x, conv.weight, conv.bias) + 1)
    y.sum().backward()
    conv.load_state_dict(conv.state_dict())
    assert sorted(called) == sorted(
        ["before", "after", "backward before", "weight", "accumulated", "backward after", "saved", "loaded"]
    )


# ---- parametrisations, pruning, fusing


@both
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrisations(Conv2d: Kind, name: str) -> None:
    conv = getattr(parametrizations, name)(Conv2d(3, 4, 3)).eval()
    assert isinstance(conv, Conv2d)
    x = image()
    y = conv(x)
    torch.testing.assert_close(y, nn.functional.conv2d(x, conv.weight, conv.bias))
    assert all(parameter.grad is None for parameter in conv.parameters())
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in conv.parameters())
    parametrize.remove_parametrizations(conv, "weight")
    assert type(conv) is Conv2d
    torch.testing.assert_close(conv(x), y)


@both
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_the_older_norms_are_hooks(Conv2d: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        conv = nn.utils.weight_norm(Conv2d(3, 4, 3))
    x = image()
    y = conv(x)
    torch.testing.assert_close(y, nn.functional.conv2d(x, conv.weight, conv.bias))
    conv.weight_g.data.mul_(2)
    torch.testing.assert_close(conv(x) - conv.bias.view(-1, 1, 1), 2 * (y - conv.bias.view(-1, 1, 1)))
    nn.utils.remove_weight_norm(conv)
    spectral = nn.utils.spectral_norm(conv)
    spectral(x).sum().backward()
    assert spectral.weight_orig.grad is not None


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


@both
def test_a_parametrisation_of_ones_own_is_computed_once_where_cached(Conv2d: Kind) -> None:
    conv = Conv2d(3, 4, 3)
    before = conv.weight.detach().clone()
    parametrize.register_parametrization(conv, "weight", Doubled())
    torch.testing.assert_close(conv.weight.detach(), before)
    x = image()
    with parametrize.cached():
        assert conv.weight is conv.weight
        torch.testing.assert_close(conv(x), nn.functional.conv2d(x, before, conv.bias))
    assert type(copy.deepcopy(conv)).__bases__[0] is Conv2d


@both
def test_pruning(Conv2d: Kind) -> None:
    conv, x = Conv2d(3, 4, 3), image()
    prune.l1_unstructured(conv, "weight", amount=0.5)
    prune.ln_structured(conv, "weight", amount=1, n=2, dim=0)
    assert (conv.weight == 0).sum() >= conv.weight.numel() // 2
    y = conv(x)
    torch.testing.assert_close(y, nn.functional.conv2d(x, conv.weight_orig * conv.weight_mask, conv.bias))
    y.sum().backward()
    assert torch.equal(conv.weight_orig.grad == 0, conv.weight_mask == 0)
    prune.remove(conv, "weight")
    assert list(conv.state_dict()) == ["bias", "weight"]
    torch.testing.assert_close(conv(x), y)
    assert prune.is_pruned(conv) is False


@both
@pytest.mark.parametrize("bias", [True, False])
def test_fusing_with_batch_normalisation(Conv2d: Kind, bias: bool) -> None:
    conv, norm, x = Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), image()
    for parameter in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(parameter)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    fused = nn.utils.fuse_conv_bn_eval(conv.eval(), norm.eval())
    assert type(fused) is Conv2d
    torch.testing.assert_close(fused(x), norm(conv(x)), rtol=1e-4, atol=1e-5)
    weight, shift = nn.utils.fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    assert torch.equal(fused.weight, weight)
    assert torch.equal(fused.bias, shift)


# ---- lazy modules


@both_lazy
def test_lazy_modules_take_their_channels_from_the_first_input(LazyConv2d: Any, Conv2d: Kind) -> None:
    lazy = LazyConv2d(6, (3, 5), stride=2, padding=1, groups=3, dtype=torch.float64)
    assert lazy.has_uninitialized_params()
    assert isinstance(lazy, Conv2d)
    x = image().double()
    torch.manual_seed(3)
    y = lazy(x)
    assert type(lazy) is Conv2d
    assert not lazy._forward_pre_hooks
    torch.manual_seed(3)
    eager = Conv2d(3, 6, (3, 5), stride=2, padding=1, groups=3, dtype=torch.float64)
    assert repr(lazy) == repr(eager)
    torch.testing.assert_close(lazy.state_dict(), eager.state_dict())
    torch.testing.assert_close(y, eager(x))


@both_lazy
def test_lazy_modules_load_weights_and_are_copied(LazyConv2d: Any, Conv2d: Kind) -> None:
    conv, x = Conv2d(3, 4, 3), image()
    loaded = LazyConv2d(4, 3)
    loaded.load_state_dict(conv.state_dict())
    assert torch.equal(loaded(x), conv(x))
    assert type(loaded) is Conv2d
    for other in (copy.deepcopy(LazyConv2d(4, 3)), pickle.loads(pickle.dumps(LazyConv2d(4, 3)))):
        assert type(other) is LazyConv2d
        other.load_state_dict(conv.state_dict())
        assert torch.equal(other(x), conv(x))


@both_lazy
def test_lazy_modules_without_a_batch_and_with_the_wrong_shape(LazyConv2d: Any, Conv2d: Kind) -> None:
    assert LazyConv2d(4, 3)(image()[0]).shape == (4, 7, 9)
    with pytest.raises(RuntimeError, match="Expected 3D"):
        LazyConv2d(4, 3)(torch.randn(3, 3))
    with pytest.raises(ValueError, match="divisible by groups"):
        LazyConv2d(4, 3, groups=2)(image())


def test_lazy_modules_take_what_ours_take() -> None:
    lazy = polyconv.LazyConv2d(4, 3, padding=(0, 1, 2, 3), padding_mode="reflect", tolerance=1e-6, activation="relu")
    x = image()
    residual = torch.randn(2, 4, 8, 14)
    y = lazy(x, residual)
    assert (lazy.tolerance, lazy.activation) == (1e-6, "relu")
    expected = polyconv.conv2d(x, lazy.weight, lazy.bias, padding=(0, 1, 2, 3), padding_mode="reflect")
    torch.testing.assert_close(y, (expected + residual).relu())


# ---- tracing


@both
def test_symbolic_trace(Conv2d: Kind) -> None:
    model, x = network(Conv2d).eval(), image()
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))
    assert torch.equal(copy.deepcopy(traced)(x), traced(x))
    torch.testing.assert_close(gradients(traced, traced(x).pow(2).sum()), gradients(model, model(x).pow(2).sum()))


@pytest.mark.parametrize("conv2d", [nn.functional.conv2d, polyconv.conv2d], ids=["torch", "polyconv"])
def test_symbolic_trace_of_a_function(conv2d: Any) -> None:
    weight, x = torch.randn(4, 3, 3, 3), image()
    traced = torch.fx.symbolic_trace(lambda x: conv2d(x, weight, padding=1).relu())
    assert conv2d in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(x), conv2d(x, weight, padding=1).relu())


def test_symbolic_trace_keeps_the_epilogue() -> None:
    conv, x = polyconv.Conv2d(3, 4, 3, padding=1, activation="silu"), image()
    residual = torch.randn(2, 4, 9, 11)
    traced = torch.fx.symbolic_trace(conv)
    torch.testing.assert_close(traced(x, residual), conv(x, residual))


@both
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_jit_trace(Conv2d: Kind) -> None:
    model, x = network(Conv2d).eval(), image()
    traced = torch.jit.trace(model, x)
    other = torch.randn(3, 3, 12, 10)
    torch.testing.assert_close(traced(other), model(other))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.jit.load(buffer)(x), model(x))


# ---- others


@both
def test_memory_formats_are_carried_through(Conv2d: Kind) -> None:
    model, x = network(Conv2d).to(memory_format=torch.channels_last), image()
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        assert model(given).is_contiguous(memory_format=torch.channels_last)


@both
def test_optimisers_see_the_parameters_once(Conv2d: Kind) -> None:
    shared = Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.randn(2, 4, 6, 6)
    assert len(list(model.parameters())) == 2
    model(x).pow(2).sum().backward()
    expected = torch.autograd.grad(
        nn.functional.conv2d(
            nn.functional.conv2d(x, shared.weight, shared.bias, padding=1).tanh(), shared.weight, shared.bias, padding=1
        )
        .pow(2)
        .sum(),
        shared.weight,
    )[0]
    torch.testing.assert_close(shared.weight.grad, expected)


@both
def test_requires_grad_can_be_switched(Conv2d: Kind) -> None:
    model = network(Conv2d)
    model[0].requires_grad_(False)
    model(image()).sum().backward()
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None


@both
def test_swapping_tensors_when_converting(Conv2d: Kind) -> None:
    """`torch.__future__.set_swap_module_params_on_conversion`: parameters keep their identity."""
    conv = Conv2d(3, 4, 3)
    weight = conv.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        conv.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert conv.weight is weight
    assert conv(image().double()).dtype == torch.float64
