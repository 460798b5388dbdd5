"""torch.func: vmap, derivatives of every order and mode, and both combined, as for torch's convolution.

The reference never uses torch.func: a vmap is compared with a loop, a derivative with autograd on ``F.conv2d``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import polyconv
from geometries import CASES
from polyconv import dispatch
from polyconv.backend import override
from recording import Recorder

Conv = Callable[..., Tensor]

both_functions = pytest.mark.parametrize("conv2d", [F.conv2d, polyconv.conv2d], ids=["torch", "polyconv"])
pytestmark = pytest.mark.usefixtures("direct")

with_rules = pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="PyTorch 2.4 takes no rules of vmap: it loops"
)
both_modules = pytest.mark.parametrize("Conv2d", [nn.Conv2d, polyconv.Conv2d], ids=["torch", "polyconv"])

BATCH = 3


def tensors(*mapped: bool, groups: int = 2) -> list[Tensor]:
    """Input, weight and bias of a grouped convolution; mapped ones have a leading dimension."""
    shapes = [(2, 2 * groups, 6, 5), (3 * groups, 2, 3, 2), (3 * groups,)]
    return [
        torch.randn(*([BATCH] if each else []), *shape, dtype=torch.float64)
        for each, shape in zip(mapped, shapes, strict=True)
    ]


def looped(function: Callable[..., Any], mapped: tuple[bool, ...], args: list[Tensor]) -> Any:
    """Expected result of the vmap, by a loop."""
    results = [
        function(*(arg[i] if each else arg for each, arg in zip(mapped, args, strict=True))) for i in range(BATCH)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(list(column)) for column in zip(*results, strict=True))


MAPPED = [(x, w, b) for x in (False, True) for w in (False, True) for b in (False, True) if x or w or b]


# ---- vmap


@both_functions
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(conv2d: Conv, mapped: tuple[bool, bool, bool], groups: int) -> None:
    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return conv2d(x, w, bias, padding=1, stride=(2, 1), groups=groups)

    args = tensors(*mapped, groups=groups)
    got = vmap(call, in_dims=tuple(0 if each else None for each in mapped))(*args)
    torch.testing.assert_close(got, looped(call, mapped, args))


@both_functions
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_of_the_gradients(conv2d: Conv, mapped: tuple[bool, bool, bool], groups: int) -> None:
    """Covers all forms of the vmap rules of the gradient passes."""

    def gradients(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad(lambda *a: conv2d(*a, padding=1, groups=groups).pow(2).sum(), argnums=(0, 1, 2))(x, w, bias))

    def truth(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [arg.detach().requires_grad_() for arg in args]
        return torch.autograd.grad(F.conv2d(*leaves, padding=1, groups=groups).pow(2).sum(), leaves)

    args = tensors(*mapped, groups=groups)
    got = vmap(gradients, in_dims=tuple(0 if each else None for each in mapped))(*args)
    torch.testing.assert_close(got, looped(truth, mapped, args))


@both_functions
@pytest.mark.parametrize("mapped", [(True, False), (False, True), (True, True)])
def test_vmap_of_a_linear_map_and_its_transpose(conv2d: Conv, mapped: tuple[bool, bool]) -> None:
    """Gradient passes with one of their two tensors mapped: in a vjp the incoming gradient may be."""
    x, w, _ = tensors(False, mapped[0], False)
    dy = torch.randn(
        *([BATCH] if mapped[1] else []), *F.conv2d(x, w if w.dim() == 4 else w[0], groups=2).shape
    ).double()

    def pull_back(w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        return vjp(lambda x, w: conv2d(x, w, groups=2), x, w)[1](dy)

    def truth(w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        return torch.autograd.grad(F.conv2d(*leaves, groups=2), leaves, dy)

    got = vmap(pull_back, in_dims=tuple(0 if each else None for each in mapped))(w, dy)
    torch.testing.assert_close(got, looped(truth, mapped, [w, dy]))


@both_functions
@pytest.mark.parametrize(("x_dim", "w_dim", "out_dim"), [(1, 4, 0), (-1, 2, 2), (3, -5, -1), (4, 0, 4)])
def test_vmap_over_any_dimension(conv2d: Conv, x_dim: int, w_dim: int, out_dim: int) -> None:
    x, w, _ = tensors(True, True, False)
    got = vmap(lambda x, w: conv2d(x, w, groups=2), in_dims=(x_dim, w_dim), out_dims=out_dim)(
        x.movedim(0, x_dim), w.movedim(0, w_dim)
    )
    expected = torch.stack([F.conv2d(one, other, groups=2) for one, other in zip(x, w, strict=True)], out_dim)
    torch.testing.assert_close(got, expected)


@both_functions
def test_nested_vmap(conv2d: Conv) -> None:
    """Every input with every weight."""
    x, w, _ = tensors(True, True, False)
    got = vmap(vmap(lambda x, w: conv2d(x, w, groups=2), in_dims=(None, 0)), in_dims=(0, None))(x, w)
    expected = torch.stack([torch.stack([F.conv2d(one, other, groups=2) for other in w]) for one in x])
    torch.testing.assert_close(got, expected)


@both_functions
def test_vmap_of_an_image_without_a_batch(conv2d: Conv) -> None:
    x, w, bias = tensors(True, False, False)
    torch.testing.assert_close(
        vmap(lambda image: conv2d(image, w, bias, groups=2))(x[0]), F.conv2d(x[0], w, bias, groups=2)
    )


@with_rules
@both_functions
def test_vmap_in_chunks_and_over_nothing(conv2d: Conv) -> None:
    x, w, _ = tensors(True, False, False)
    mapped = vmap(lambda x: conv2d(x, w, groups=2), chunk_size=2)
    torch.testing.assert_close(mapped(x), looped(lambda x: F.conv2d(x, w, groups=2), (True,), [x]))
    assert vmap(lambda x: conv2d(x, w, groups=2))(x[:0]).numel() == 0


@pytest.mark.parametrize("name", ["cropped", "reflect", "circular, whole image", "four sides", "channels_last"])
def test_vmap_keeps_the_geometry(name: str) -> None:
    """Arguments that torch's function lacks must be passed on by every rule."""
    case = CASES[name]
    x, w, bias = case.tensors()
    xs, ws = torch.stack([x, 2 * x]), torch.stack([w, w - 1])

    def call(x: Tensor, w: Tensor) -> Tensor:
        return polyconv.conv2d(x, w, bias, **case.kwargs)

    torch.testing.assert_close(vmap(call)(xs, ws), torch.stack([call(xs[0], ws[0]), call(xs[1], ws[1])]))
    torch.testing.assert_close(vmap(call, (0, None))(xs, w), torch.stack([call(xs[0], w), call(xs[1], w)]))


