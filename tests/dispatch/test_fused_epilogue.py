"""activation(conv + bias + residual): the operator, its derivatives, the function and the module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import polyconv
from geometries import CASES, LAYOUTS, Case, cases, laid_out
from nightly import sampled
from polyconv import dispatch
from polyconv.activation import ACTIVATIONS as NAMES
from polyconv.activation import Activation
from polyconv.arguments import Geometry, normalise
from polyconv.autotune import preferences
from polyconv.backend import override
from polyconv.numerics import reference
from recording import Calls, Recorder

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu6": F.relu6,
    "leaky_relu(0.2)": lambda y: F.leaky_relu(y, 0.2),
    "hardtanh(-2, 0.5)": lambda y: F.hardtanh(y, -2, 0.5),
}
assert set(ACTIVATIONS) >= set(NAMES)

SOME = ("none", "relu", "silu")
"""Those that differ in what the backward pass keeps."""
EPILOGUES = [*[(name, residual) for name in SOME for residual in (False, True)][1:], ("leaky_relu(0.2)", True)]
"""Every combination of these except the empty one, and one with a parameter."""

some_epilogue = pytest.mark.parametrize(("activation", "residual"), EPILOGUES)


def output_shape(case: Case) -> tuple[int, ...]:
    height, width = normalise(case.w[2:], **case.kwargs).out_size(case.x[-2:], case.w[2:])
    return (*case.x[:-3], case.w[0], height, width)


def operands(case: Case, residual: bool, layout: str = "contiguous", dtype: torch.dtype = torch.float64) -> list[Any]:
    """Input, weight, bias and residual; None if absent."""
    return [*case.tensors(dtype), laid_out(output_shape(case), layout, dtype) if residual else None]


def call(case: Case, activation: str) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return polyconv.conv2d(x, w, bias, activation=activation, residual=residual, **case.kwargs)

    return run


def apart(case: Case, activation: str) -> Callable[..., Tensor]:
    """The unfused form in PyTorch."""
    geometry = normalise(case.w[2:], **case.kwargs)

    def run(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        batched = x if x.dim() == 4 else x.unsqueeze(0)
        y = reference.fprop(geometry, batched, w, bias)
        y = y if x.dim() == 4 else y.squeeze(0)
        return ACTIVATIONS[activation](y if residual is None else y + residual)

    return run


# ---- values


@pytest.mark.parametrize("name", CASES)
@some_epilogue
def test_every_case(name: str, activation: str, residual: bool) -> None:
    case = CASES[name]
    given_ = operands(case, residual)
    torch.testing.assert_close(call(case, activation)(*given_), apart(case, activation)(*given_))
    geometry = normalise(case.w[2:], **case.kwargs)
    torch.testing.assert_close(
        reference.with_epilogue(geometry, *given_, activation=activation), apart(case, activation)(*given_)
    )


@given(cases(), st.sampled_from(EPILOGUES), st.sampled_from(LAYOUTS), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=120)
def test_any_geometry(case: Case, epilogue: tuple[str, bool], layout: str, dtype: torch.dtype) -> None:
    activation, residual = epilogue
    given_ = operands(case, residual, layout, dtype)
    before = [None if t is None else t.clone() for t in given_]
    y = call(case, activation)(*given_)
    expected = apart(case, activation)(*(None if t is None else t.double() for t in given_))
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * max(case.w[1:]) * 3)
    assert all(a is None or torch.equal(a, b) for a, b in zip(given_, before, strict=True))


@some_epilogue
def test_a_backend_writes_every_element(activation: str, residual: bool) -> None:
    """The recorder fills the output with NaN first."""
    case = CASES["plain 3x3"]
    given_ = operands(case, residual)
    recorder = Recorder()
    with override("cpu", recorder):
        y = call(case, activation)(*given_)
    torch.testing.assert_close(y, apart(case, activation)(*given_))
    (problem,) = recorder.problems
    assert (problem.activation, problem.residual) == (Activation(activation), residual)
    assert ("residual" in recorder.tensors[0]) == residual


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_number_is_as_in_torch(activation: str, dtype: torch.dtype) -> None:
    """An identity convolution, so that an infinity meets no other number."""
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 90.0, -90.0, -120.0, 3e38, -3e38, 1e-40, -1e-40], dtype=dtype)
    x, w = values.repeat(5).reshape(1, 1, 3, 20), torch.ones(1, 1, 1, 1, dtype=dtype)
    exact = x.double() if activation == "gelu" else x  # in float32 torch's GELU of infinity is NaN
    expected = ACTIVATIONS[activation](exact).to(dtype)
    torch.testing.assert_close(polyconv.conv2d(x, w, activation=activation), expected, equal_nan=True)
    from_residual = polyconv.conv2d(torch.zeros_like(x), w, activation=activation, residual=x)
    torch.testing.assert_close(from_residual, expected, equal_nan=True)


@pytest.mark.parametrize("batch", [0, 2])
@some_epilogue
def test_empty_tensors(batch: int, activation: str, residual: bool) -> None:
    """Without input channels the sum is empty; bias, residual and activation still apply."""
    x, w, bias = torch.randn(batch, 0, 4, 4), torch.randn(3, 0, 3, 3), torch.randn(3)
    added = torch.randn(batch, 3, 2, 2) if residual else None
    y = polyconv.conv2d(x, w, bias, activation=activation, residual=added)
    sums = bias.reshape(3, 1, 1).expand(batch, 3, 2, 2)
    torch.testing.assert_close(y, ACTIVATIONS[activation](sums if added is None else sums + added))


def test_same_bits_twice_and_for_any_threads() -> None:
    """Of one kernel: the choice depends on the number of threads."""
    x, w, b = torch.randn(2, 16, 30, 40), torch.randn(24, 16, 3, 3), torch.randn(24)
    residual, threads, found = torch.randn(2, 24, 28, 38), torch.get_num_threads(), []
    with preferences.watched() as seen:
        polyconv.conv2d(x, w, b, activation="silu", residual=residual)
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            with preferences.Forced({one.key: one.choice for one in seen}):
                found.append(polyconv.conv2d(x, w, b, activation="silu", residual=residual))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)


# ---- the empty epilogue


@pytest.mark.parametrize("activation", [None, "none", "relu", "silu"])
def test_with_an_epilogue_or_without_one_operator_runs(activation: str | None) -> None:
    x, w = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    with Calls() as calls:
        polyconv.conv2d(x, w, activation=activation)
    assert [name for name in calls.names if "polyconv" in name] == ["polyconv.conv2d_fprop.default"]


@pytest.mark.parametrize("name", CASES)
def test_an_empty_epilogue_is_none(name: str) -> None:
    case = CASES[name]
    x, w, bias = case.tensors(torch.float32)
    geometry = normalise(case.w[2:], **case.kwargs)
    assert torch.equal(dispatch.fprop(x, w, bias, *geometry, None, "none"), dispatch.fprop(x, w, bias, *geometry))


# ---- the residual's memory layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last"])
def test_a_residual_of_any_strides(layout: str, x_layout: str) -> None:
    x, w = laid_out((2, 3, 6, 5), x_layout, torch.float32), torch.randn(4, 3, 3, 3)
    residual = laid_out((2, 4, 4, 3), layout, torch.float32)
    recorder = Recorder()
    with override("cpu", recorder):
        y = polyconv.conv2d(x, w, residual=residual)
    torch.testing.assert_close(y, F.conv2d(x, w) + residual)
    assert y.stride() == polyconv.conv2d(x, w).stride()
    handed = recorder.tensors[0]["residual"]
    assert handed.stride() == recorder.problems[0].y_strides
    as_it_is = residual.stride() == y.stride()
    assert (handed.data_ptr() == residual.data_ptr()) == as_it_is


def test_the_problem_tells_of_a_residual_between_vectors() -> None:
    """Kernels with 16-byte accesses rely on it."""
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 1, 1)
    recorder = Recorder()
    with override("cpu", recorder):
        polyconv.conv2d(x, w, residual=torch.randn(4 * 64 + 4)[4:].view(1, 4, 8, 8))
        polyconv.conv2d(x, w, residual=torch.randn(4 * 64 + 1)[1:].view(1, 4, 8, 8))
    assert [problem.vector_aligned for problem in recorder.problems] == [True, False]


@pytest.mark.usefixtures("direct")
@some_epilogue
def test_without_a_batch(activation: str, residual: bool) -> None:
    x, w = torch.randn(3, 6, 5), torch.randn(4, 3, 3, 3)
    added = torch.randn(4, 4, 3) if residual else None
    y = polyconv.conv2d(x, w, activation=activation, residual=added)
    sums = F.conv2d(x, w)
    torch.testing.assert_close(y, ACTIVATIONS[activation](sums if added is None else sums + added))


# ---- errors


def conv(**kwargs: Any) -> Tensor:
    return polyconv.conv2d(torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), **kwargs)


@pytest.mark.parametrize(
    ("activation", "said"),
    [(wrong, "None or one of none, relu, silu, .*; got") for wrong in ("elu", "ReLU", "", "relu(", 1, F.relu)]
    + [
        ("leaky_relu(0.1, 0.2)", r"takes 1 parameters, as 'leaky_relu'; got"),
        ("relu(3)", "takes no parameters"),
        ("hardtanh(nan, 1)", r"takes 2 parameters"),
        ("hardtanh(2, 1)", "must be below the upper one"),
        ("leaky_relu(inf)", "must be finite"),
    ],
)
def test_an_unknown_activation_is_named(activation: Any, said: str) -> None:
    for wrong in (lambda: conv(activation=activation), lambda: polyconv.Conv2d(3, 4, 3, activation=activation)):
        with pytest.raises(ValueError, match=said):
            wrong()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_text_of_an_activation_is_its_value(name: str) -> None:
    made = Activation(name)
    assert Activation(str(made)) == made == pickle.loads(pickle.dumps(made)) == copy.deepcopy(made)
    assert made.parameters == pickle.loads(pickle.dumps(made)).parameters
    x = torch.randn(100)
    torch.testing.assert_close(made(x), ACTIVATIONS[name](x))
    torch.testing.assert_close(made.in_place(x.clone()), ACTIVATIONS[name](x))
    assert polyconv.Conv2d(3, 4, 3, activation=name).activation == made


def test_errors_of_a_residual() -> None:
    with pytest.raises(RuntimeError, match=r"output's size \[2, 4, 4, 4\], but got one of size \[2, 4, 1, 1\].*expand"):
        conv(residual=torch.randn(2, 4, 1, 1))
    with pytest.raises(RuntimeError, match=r"as many dimensions as the input of size \[2, 3, 6, 6\].*\[4, 4, 4\]"):
        conv(residual=torch.randn(4, 4, 4))
    with pytest.raises(RuntimeError, match=r"same type: got torch.float32 and torch.float64.*residual.to"):
        conv(residual=torch.randn(2, 4, 4, 4).double())
    with pytest.raises(RuntimeError, match="same device: got cpu and meta"):
        conv(residual=torch.randn(2, 4, 4, 4, device="meta"))
    with pytest.raises(TypeError, match="'residual' must be a Tensor, not float"):
        conv(residual=1.0)


def test_fake_tensors_find_the_same_errors() -> None:
    with FakeTensorMode():
        x, w = torch.empty(2, 3, 6, 6), torch.empty(4, 3, 3, 3)
        with pytest.raises(RuntimeError, match="output's size"):
            dispatch.fprop(x, w, None, *Geometry(), torch.empty(2, 4, 4, 5), "relu")
        with pytest.raises(ValueError, match="got 'elu'"):
            dispatch.fprop(x, w, None, *Geometry(), None, "elu")


# ---- the operator as PyTorch sees it


OPCHECKED = list(product(("plain 3x3", "strided, odd remainder", "groups", "cropped", "channels_last"), EPILOGUES))


@pytest.mark.parametrize(("name", "epilogue"), sampled(OPCHECKED, 8, "opcheck"))
def test_opcheck(name: str, epilogue: tuple[str, bool]) -> None:
    case, (activation, residual) = CASES[name], epilogue
    x, w, bias, added = (None if t is None else t.requires_grad_() for t in operands(case, residual))
    geometry = normalise(case.w[2:], **case.kwargs)
    torch.library.opcheck(dispatch.fprop, (x, w, bias, *geometry, added, activation))


@given(cases(), st.sampled_from(EPILOGUES), st.sampled_from(LAYOUTS))
@settings(max_examples=40)
def test_fake_agrees_with_real(case: Case, epilogue: tuple[str, bool], layout: str) -> None:
    activation, residual = epilogue
    given_ = operands(case, residual, layout)
    real = call(case, activation)(*given_)
    with FakeTensorMode() as mode:
        fake = call(case, activation)(*(None if t is None else mode.from_tensor(t) for t in given_))
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_float32_if_it_is_not_followed(dtype: torch.dtype) -> None:
    x, w, residual = torch.randn(2, 3, 6, 6, dtype=dtype), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 4, 4, dtype=dtype)
    with polyconv.allow_low_precision(False), torch.autocast("cpu", dtype=dtype):
        y = polyconv.conv2d(x, w, activation="silu", residual=residual.requires_grad_())
        y.sum().backward()
    assert y.dtype == torch.float32
    assert residual.grad is not None
    assert residual.grad.dtype == dtype
    torch.testing.assert_close(y, F.silu(polyconv.conv2d(x.float(), w) + residual.float()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_compiles_as_one_graph(backend: str, activation: str) -> None:
    torch._dynamo.reset()
    module = polyconv.Conv2d(3, 4, 3, activation=activation)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for n, size in ((2, 8), (3, 9)):
        x, residual = torch.randn(n, 3, size, size, requires_grad=True), torch.randn(n, 4, size - 2, size - 2)
        compiled(x, residual).sum().backward()
        got, x.grad = x.grad, None
        module(x, residual).sum().backward()
        torch.testing.assert_close(got, x.grad)


def test_exports_with_a_dynamic_batch() -> None:
    module, batch = polyconv.Conv2d(3, 4, 3, activation="silu").eval(), torch.export.Dim("batch")
    args = (torch.randn(2, 3, 6, 6), torch.randn(2, 4, 4, 4))
    with torch.no_grad():
        exported = torch.export.export(module, args, dynamic_shapes=({0: batch}, {0: batch}))
    more = torch.randn(5, 3, 6, 6), torch.randn(5, 4, 4, 4)
    torch.testing.assert_close(exported.module()(*more), module(*more))


# ---- derivatives

# gradcheck's finite differences write into the input, which an expanded tensor forbids.
DIFFERENTIABLE = [name for name in CASES if CASES[name].layout != "expanded"]


def leaves(case: Case, residual: bool) -> tuple[list[Tensor], Callable[..., list[Any]]]:
    """The operands that are present, and a function that restores None for the others."""
    all_of_them = operands(case, residual)
    there = [t is not None for t in all_of_them]

    def complete(*tensors: Tensor) -> list[Any]:
        left = iter(tensors)
        return [next(left) if one else None for one in there]

    return [t.detach().requires_grad_() for t in all_of_them if t is not None], complete


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@some_epilogue
def test_gradcheck(name: str, activation: str, residual: bool) -> None:
    tensors, complete = leaves(CASES[name], residual)
    run = call(CASES[name], activation)
    assert gradcheck(lambda *t: run(*complete(*t)), tensors, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", ["plain 3x3", "groups", "strided, odd remainder", "channels_last"])
@some_epilogue
def test_gradgradcheck(name: str, activation: str, residual: bool) -> None:
    tensors, complete = leaves(CASES[name], residual)
    run = call(CASES[name], activation)
    assert gradgradcheck(lambda *t: run(*complete(*t)), tensors, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_forward_mode_without_grad(activation: str) -> None:
    """A tangent counts even if nothing requires a gradient, including the residual's alone."""
    case = CASES["plain 3x3"]
    tensors = operands(case, True)
    tangents = [torch.randn_like(t) for t in tensors]
    with forward_ad.dual_level():
        for dual in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)):
            args = [
                forward_ad.make_dual(t, tangent) if wanted else t
                for t, tangent, wanted in zip(tensors, tangents, dual, strict=True)
            ]
            ours = forward_ad.unpack_dual(call(case, activation)(*args)).tangent
            theirs = forward_ad.unpack_dual(apart(case, activation)(*args)).tangent
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("wanted", "activation"),
    [*product(["x", "w", "b", "r", "xr", "wbr", "xwbr"], SOME), *(("xwbr", name) for name in ACTIVATIONS)],
)
def test_gradients_are_those_of_torch(wanted: str, activation: str) -> None:
    case = CASES["plain 3x3"]
    tensors = dict(zip("xwbr", operands(case, True), strict=True))
    for name in wanted:
        tensors[name].requires_grad_()
    y, expected = call(case, activation)(*tensors.values()), apart(case, activation)(*tensors.values())
    dy = torch.randn_like(y)
    asked = [tensors[name] for name in wanted]
    for one, other in zip(torch.autograd.grad(y, asked, dy), torch.autograd.grad(expected, asked, dy), strict=True):
        torch.testing.assert_close(one, other)


