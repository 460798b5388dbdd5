"""torch.compile: one graph, forward and backward, any sizes, and the settings at compile time."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import polyconv
from polyconv import settings
from polyconv.backend import override
from recording import Recorder

both = pytest.mark.parametrize("Conv2d", [nn.Conv2d, polyconv.Conv2d], ids=["torch", "polyconv"])
Kind = type[nn.Conv2d]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(Conv2d: Kind, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        Conv2d(3, 8, 3, padding=1, **options), nn.BatchNorm2d(8), nn.ReLU(), Conv2d(8, 4, 3, stride=2, groups=2)
    )


def step(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and all gradients of one training step."""
    model.zero_grad()
    x.requires_grad_().grad = None
    y = run(x)
    F.mse_loss(y, torch.zeros_like(y)).backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


# ---- results equal those without compiling


@both
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_training_step_in_one_graph(Conv2d: Kind, backend: str) -> None:
    """fullgraph forbids breaks. Three optimiser steps reach the weights of an uncompiled run."""
    model = network(Conv2d)
    other = deepcopy(model)
    counted = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    x = torch.randn(2, 3, 12, 10)
    for run, trained in ((compiled, model), (other, other)):
        optimiser = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            step(run, trained, x)
            optimiser.step()
    assert counted.frame_count == 1
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize(
    ("layout", "padding_mode"), [("channels_last", "zeros"), ("sliced", "zeros"), ("contiguous", "reflect")]
)
def test_layouts_and_padding_modes(Conv2d: Kind, layout: str, padding_mode: str) -> None:
    model = network(Conv2d, padding_mode=padding_mode).eval()
    x = torch.randn(2, 3, 12, 20)
    if layout == "channels_last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    elif layout == "sliced":
        x = x[..., 1::2]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, expected in zip(step(compiled, model, x), step(model, model, x), strict=True):
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()


@both
def test_inference(Conv2d: Kind) -> None:
    model, x = network(Conv2d).eval(), torch.randn(2, 3, 12, 10)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(x), model(x))


@both
def test_an_image_without_a_batch(Conv2d: Kind) -> None:
    conv, x = Conv2d(3, 4, 3), torch.randn(3, 8, 8)
    torch.testing.assert_close(torch.compile(conv, backend="aot_eager", fullgraph=True)(x), conv(x))