@with_rules
def test_vmap_is_one_convolution_and_not_a_loop() -> None:
    recorder = Recorder()
    x, w, bias = tensors(True, True, False)
    with override("cpu", recorder):
        vmap(lambda x: polyconv.conv2d(x, w[0], bias, groups=2))(x)
        vmap(lambda w: polyconv.conv2d(x[0], w, bias, groups=2))(w)
        vmap(lambda x, w: polyconv.conv2d(x, w, bias, groups=2))(x, w)
    images, channels, groups = recorder.problems
    assert (images.batch, images.out_channels, images.groups) == (2 * BATCH, 6, 2)
    assert (channels.batch, channels.out_channels, channels.groups) == (2, 6 * BATCH, 2)
    assert (groups.batch, groups.out_channels, groups.groups) == (2, 6 * BATCH, 2 * BATCH)


# ---- derivatives


def loss(conv2d: Conv) -> Callable[..., Tensor]:
    """Nonlinear in its output, so that no derivative vanishes."""
    return lambda x, w, bias: conv2d(x, w, bias, padding=(0, 1), groups=2).pow(3).sum()


def small() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 2, 3, 2).double(), torch.randn(2, 1, 2, 2).double(), torch.randn(2).double()


@both_functions
def test_grad(conv2d: Conv) -> None:
    args = small()
    leaves = [arg.clone().requires_grad_() for arg in args]
    value = loss(F.conv2d)(*leaves)
    gradients, got = grad_and_value(loss(conv2d), argnums=(0, 1, 2))(*args)
    torch.testing.assert_close((got, gradients), (value.detach(), torch.autograd.grad(value, leaves)))


