"""The operators as PyTorch sees them: schema, fake tensors, autograd."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import polyconv
from commands import python
from geometries import CASES, Case, cases
from nightly import sampled
from polyconv import dispatch
from polyconv.arguments import Geometry, normalise, suggests_channels_last
from polyconv.backend import override
from recording import Calls, Recorder

OPCHECKED = ["plain 3x3", "strided, odd remainder", "groups", "four sides", "cropped", "circular, whole image"]
# Negative sides with a mode other than zeros are cropped before the operator.
OPERATOR_CASES = list(CASES)


def arguments(case: Case, requires_grad: bool = False) -> dict[str, tuple[Any, ...]]:
    """Arguments for each of the three operators."""
    x, w, bias = case.tensors()
    geometry = normalise(case.w[2:], **case.kwargs)
    dy = torch.randn(x.shape[0], w.shape[0], *geometry.out_size(x.shape[2:], w.shape[2:]), dtype=x.dtype)
    for tensor in (x, w, bias, dy):
        if tensor is not None:
            tensor.requires_grad_(requires_grad)
    last = suggests_channels_last(x.shape, x.stride())
    return {
        "fprop": (x, w, bias, *geometry),
        "dgrad": (dy, w, list(x.shape), last, *geometry),
        "wgrad": (dy, x, list(w.shape), False, case.bias, *geometry),
    }


@pytest.mark.parametrize(("kind", "name"), sampled(product(("fprop", "dgrad", "wgrad"), OPCHECKED), 8, "opcheck"))
def test_opcheck(kind: str, name: str) -> None:
    torch.library.opcheck(getattr(dispatch, kind), arguments(CASES[name], requires_grad=True)[kind])


def test_opcheck_channels_last() -> None:
    torch.library.opcheck(dispatch.fprop, arguments(CASES["channels_last"], requires_grad=True)["fprop"])


def assert_same_layout(real: Tensor, fake: Tensor) -> None:
    assert (real.shape, real.stride(), real.dtype, real.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)


@given(cases())
@settings(max_examples=40)
def test_fake_agrees_with_real(case: Case) -> None:
    if len(case.x) == 3 or (case.kwargs["padding_mode"] != "zeros" and "-" in str(case.kwargs["padding"])):
        return
    for kind, args in arguments(case).items():
        op = getattr(dispatch, kind)
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        for one, other in zip(*([r] if isinstance(r, Tensor) else r for r in (real, fake)), strict=True):
            assert_same_layout(one, other)


def test_the_gradient_of_a_sum_is_never_copied() -> None:
    """W2 at full size on fake tensors: dense, it would take 8.6 GB. (Autograd of fake CUDA tensors needs a GPU.)"""
    with FakeTensorMode():
        x = torch.empty(16, 16, 1024, 1024, requires_grad=True)
        w = torch.empty(128, 16, 3, 3, requires_grad=True)
        y = polyconv.conv2d(x, w)
        with Calls() as calls:
            y.sum().backward()
    assert [name for name in calls.names if "conv2d" in name] == [
        "polyconv.conv2d_dgrad.default",
        "polyconv.conv2d_wgrad.default",
    ]
    calls.assert_nothing_laid_out(y.numel())


def test_fake_cuda_tensors() -> None:
    """Shapes for a GPU are computed on a machine without one."""
    with FakeTensorMode():
        x = torch.empty(8, 32, 512, 512, device="cuda:0")
        y = polyconv.conv2d(x, torch.empty(64, 32, 5, 9, device="cuda:0"), padding=(2, 4), dilation=(2, 3))
    assert y.shape == (8, 64, 508, 496)
    assert y.device == torch.device("cuda:0")


# ---- autograd


def call(case: Case) -> Any:
    return lambda x, w, *bias: polyconv.conv2d(x, w, *bias, **case.kwargs)


def leaves(case: Case) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in case.tensors() if t is not None]


# gradcheck's finite differences write into the input, which an expanded tensor forbids.
DIFFERENTIABLE = [name for name in CASES if CASES[name].layout != "expanded"]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str) -> None:
    assert gradcheck(call(CASES[name]), leaves(CASES[name]), fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradgradcheck(name: str) -> None:
    assert gradgradcheck(call(CASES[name]), leaves(CASES[name]), fast_mode=True, check_fwd_over_rev=True)


def test_forward_mode_without_grad() -> None:
    """A tangent counts even if nothing requires a gradient."""
    x, w, b = (t.detach() for t in leaves(CASES["plain 3x3"]))
    tangents = [torch.randn_like(t) for t in (x, w, b)]
    with forward_ad.dual_level():
        for dx, dw, db in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
            args = [
                forward_ad.make_dual(t, tangent) if dual else t
                for t, tangent, dual in zip((x, w, b), tangents, (dx, dw, db), strict=True)
            ]
            ours = forward_ad.unpack_dual(polyconv.conv2d(*args)).tangent
            theirs = forward_ad.unpack_dual(F.conv2d(*args)).tangent
            torch.testing.assert_close(ours, theirs)


def test_third_derivative_of_the_bilinear_form_vanishes() -> None:
    x, w = leaves(CASES["no bias"])
    (dx,) = torch.autograd.grad(polyconv.conv2d(x, w).pow(2).sum(), x, create_graph=True)
    (dw,) = torch.autograd.grad(dx.sum(), w, create_graph=True)
    assert torch.autograd.grad(dw.sum(), w)[0].isfinite().all()


@pytest.mark.parametrize(
    ("wanted", "kinds", "bias_in_wgrad"),
    [
        ("x", ["dgrad"], None),
        ("w", ["wgrad"], False),
        ("wb", ["wgrad"], True),
        ("b", [], None),
        ("xb", ["dgrad"], None),
        ("xwb", ["dgrad", "wgrad"], True),
        ("xw", ["dgrad", "wgrad"], False),
    ],
)
def test_only_what_is_asked_for_runs(wanted: str, kinds: list[str], bias_in_wgrad: bool | None) -> None:
    tensors = dict(zip("xwb", (torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), torch.randn(3)), strict=True))
    for name in wanted:
        tensors[name].requires_grad_()
    recorder = Recorder()
    with override("cpu", recorder):
        y = polyconv.conv2d(*tensors.values())
        y.backward(torch.randn_like(y))
    assert recorder.kinds == ["fprop", *kinds]
    assert [p.bias for p in recorder.problems if p.kind.value == "wgrad"] == (
        [] if bias_in_wgrad is None else [bias_in_wgrad]
    )
    assert all((tensors[name].grad is not None) == (name in wanted) for name in tensors)


def test_no_grad_saves_nothing() -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3, requires_grad=True)
    with torch.no_grad():
        assert polyconv.conv2d(x, w).grad_fn is None
    with torch.inference_mode():
        assert polyconv.conv2d(x, w).is_inference()


# ---- direct calls of the operators, as in exported graphs, are checked as well


def test_a_wrong_gradient_size_is_refused() -> None:
    geometry = Geometry()
    with pytest.raises(RuntimeError, match=r"output's size \[1, 3, 3, 3\]; got \[1, 3, 4, 4\]"):
        dispatch.dgrad(torch.randn(1, 3, 4, 4), torch.randn(3, 2, 3, 3), [1, 2, 5, 5], False, *geometry)
    with pytest.raises(RuntimeError, match=r"output's size"):
        dispatch.wgrad(torch.randn(1, 3, 4, 4), torch.randn(1, 2, 5, 5), [3, 2, 3, 3], False, True, *geometry)


def test_the_operator_takes_a_border_of_a_cropped_image() -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    y = dispatch.fprop(x, w, None, *Geometry(padding=(-1, 2, 0, 0), padding_mode="reflect"))
    torch.testing.assert_close(y, F.conv2d(F.pad(x[:, :, 1:], (0, 0, 0, 2), mode="reflect"), w), rtol=0, atol=1e-4)


def test_override_is_undone() -> None:
    script = """
import torch, polyconv
from polyconv.backend import backend_for, override
cpu = torch.device("cpu")
with override("cpu", "one"):
    with override("cpu", "two"):
        assert backend_for(cpu) == "two"
    assert backend_for(cpu) == "one"
assert backend_for(cpu).name == "cpu"
"""
    python(script)