def saved_by(run: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the tensors saved for backward."""
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def test_relu_keeps_its_output_and_silu_the_sums() -> None:
    """Neither saves the residual; with a residual only, nothing of the output's size is saved."""
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    residual = torch.randn(2, 4, 4, 4, requires_grad=True)
    shapes = {
        name: saved_by(lambda name=name: polyconv.conv2d(x, w, activation=name, residual=residual))  # type: ignore[misc]
        for name in ACTIVATIONS
    }
    kept = [(2, 3, 6, 6), (4, 3, 3, 3)]
    assert shapes == {name: kept if name == "none" else [*kept, (2, 4, 4, 4)] for name in ACTIVATIONS}


def test_silu_is_fused_only_where_no_gradient_is_wanted() -> None:
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    residual, seen = torch.randn(2, 4, 4, 4), []
    for enabled in (False, True):
        recorder = Recorder()
        with override("cpu", recorder), torch.set_grad_enabled(enabled):
            polyconv.conv2d(x, w, activation="silu", residual=residual)
        seen += [(p.activation, p.residual) for p in recorder.problems]
    assert seen == [(Activation.SILU, True), (Activation.NONE, True)]


def test_the_gradient_of_a_sum_is_never_copied() -> None:
    """Without an activation the gradient reaches the backend as one expanded number."""
    x, w = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    residual = torch.randn(2, 4, 4, 4, requires_grad=True)
    recorder = Recorder()
    with override("cpu", recorder):
        polyconv.conv2d(x, w, residual=residual).sum().backward()
    assert [p.y_strides for p in recorder.problems[1:]] == [(0, 0, 0, 0)] * 2


# ---- the module


def test_the_module() -> None:
    module = polyconv.Conv2d(3, 4, 3, padding=1, activation="relu")
    x, residual = torch.randn(2, 3, 6, 6), torch.randn(2, 4, 6, 6)
    sums = F.conv2d(x, module.weight, module.bias, padding=1)
    torch.testing.assert_close(module(x), F.relu(sums))
    torch.testing.assert_close(module(x, residual), F.relu(sums + residual))
    torch.testing.assert_close(module(x, residual=residual), F.relu(sums + residual))
    assert repr(module) == "Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=relu)"
    assert list(module.state_dict()) == ["weight", "bias"]
    assert copy.deepcopy(module).activation == "relu"


def test_the_activation_can_be_set_on_an_instance() -> None:
    module, other = polyconv.Conv2d(3, 4, 3), polyconv.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 6, 6)
    module.activation = "silu"
    torch.testing.assert_close(module(x), F.silu(F.conv2d(x, module.weight, module.bias)))
    assert other.activation is None
    assert repr(other) == repr(nn.Conv2d(3, 4, 3))