@both
def test_double_backward_outside_of_the_graph(Conv2d: Kind) -> None:
    """A graph of the forward pass alone leaves derivatives of any order to autograd."""
    conv, x = Conv2d(3, 4, 3).double(), torch.randn(1, 3, 5, 5).double().requires_grad_()
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    for run in (compiled, conv):
        (first,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        if run is compiled:
            got = second
    torch.testing.assert_close(got, second)


@both
def test_torch_func_inside(Conv2d: Kind) -> None:
    """Per-sample gradients, compiled."""
    conv = Conv2d(2, 3, 3)
    parameters = {name: value.detach() for name, value in conv.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(conv, parameters, (x.unsqueeze(0),)).pow(2).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    x = torch.randn(4, 2, 6, 6)
    torch.testing.assert_close(
        torch.compile(each, backend="aot_eager", fullgraph=True)(parameters, x), each(parameters, x)
    )


@both
def test_checkpointing_inside(Conv2d: Kind) -> None:
    model = network(Conv2d).eval()
    x = torch.randn(2, 3, 12, 10)

    def run(x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


# ---- any sizes

SIZES = [(2, 3, 8, 9), (3, 3, 9, 11), (5, 3, 30, 7), (4, 3, 41, 33)]


@both
@pytest.mark.parametrize(
    ("padding_mode", "layout"), [("zeros", torch.channels_last), ("reflect", torch.contiguous_format)]
)
def test_one_graph_for_all_sizes(Conv2d: Kind, padding_mode: str, layout: torch.memory_format) -> None:
    """Batch, height and width vary; a recompilation in the second call is an error."""
    model = network(Conv2d, padding_mode=padding_mode).to(memory_format=layout)
    compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in SIZES:
            x = torch.randn(size).to(memory_format=layout)
            torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


@both
def test_sizes_that_are_marked(Conv2d: Kind) -> None:
    """With a size marked dynamic, specialising it is an error."""
    model = network(Conv2d).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in SIZES:
            x = torch.randn(size)
            for dim in (0, 2, 3):
                torch._dynamo.mark_dynamic(x, dim)
            torch.testing.assert_close(compiled(x), model(x))


@both
@pytest.mark.parametrize("dims", [(0,), (2, 3)])
def test_sizes_that_come_out_of_the_data(Conv2d: Kind, dims: tuple[int, ...]) -> None:
    """Unbacked sizes: nothing may be assumed. Invalid sizes raise when the graph runs."""
    model = nn.Sequential(Conv2d(3, 4, 3, padding=1), nn.ReLU(), Conv2d(4, 4, 3, stride=2, groups=2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in SIZES:
            x = torch.randn([size[dim] if dim in dims else SIZES[0][dim] for dim in range(4)])
            for dim in dims:
                torch._dynamo.decorators.mark_unbacked(x, dim)
            torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked])
def test_any_sizes_with_an_epilogue(mark: Any) -> None:
    conv = polyconv.Conv2d(3, 3, 3, padding=1, activation="relu")
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in SIZES:
            x, residual = torch.randn(size), torch.randn(size)
            for tensor in (x, residual):
                for dim in (0, 2, 3):
                    mark(tensor, dim)
            torch.testing.assert_close(compiled(x, residual), conv(x, residual))


@both
def test_an_index_out_of_the_data(Conv2d: Kind) -> None:
    """A mask selects images: their number is unknown to the compiler."""
    conv = Conv2d(3, 4, 3)

    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return conv(x[mask.nonzero().squeeze(1)])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 6, 6)
        for mask in (torch.tensor([1, 0, 1, 1]), torch.tensor([0, 1, 0, 1])):
            torch.testing.assert_close(compiled(x, mask), chosen(x, mask))


def test_a_wrong_size_is_still_an_error() -> None:
    compiled = torch.compile(polyconv.conv2d, backend="aot_eager", fullgraph=True, dynamic=True)
    x, w = torch.randn(2, 3, 8, 9), torch.randn(4, 3, 3, 3)
    compiled(x, w)
    with pytest.raises(Exception, match="Kernel size can't be greater than actual input size"):
        compiled(x[..., :2], w)
    with pytest.raises(Exception, match="channels, but got"):
        compiled(x[:, :2], w)


def test_inductor_with_any_sizes() -> None:
    """The generated code asserts sizes and strides of the operators' results. (It fixes those of torch's.)"""
    model = network(polyconv.Conv2d).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in SIZES[:2]:
            x = torch.randn(size)
            torch.testing.assert_close(step(compiled, model, x), step(model, model, x), rtol=1e-4, atol=1e-5)


# ---- settings


def tolerances(run: Any) -> list[float]:
    """The tolerance of the forward and of the backward pass."""
    recorder = Recorder()
    with override("cpu", recorder):
        run()
    return [problem.tolerance for problem in recorder.problems]


def test_a_change_inside_a_compiled_function_is_not_lost() -> None:
    conv, x = polyconv.Conv2d(2, 2, 3), torch.randn(1, 2, 8, 8)

    def exact(x: Tensor) -> Tensor:
        with polyconv.tolerance(0):
            return conv(x)

    def set_and_set_back(x: Tensor) -> Tensor:
        before = polyconv.set_tolerance(0)
        y = conv(x)
        polyconv.set_tolerance(before)
        return y

    for function, refused in ((exact, r"itertools\.count"), (set_and_set_back, "RLock")):
        compiled = torch.compile(function, backend="eager")
        assert tolerances(lambda compiled=compiled: compiled(x)) == [0.0]
        assert settings.current().tolerance == 1e-4
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=refused):
            torch.compile(function, backend="eager", fullgraph=True)(x)


def test_a_changed_tolerance_holds_in_both_passes() -> None:
    conv = polyconv.Conv2d(3, 4, 3)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    for value in (1e-4, 1e-5, 1e-3):
        with polyconv.tolerance(value):
            y = compiled(x)
            assert tolerances(lambda: step(compiled, conv, x)) == [value] * 3
        assert set(tolerances(y.sum().backward)) == {value}  # fixed by the forward pass, as without compiling
    assert tolerances(lambda: step(compiled, conv, x)) == [1e-4] * 3


def test_changing_back_compiles_nothing() -> None:
    counted = CompileCounterWithBackend("eager")
    compiled = torch.compile(polyconv.Conv2d(3, 4, 3), backend=counted, fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        compiled(x)
        with polyconv.tolerance(1e-5):
            compiled(x)
        with settings.use(workspace_bytes=0):  # no graph depends on it
            compiled(x)
    assert counted.frame_count == 2


@both
def test_autocast(Conv2d: Kind) -> None:
    """Around the call and inside the graph; polyconv follows the dtype only if allowed."""
    conv, x = Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return conv(x)

    around = torch.compile(conv, backend="aot_eager", fullgraph=True)
    for allowed in (False, True, False):
        expected = torch.bfloat16 if allowed or Conv2d is nn.Conv2d else torch.float32
        with polyconv.allow_low_precision(allowed):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                results = [around(x), conv(x)]
            results.append(inside(x))
        assert {result.dtype for result in results} == {expected}
        for result in results:
            torch.testing.assert_close(result, results[1])
            (gradient,) = torch.autograd.grad(result.float().sum(), conv.weight)
            torch.testing.assert_close(gradient, torch.autograd.grad(conv(x).sum(), conv.weight)[0], rtol=2e-2, atol=2)