@both_functions
def test_jvp(conv2d: Conv) -> None:
    args, tangents = small(), small()
    truth = torch.autograd.functional.jvp(loss(F.conv2d), args, tangents)
    torch.testing.assert_close(jvp(loss(conv2d), args, tangents), truth)


@both_functions
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_jacobian(conv2d: Conv, jacobian: Any) -> None:
    args = small()

    def call(conv: Conv) -> Callable[..., Tensor]:
        return lambda x, w, bias: conv(x, w, bias, padding=(0, 1), groups=2)

    truth = torch.autograd.functional.jacobian(call(F.conv2d), args)
    torch.testing.assert_close(jacobian(call(conv2d), argnums=(0, 1, 2))(*args), truth)


@both_functions
@pytest.mark.parametrize("outer", [jacrev, jacfwd])
@pytest.mark.parametrize("inner", [jacrev, jacfwd])
def test_second_derivatives_in_both_modes(conv2d: Conv, outer: Any, inner: Any) -> None:
    args = small()
    truth = torch.autograd.functional.hessian(loss(F.conv2d), args)
    got = outer(inner(loss(conv2d), argnums=(0, 1, 2)), argnums=(0, 1, 2))(*args)
    torch.testing.assert_close(got, truth)


@both_functions
def test_third_derivative(conv2d: Conv) -> None:
    """Forward over reverse over reverse: each pass is differentiated in each mode."""
    x, w, bias = small()

    def third(conv: Conv) -> Callable[[Tensor], Tensor]:
        return lambda w: grad(lambda w: grad(lambda x: loss(conv)(x, w, bias))(x).pow(2).sum())(w)

    def truth(w: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(F.conv2d)(leaf, w, bias), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), w, create_graph=True)
        return second

    tangent = torch.randn_like(w)
    got = jvp(third(conv2d), (w,), (tangent,))
    torch.testing.assert_close(got, torch.autograd.functional.jvp(truth, (w,), (tangent,)))


@both_functions
def test_inside_autograd(conv2d: Conv) -> None:
    """Autograd differentiates a gradient computed by torch.func."""
    x, w, bias = small()
    leaf = x.clone().requires_grad_()
    got = torch.autograd.grad(grad(loss(conv2d), argnums=1)(leaf, w, bias).pow(2).sum(), leaf)
    weight = w.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(F.conv2d)(leaf, weight, bias), weight, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(first.pow(2).sum(), leaf))


@both_functions
def test_no_grad_outside_and_inside(conv2d: Conv) -> None:
    x, w, bias = small()
    expected = grad(loss(F.conv2d))(x, w, bias)
    with torch.no_grad():
        torch.testing.assert_close(grad(loss(conv2d))(x, w, bias), expected)

    def detached(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = conv2d(x, w, bias, groups=2)
        return (y * x.sum()).sum()

    torch.testing.assert_close(grad(detached)(x), F.conv2d(x, w, bias, groups=2).sum().expand(x.shape))


@both_functions
def test_tensors_that_outlive_their_transform(conv2d: Conv) -> None:
    x, w, bias = small()
    escaped: list[Tensor] = []
    grad(lambda x: (escaped.append(x), x.sum())[1])(x)
    torch.testing.assert_close(conv2d(escaped[0], w, bias, groups=2), F.conv2d(x, w, bias, groups=2))
    y = conv2d(escaped[0], w.requires_grad_(), bias, groups=2)
    assert y.requires_grad


# ---- the epilogue


def with_epilogue(activation: str | None) -> dict[str, Callable[..., Tensor]]:
    """``activation(conv + bias + residual)``: fused, and in separate torch calls."""
    apply = {None: lambda y: y, "relu": torch.relu, "silu": F.silu}[activation]

    def fused(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return polyconv.conv2d(x, w, bias, padding=1, groups=2, activation=activation, residual=residual)

    def written_out(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return apply(F.conv2d(x, w, bias, padding=1, groups=2) + residual)

    return {"fused": fused, "written out": written_out}


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (None, None, None, 0), (0, None, None, None), (None, 0, None, 0)])
def test_vmap_with_an_epilogue(mapped: tuple[int | None, ...], activation: str | None) -> None:
    args = [*tensors(mapped[0] == 0, mapped[1] == 0, mapped[2] == 0)]
    w = args[1] if args[1].dim() == 4 else args[1][0]
    size = F.conv2d(args[0] if args[0].dim() == 4 else args[0][0], w, padding=1, groups=2).shape
    args.append(torch.randn(*([BATCH] if mapped[3] == 0 else []), *size, dtype=torch.float64))
    got = {name: vmap(call, in_dims=mapped)(*args) for name, call in with_epilogue(activation).items()}
    torch.testing.assert_close(got["fused"], got["written out"])


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize(("outer", "inner"), [(jacrev, jacrev), (jacfwd, jacrev), (jacfwd, jacfwd)])
def test_second_derivatives_with_an_epilogue(outer: Any, inner: Any, activation: str | None) -> None:
    x = torch.randn(1, 2, 3, 3).double()
    args = (x, torch.randn(2, 1, 3, 3).double(), torch.randn(2).double(), torch.randn(1, 2, 3, 3).double())
    got = {
        name: outer(inner(lambda *a, call=call: call(*a).pow(3).sum(), argnums=(0, 1, 3)), argnums=(0, 1, 3))(*args)
        for name, call in with_epilogue(activation).items()
    }
    torch.testing.assert_close(got["fused"], got["written out"])


# ---- modules


@both_modules
def test_functional_call(Conv2d: type[nn.Conv2d]) -> None:
    module, x = Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)
    parameters = {name: torch.randn_like(value) for name, value in module.named_parameters()}
    got = functional_call(module, parameters, (x,))
    torch.testing.assert_close(got, F.conv2d(x, parameters["weight"], parameters["bias"]))
    gradients = grad(lambda p: functional_call(module, p, (x,)).sum())(parameters)
    torch.testing.assert_close(gradients["bias"], torch.full((3,), 18.0))