def test_restore_leaves_a_module_with_an_activation_alone() -> None:
    net = nn.Sequential(polyconv.Conv2d(3, 4, 3, activation="relu"), polyconv.Conv2d(4, 4, 3))
    result = polyconv.restore(net)
    assert str(result) == (
        "restored 1 of 2 convolutions\n  left alone: 0: it applies relu, which torch.nn.Conv2d would leave out"
    )
    assert [type(module) for module in net] == [polyconv.Conv2d, nn.Conv2d]


# ---- explain


def test_explain_shows_the_epilogue() -> None:
    module = polyconv.Conv2d(3, 8, 3, activation="silu")
    with override("cpu", Recorder()):
        text = str(polyconv.explain(module, (2, 3, 16, 16), residual=torch.randn(2, 8, 14, 14)))
    assert text == (
        "Conv2d\n"
        "  fprop 2x3x16x16, 8 channels, kernel 3x3, bias, residual, silu\n"
        "    recorded\n"
        "  dgrad 2x3x16x16, 8 channels, kernel 3x3\n"
        "    recorded\n"
        "  wgrad 2x3x16x16, 8 channels, kernel 3x3, bias\n"
        "    recorded\n"
        "  where a gradient is wanted, silu is applied apart: its derivative needs the sums before it"
    )


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_the_problems_are_those_that_run(activation: str) -> None:
    module = polyconv.Conv2d(3, 8, 3, stride=2, activation=activation).to(memory_format=torch.channels_last)
    x, residual = torch.randn(2, 3, 9, 8, requires_grad=True), torch.randn(2, 8, 4, 3)
    said = [one.problem for one in polyconv.explain(module, x, residual).convolutions[0].passes]
    recorder = Recorder()
    with override("cpu", recorder):
        y = module(x, residual)
        y.backward(torch.randn_like(y))
    assert recorder.problems == said


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 1), (1, 0, 0)])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_vmap(in_dims: tuple[int | None, ...], activation: str) -> None:
    shapes = (2, 4, 7, 6), (6, 4, 3, 3), (2, 6, 5, 4)
    batched = [
        torch.randn(*shape) if dim is None else torch.randn(3, *shape).movedim(0, dim)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]

    def fused(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return polyconv.conv2d(x, w, activation=activation, residual=residual)

    found = torch.func.vmap(fused, in_dims)(*batched)
    for place in range(3):
        one = [t if dim is None else t.select(dim, place) for t, dim in zip(batched, in_dims, strict=True)]
        torch.testing.assert_close(found[place], fused(*one), atol=1e-4, rtol=1e-4)
