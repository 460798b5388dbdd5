"""polyconv.conv2d against torch and against the float64 reference: values, gradients, memory formats, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import polyconv
from geometries import CASES, Case, cases, laid_out
from polyconv.arguments import normalise
from polyconv.backend import override
from polyconv.numerics import reference
from recording import Recorder


def check(case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Values and all gradients agree with the reference, and no input is changed."""
    x, w, bias = case.tensors(dtype)
    before = [t.clone() for t in (x, w) if t is not None]
    leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
    y = polyconv.conv2d(*leaves, **case.kwargs)

    moves = normalise(case.w[2:], **case.kwargs)
    batched = x if x.dim() == 4 else x.unsqueeze(0)
    expected = reference.fprop(moves, batched, w, bias)
    torch.testing.assert_close(y.double().view(expected.shape), expected)
    assert y.dim() == x.dim()

    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    batched_dy = dy.view(expected.shape)
    wanted = [
        reference.dgrad(moves, batched_dy, w, batched.shape).view(x.shape),
        *reference.wgrad(moves, batched, batched_dy, case.w),
    ]
    for grad, want, leaf in zip(grads, wanted, leaves, strict=False):
        torch.testing.assert_close(grad.double(), want)
        assert grad.shape == leaf.shape
    for then, now in zip(before, (x, w), strict=True):
        assert torch.equal(then, now)


@pytest.mark.parametrize("name", CASES)
def test_named(name: str) -> None:
    check(CASES[name])


@given(cases())
def test_any_geometry(case: Case) -> None:
    check(case)


@given(cases().filter(lambda case: not isinstance(case.kwargs["padding"], list)))
def test_any_geometry_that_torch_has(case: Case) -> None:
    """Against torch's own module, which shares no code with polyconv, argument handling included."""
    x, w, bias = case.tensors()
    # One number for both axes as an int: given (1,), nn.Conv2d(padding="same", padding_mode="reflect") pads one axis.
    kwargs = {k: v if not isinstance(v, list) else v[0] if len(v) == 1 else tuple(v) for k, v in case.kwargs.items()}
    conv = torch.nn.Conv2d(w.shape[1] * kwargs["groups"], w.shape[0], w.shape[2:], bias=case.bias, **kwargs).double()
    with torch.no_grad():
        conv.weight.copy_(w)
        if bias is not None:
            conv.bias.copy_(bias)
    torch.testing.assert_close(polyconv.conv2d(x, w, bias, **case.kwargs), conv(x))


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain 3x3", "four sides", "reflect", "circular, whole image"])
def test_other_dtypes_fall_back_to_aten(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, w, bias = case.tensors(dtype)
    y = polyconv.conv2d(x, w, bias, **case.kwargs)
    assert y.dtype == dtype
    expected = reference.fprop(normalise(case.w[2:], **case.kwargs), x, w, bias)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


# ---- memory formats


@pytest.mark.parametrize("kernel", [(3, 2), (1, 1)])
@pytest.mark.parametrize("w_last", [False, True])
@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last", "sliced", "transposed", "sliced channels_last"])
def test_output_has_the_strides_that_torch_gives_it(x_layout: str, w_last: bool, kernel: tuple[int, int]) -> None:
    x = laid_out((2, 4, 6, 5), x_layout.split()[-1], torch.float32)
    if x_layout == "sliced channels_last":
        x = x[:, :, ::2]
    w = torch.randn(6, 4, *kernel)
    if w_last:
        w = w.to(memory_format=torch.channels_last)
    assert polyconv.conv2d(x, w).stride() == F.conv2d(x, w).stride()


def test_gradients_have_the_memory_format_of_their_tensors() -> None:
    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(6, 4, 3, 3, requires_grad=True)
    dx, dw = torch.autograd.grad(polyconv.conv2d(x, w).sum(), (x, w))
    assert dx.stride() == x.stride()
    assert dw.stride() == w.stride()


# ---- empty tensors


def test_empty_batch() -> None:
    x = torch.randn(0, 3, 6, 5, requires_grad=True)
    w, b = torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    y = polyconv.conv2d(x, w, b)
    assert y.shape == (0, 4, 4, 3)
    dx, dw, db = torch.autograd.grad(y.sum(), (x, w, b))
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(w))
    assert torch.equal(db, torch.zeros_like(b))


