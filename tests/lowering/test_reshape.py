"""Convolutions of patches as 1x1 convolutions: which ones, correct results for any layout, and modelled times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import grad

import polyconv
from polyconv.backend import override
from polyconv.cuda.backend import CudaBackend
from polyconv.cuda.planner import DEVICES, CudaDevice
from polyconv.cuda.planner.cost import LAUNCH_US
from polyconv.cuda.planner.volumes import BESIDE_EFFICIENCY, is_ahead, planned
from polyconv.lowering.base import Lowering
from polyconv.lowering.lower import ahead_on, lower
from polyconv.lowering.reshape import Patches
from polyconv.lowering.widen import Widened
from polyconv.problem import Pass, Problem
from polyconv.selection import PlanError
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONV = {4: (F.conv2d, grad.conv2d_input, grad.conv2d_weight), 5: (F.conv3d, grad.conv3d_input, grad.conv3d_weight)}


def lowering_of(problem: Problem) -> Patches:
    found = lower(problem, "cuda")
    assert isinstance(found, Patches), problem
    return found


def by_pytorch(problem: Problem, tensors: dict[str, Tensor]) -> None:
    """The run of a problem on tensors as it describes them, in their dtype."""
    assert tensors["x"].shape == problem.x_shape
    assert (tensors["x"].stride(), tensors["y"].stride()) == (problem.x_strides, problem.y_strides)
    forward, to_input, to_weight = CONV[len(problem.x_shape)]
    x, y = tensors["x"], tensors["y"]
    if problem.kind is Pass.FPROP:
        y.copy_(forward(x, tensors["w"], tensors.get("bias"), problem.stride) + tensors.get("residual", 0))
    elif problem.kind is Pass.DGRAD:
        x.copy_(to_input(x.shape, tensors["w"], y, problem.stride))
    else:
        tensors["dw"].copy_(to_weight(x, problem.w_shape, y, problem.stride))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_patches(data: st.DataObject) -> None:
    """Any kernel, image, layout of each tensor and pass; rest rows of the image have no gradient."""
    draw = data.draw
    rank, kind = draw(st.sampled_from([2, 3])), draw(st.sampled_from(list(Pass)))
    kernel = draw(
        st.sampled_from([(8, 8), (5, 11), (16, 8), (7, 8)] if rank == 2 else [(2, 8, 8), (3, 4, 5), (1, 8, 8)])
    )
    grid = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    whole = prod(grid) == 1
    rest = [0 if whole else draw(st.integers(0, taps - 1)) for taps in kernel]
    channels = draw(st.sampled_from([4, 6] if kernel in ((8, 8), (2, 8, 8), (16, 8)) else [7]))
    size = tuple(n * taps + more for n, taps, more in zip(grid, kernel, rest, strict=True))
    x = torch.randn(draw(st.integers(1, 3)), channels, *size, dtype=torch.float64)
    w = torch.randn(draw(st.integers(1, 9)), channels, *kernel, dtype=torch.float64)
    if draw(st.booleans()):
        w = w.contiguous(memory_format=LAST[x.dim()])
    if w.is_contiguous(memory_format=LAST[x.dim()]) if whole else draw(st.booleans()):
        x = x.contiguous(memory_format=LAST[x.dim()])
    y = torch.randn(x.shape[0], w.shape[0], *grid, dtype=torch.float64)
    if draw(st.booleans()):
        y = y.contiguous(memory_format=LAST[x.dim()])
    strides = {"x_strides": x.stride(), "w_strides": w.stride(), "y_strides": y.stride()}
    residual = kind is Pass.FPROP and draw(st.booleans())
    problem = Problem.make(kind, x.shape, w.shape, stride=kernel, dtype="bfloat16", residual=residual, **strides)
    lowering = lower(problem, "cuda")
    if not isinstance(lowering, Patches):
        assert not whole or prod(w.shape[1:]) % 8
        assert whole or kind is Pass.WGRAD or prod(w.shape[1:]) < 128
        lowering = Patches(problem)
    (part,) = lowering.problems
    expected = {"x": x.clone(), "y": y.clone(), "w": w, "dw": w.clone(), "residual": torch.randn_like(y)}
    if not residual:
        del expected["residual"]
    given_tensors = {name: tensor.clone() for name, tensor in expected.items()}
    by_pytorch(problem, expected)
    lowering.adapt({part: lambda tensors: by_pytorch(part, tensors)})(given_tensors)
    for name, tensor in expected.items():
        torch.testing.assert_close(given_tensors[name], tensor)


EMBEDDINGS = {
    "ViT-B/16": ((64, 3, 224, 224), (768, 3, 16, 16)),
    "one image": ((1, 3, 224, 224), (768, 3, 16, 16)),
    "ViT-H/14": ((64, 3, 224, 224), (1280, 3, 14, 14)),
    "video": ((4, 3, 32, 448, 448), (1280, 3, 2, 14, 14)),
    "patches of video": ((8192, 3, 2, 14, 14), (1280, 3, 2, 14, 14)),
}


def us(problem: Problem, lowering: Lowering | None, device: CudaDevice) -> float:
    """Modelled time of a plan, and of the copies around it [us]."""
    copied = launches = 0
    if isinstance(lowering, Widened):
        problem = lowering.problems[0]
    elif isinstance(lowering, Patches):
        copied, launches = lowering.copied * 2 * problem.element_bytes * prod(problem.x_shape), lowering.copied
        (problem,) = lowering.problems
    try:
        own = planned(problem, device).cost_us
    except PlanError:
        return inf
    return own + copied / (BESIDE_EFFICIENCY * device.dram_gbs * 1e3) + launches * LAUNCH_US


def embeddings() -> Iterator[tuple[str, Problem]]:
    for name, (x, w) in EMBEDDINGS.items():
        for kind, dtype in product(Pass, ("float16", "bfloat16", "float32")):
            problem = Problem.make(kind, x, w, stride=w[2:], dtype=dtype)
            for one in (problem, problem.channels_last()) if len(x) == 4 else (problem,):
                if isinstance(lower(one, "cuda"), Patches):
                    yield name, one


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_patches_are_modelled_to_be_ahead(device: CudaDevice) -> None:
    """By the lowering's rules alone, except in bfloat16 without tensor cores for it: there the cost model decides."""
    found, left = set(), set()
    for name, problem in embeddings():
        as_it_is = lower(problem, "cuda", lambda lowering, other: False)
        before, now = us(problem, as_it_is, device), us(problem, lower(problem, "cuda"), device)
        if isinstance(lower(problem, "cuda", partial(is_ahead, device=device)), Patches):
            found.add(name)
        else:
            left.add(problem.dtype)
            before, now = now, us(problem, as_it_is, device)
        # Casts around a problem that is widened are left out here.
        assert now <= before or isinstance(as_it_is, Widened), f"{name}: {problem}: {before:.0f} -> {now:.0f} us"
    assert found == set(EMBEDDINGS)
    assert left == (set() if device.ampere else {"bfloat16"})