@both_modules
def test_gradients_of_each_sample(Conv2d: type[nn.Conv2d]) -> None:
    """vmap(grad(...)) over a small network, beside one backward pass for each sample."""
    model = nn.Sequential(Conv2d(2, 4, 3, padding=1), nn.Tanh(), Conv2d(4, 3, 3, stride=2)).double()
    x, target = torch.randn(4, 2, 7, 7).double(), torch.randn(4, 3, 3, 3).double()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def sample_loss(parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        y = functional_call(model, parameters, (x.unsqueeze(0),))
        return F.mse_loss(y.squeeze(0), target)

    got = vmap(grad(sample_loss), in_dims=(None, 0, 0))(parameters, x, target)
    for i in range(len(x)):
        model.zero_grad()
        F.mse_loss(model(x[i : i + 1]), target[i : i + 1]).backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(got[name][i], value.grad)


@both_modules
def test_an_ensemble_is_one_call(Conv2d: type[nn.Conv2d]) -> None:
    models = [nn.Sequential(Conv2d(2, 3, 3), nn.ReLU(), Conv2d(3, 2, 1)) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(2, 2, 6, 6)
    got = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))


@both_modules
def test_hessian_of_a_module(Conv2d: type[nn.Conv2d]) -> None:
    module, x = Conv2d(1, 2, 2).double(), torch.randn(1, 1, 3, 3).double()
    weight = module.weight.detach()

    def of(conv: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda w: conv(w).pow(3).sum()

    got = hessian(of(lambda w: functional_call(module, {"weight": w}, (x,))))(weight)
    bias = module.bias.detach()
    truth = torch.autograd.functional.hessian(of(lambda w: F.conv2d(x, w, bias)), weight)
    torch.testing.assert_close(got, truth)


def test_the_operators_themselves_are_mapped_with_the_bias_gradient() -> None:
    """wgrad's gradient of the bias does not depend on the input, and is not mapped where only that is."""
    grad_y, x = torch.randn(2, 4, 3, 3).double(), torch.randn(BATCH, 2, 2, 5, 5).double()
    geometry = ((1, 1), (0, 0, 0, 0), (1, 1), 1, "zeros")
    dw, db = vmap(lambda x: dispatch.wgrad(grad_y, x, [4, 2, 3, 3], False, True, *geometry))(x)
    for i in range(BATCH):
        one, other = dispatch.wgrad(grad_y, x[i], [4, 2, 3, 3], False, True, *geometry)
        torch.testing.assert_close((dw[i], db[i]), (one, other))