def test_no_input_channels_leave_the_bias() -> None:
    x, w, b = torch.randn(2, 0, 5, 5), torch.randn(4, 0, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    y = polyconv.conv2d(x, w, b)
    assert torch.equal(y, b.view(1, 4, 1, 1).expand(2, 4, 3, 3))
    assert torch.equal(polyconv.conv2d(x, w), torch.zeros(2, 4, 3, 3))
    dw, db = torch.autograd.grad(y.sum(), (w, b))
    assert dw.shape == w.shape
    assert torch.equal(db, torch.full((4,), 18.0))


# ---- cropping


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_negative_sides_crop_before_the_mode_pads(mode: str) -> None:
    x, w = torch.randn(1, 2, 8, 9, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    y = polyconv.conv2d(x, w, padding=(-2, 1, 2, -3), padding_mode=mode)
    cropped = x[:, :, 2:, :6]
    torch.testing.assert_close(y, polyconv.conv2d(cropped, w, padding=(0, 1, 2, 0), padding_mode=mode))


# ---- errors: torch's type if torch raises one, with a message that names the value


X, W = (2, 4, 6, 5), (6, 4, 3, 2)


def call(function: Any, x: Any, w: Any, bias: Any, kwargs: dict[str, Any]) -> Any:
    made = [torch.randn(t) if isinstance(t, tuple) else t for t in (x, w, bias)]
    return function(*made, **kwargs)


ERRORS = [
    (X, W, None, {"stride": 0}, "stride.*got 0"),
    (X, W, None, {"stride": 1.5}, "stride must be made of integers; got 1.5"),
    (X, W, None, {"stride": True}, "stride must be made of integers; got True"),
    (X, W, None, {"stride": None}, "stride.*NoneType"),
    (X, W, None, {"stride": (1, 2, 3)}, r"stride takes one integer or two.*\(1, 2, 3\)"),
    (X, W, None, {"stride": ()}, "got 0"),
    (X, W, None, {"stride": "2"}, "stride must be made of integers; got '2'"),
    (X, W, None, {"dilation": (1, 0)}, r"dilation.*\(1, 0\)"),
    (X, W, None, {"padding": -1}, "four sides"),
    (X, W, None, {"padding": (1, 2, 3)}, r"four sides \(top, bottom, left, right\); got 3"),
    (X, W, None, {"padding": "full"}, "'full'; use 'same'"),
    (X, W, None, {"padding": "same", "stride": 2}, "strided"),
    (X, W, None, {"groups": 0}, "groups"),
    (X, W, None, {"groups": 1.0}, "groups must be made of integers"),
    (X, W, None, {"groups": 3}, "12 channels.*got 4"),
    (X, W, None, {"groups": 7}, "at least 7"),
    (X, (5, 2, 1, 1), None, {"groups": 2}, "divisible by 2"),
    (X, (6, 3, 3, 2), None, {}, "3 channels.*got 4"),
    (X, (6, 4, 7, 7), None, {}, "padded image is 6 x 5.*spans 7 x 7"),
    ((0, 4, 6, 5), (6, 4, 7, 7), None, {}, "padded image is 6 x 5"),
    (X, (6, 4, 0, 2), None, {}, "Kernel size"),
    (X, (0, 4, 3, 2), None, {}, "at least 1"),
    (X, W, (5,), {}, "bias.*6 elements"),
    (X, W, (6, 1), {}, "bias.*6 elements"),
    (X, W, "bias", {}, "'bias' must be a Tensor, not str"),
    ((5, 5), W, None, {}, "Expected 3D"),
    ((1, 1, 4, 6, 5), W, None, {}, "Expected 3D"),
    (X, (6, 4, 3), None, {}, "4-dimensional weight"),
    (X, None, None, {}, "'weight' must be a Tensor, not NoneType"),
    ([1.0], W, None, {}, "'input' must be a Tensor, not list"),
    ((2, 4, 0, 5), W, None, {"padding": 2}, "0 x 5 pixels"),
    (X, torch.randn(6, 4, 3, 2, dtype=torch.float64), None, {}, "float32 and torch.float64"),
    (X, W, torch.randn(6, dtype=torch.float64), {}, "bias should be the same type"),
]


@pytest.mark.parametrize(("x", "w", "bias", "kwargs", "words"), ERRORS, ids=[str(e[3]) + e[4][:20] for e in ERRORS])
def test_error_has_torchs_type_and_our_words(x: Any, w: Any, bias: Any, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        call(F.conv2d, x, w, bias, kwargs)
    with pytest.raises(type(torchs.value), match=words):
        call(polyconv.conv2d, x, w, bias, kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"padding": (0, 5), "padding_mode": "reflect"}, "smaller than the image.*5 and 5 along a width of 5"),
        ({"padding": (7, 0), "padding_mode": "circular"}, "wrap around once.*7 and 7 along a height of 6"),
        ({"padding": (-4, -3, 0, 0)}, "crops more than there is: -4 and -3 along a height of 6"),
        ({"padding": (-4, -3, 0, 0), "padding_mode": "reflect"}, "crops more than there is"),
    ],
)
def test_error_beyond_torch(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(polyconv.conv2d, X, W, None, kwargs)


def test_unknown_padding_mode() -> None:
    with pytest.raises(ValueError, match="zeros, reflect, replicate, circular; got 'mirror'"):
        call(polyconv.conv2d, X, W, None, {"padding_mode": "mirror"})


def test_complex_is_refused() -> None:
    with pytest.raises(RuntimeError, match="real numbers only"):
        polyconv.conv2d(torch.randn(X).cfloat(), torch.randn(W).cfloat())


def test_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        polyconv.conv2d(torch.randn(X), torch.randn(W, device="meta"))


# ---- no copies


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Every operator that returns a tensor with new storage, and its size in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in held:
                self.sizes.append((str(func), t.untyped_storage().nbytes() // t.element_size()))
        return result


def test_gradient_of_sum_is_never_materialised() -> None:
    x = torch.randn(2, 3, 20, 20, requires_grad=True)
    w, b = torch.randn(64, 3, 3, 3, requires_grad=True), torch.randn(64, requires_grad=True)
    recorder = Recorder()
    with override("cpu", recorder):
        y = polyconv.conv2d(x, w, b)
        total = y.sum()
        recorder.problems.clear()
        recorder.tensors.clear()
        with Allocations() as seen:
            total.backward()
    assert recorder.kinds == ["dgrad", "wgrad"]
    for problem, tensors in zip(recorder.problems, recorder.tensors, strict=True):
        assert tensors["y"].stride() == (0, 0, 0, 0)
        assert tensors["y"].untyped_storage().nbytes() == 4
        assert problem.y_strides == (0, 0, 0, 0)
    assert max(size for _, size in seen.sizes) < y.numel() / 2, seen.sizes


@pytest.mark.parametrize("layout", ["sliced", "expanded", "transposed", "channels_last"])
def test_input_reaches_the_backend_as_it_is(layout: str) -> None:
    x, recorder = laid_out((2, 3, 8, 8), layout, torch.float32), Recorder()
    with override("cpu", recorder):
        polyconv.conv2d(x, torch.randn(4, 3, 3, 3), padding=(1, 0, 2, 1), padding_mode="reflect")
    assert recorder.tensors[0]["x"].data_ptr() == x.data_ptr()
    assert recorder.problems[0].x_strides == x.stride()


def test_batchless_input_is_a_view() -> None:
    x, recorder = torch.randn(3, 8, 8), Recorder()
    with override("cpu", recorder):
        polyconv.conv2d(x, torch.randn(4, 3, 3, 3))
    assert recorder.tensors[0]["x"].data_ptr() == x.data_ptr()
    assert recorder.problems[0].x_shape == (1, 3, 8, 8)


def test_alignment_is_part_of_the_problem() -> None:
    w, recorder = torch.randn(4, 3, 3, 3), Recorder()
    with override("cpu", recorder):
        polyconv.conv2d(torch.randn(1, 3, 8, 8), w)
        polyconv.conv2d(torch.randn(3 * 64 + 1)[1:].view(1, 3, 8, 8), w)
    assert [problem.vector_aligned for problem in recorder.problems] == [True, False]