@pytest.mark.parametrize(("name", "taken"), [("t4", False), ("a100", True)])
def test_the_backend_of_a_device_judges(name: str, taken: bool) -> None:
    """A T4 multiplies bfloat16 without tensor cores, an A100 with them."""
    device, (x, w) = DEVICES[name], EMBEDDINGS["ViT-B/16"]
    problem = Problem.make("fprop", x, w, stride=w[2:], dtype="bfloat16")
    backend = SimpleNamespace(name="cuda", is_ahead=partial(CudaBackend.is_ahead, SimpleNamespace(description=device)))
    with override("cpu", backend):  # type: ignore[arg-type]
        assert isinstance(lower(problem, "cuda", ahead_on(torch.device("cpu"))), Patches) is taken
    conv = polyconv.Conv2d(3, w[0], w[2:], stride=w[2:], dtype=torch.bfloat16)
    explained = polyconv.explain(conv, x, device=device)
    assert ("1x1 convolution of copied patches" in explained.convolutions[0].passes[0].text) is taken


def test_what_is_no_patch() -> None:
    problem = Problem.make("fprop", (2, 3, 64, 64), (8, 3, 16, 16), stride=(16, 16), dtype="float16")
    assert isinstance(lower(problem, "cuda"), Patches)
    assert lower(problem, "cpu") is None
    for other in (
        replace(problem, dtype="float32"),
        replace(problem, torch_format="float16"),
        replace(problem, stride=(16, 8)),
        replace(problem, padding=(1, 0, 0, 0)),
        replace(problem, w_strides=(768, 256, 1, 16)),
    ):
        assert not isinstance(lower(other, "cuda"), Patches)


def test_as_machine_code() -> None:
    run_in_virtual_gpu(_layers, timeout=300)


def _layers() -> None:
    """Layers with gradients on a GPU, also frozen."""
    torch.manual_seed(0)
    layers = (
        (polyconv.Conv2d(3, 24, 8, stride=8).half(), (2, 3, 33, 40)),
        (polyconv.Conv2d(3, 16, 16, stride=16).half().to(memory_format=torch.channels_last), (2, 3, 32, 48)),
        (polyconv.Conv2d(3, 16, 8, stride=8), (1, 3, 24, 24)),
        (polyconv.Conv3d(3, 16, (2, 7, 8), stride=(2, 7, 8)).half(), (1, 3, 4, 14, 17)),
        (polyconv.Conv3d(3, 16, (2, 4, 8), stride=(2, 4, 8)).half(), (9, 3, 2, 4, 8)),
    )
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        for conv, shape in layers:
            x = torch.randn(shape, dtype=conv.weight.dtype, requires_grad=True)
            y = conv(x)
            dy = torch.randn_like(y)
            found = y, *torch.autograd.grad(y, (x, conv.weight, conv.bias), dy)
            exact_x, *exact = (one.detach().double().requires_grad_() for one in (x, conv.weight, conv.bias))
            exact_y = CONV[x.dim()][0](exact_x, *exact, conv.stride)
            expected = exact_y, *torch.autograd.grad(exact_y, (exact_x, *exact), dy.double())
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=2e-3 * float(other.abs().max()))
            with torch.no_grad():
                polyconv.freeze(conv)
                assert torch.equal(conv(x), y)
                assert torch.equal(conv(x), y)
