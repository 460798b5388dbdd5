"""Half precision under autocast: followed as by torch; on a CPU it can be overruled."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import polyconv
from fresh import run_fresh
from geometries import CASES
from polyconv import dispatch, settings
from polyconv.arguments import Geometry
from polyconv.backend import override
from polyconv.dispatch import execute
from polyconv.dispatch.transforms.autocast import autocast_kernel
from polyconv.problem import Pass
from recording import Recorder
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

HALF = [torch.bfloat16, torch.float16]

both = pytest.mark.parametrize("Conv2d", [nn.Conv2d, polyconv.Conv2d], ids=["torch", "polyconv"])
every = pytest.mark.parametrize("kind", [nn.Conv2d, polyconv.Conv2d, polyconv.Conv1d, polyconv.Conv3d])
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAYOUTS = {2: (torch.contiguous_format, torch.channels_last), 3: (torch.contiguous_format, torch.channels_last_3d)}


def network(Conv2d: type[nn.Conv2d]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), Conv2d(16, 4, 3, stride=2))


# ---- overruled


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("axes", FUNCTIONS)
def test_not_allowed_autocast_computes_in_float32(axes: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 3, *[6] * axes, dtype=dtype), torch.randn(4, 3, *[3] * axes)
    b, conv = torch.randn(4, requires_grad=True), getattr(polyconv, f"conv{axes}d")
    recorder = Recorder()
    with polyconv.allow_low_precision(False), override("cpu", recorder), torch.autocast("cpu", dtype=dtype):
        y = conv(x.requires_grad_(), w.requires_grad_(), b)
        y.sum().backward()
    assert y.dtype == torch.float32
    assert {problem.dtype for problem in recorder.problems} == {"float32"}
    assert x.grad is not None
    assert x.grad.dtype == dtype
    torch.testing.assert_close(y, conv(x.float(), w, b))


def test_explain_says_that_the_dtype_of_the_region_is_not_followed() -> None:
    conv = polyconv.Conv2d(3, 4, 3)
    with polyconv.allow_low_precision(False), torch.autocast("cpu", dtype=torch.bfloat16):
        text = str(polyconv.explain(conv, (2, 3, 8, 8)))
        assert "torch.autocast's torch.bfloat16 is not followed: computes in torch.float32" in text
        assert "polyconv.allow_low_precision()" in text
        with torch.autocast("cpu", enabled=False):
            assert "autocast" not in str(polyconv.explain(conv, (2, 3, 8, 8)))
    assert "autocast" not in str(polyconv.explain(conv, (2, 3, 8, 8)))


def test_explain_says_so_beside_other_remarks() -> None:
    with polyconv.allow_low_precision(False), torch.autocast("cpu", dtype=torch.bfloat16):
        (explained,) = polyconv.explain(polyconv.Conv2d(3, 4, 3, activation="silu"), (2, 3, 8, 8)).convolutions
    assert "torch.bfloat16 is not followed" in explained.note
    assert "silu is applied apart" in explained.note


def test_explain_sees_a_region_inside_the_model() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = polyconv.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            with torch.autocast("cpu", dtype=torch.float16):
                return y + self.conv(x)

    with polyconv.allow_low_precision(False):
        first, second = polyconv.explain(Inner(), (2, 3, 8, 8)).convolutions
    assert first.note == ""
    assert "torch.float16 is not followed" in second.note


# ---- the default


@pytest.mark.parametrize("dtype", HALF)
@every
def test_the_result_has_the_dtype_of_the_region(kind: Any, dtype: torch.dtype) -> None:
    conv = kind(3, 16, 3, padding=1)
    axes = len(conv.kernel_size)
    x = torch.randn(2, 3, *[9] * axes, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = conv(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert [t.grad.dtype for t in (x, conv.weight, conv.bias)] == [torch.float32] * 3
    exact = FUNCTIONS[axes](*(t.to(dtype).double() for t in (x, conv.weight, conv.bias)), padding=1)
    torch.testing.assert_close(y, exact.to(dtype))


@both
def test_float64_is_left_alone(Conv2d: type[nn.Conv2d]) -> None:
    conv, x = Conv2d(2, 3, 3).double(), torch.randn(1, 2, 5, 5).double()
    for allowed in (False, True):
        with polyconv.allow_low_precision(allowed), torch.autocast("cpu", dtype=torch.bfloat16):
            assert conv(x).dtype == torch.float64


@both
def test_a_region_can_be_left(Conv2d: type[nn.Conv2d]) -> None:
    conv, x = Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert conv(x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        assert (x[0, 0] @ x[0, 0]).dtype == torch.bfloat16


def test_explain_shows_what_runs() -> None:
    conv = polyconv.Conv2d(3, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explanation = polyconv.explain(conv, (2, 3, 8, 8))
    (explained,) = explanation.convolutions
    assert explained.note == ""
    assert all(one.problem.dtype == "bfloat16" for one in explained.passes)
    assert all("in float32, " in one.text for one in explained.passes)


def check_predicted_errors(dtype: torch.dtype, batch: int, kernel: int, **options: Any) -> None:
    """In all three passes: not below the observed error, and at most five times as large."""
    x = torch.randn(batch, 16, 20, 20).to(dtype).requires_grad_()
    w = torch.randn(32, 16 // options.get("groups", 1), kernel, kernel).to(dtype).requires_grad_()
    y = polyconv.conv2d(x, w, **options)
    dy = torch.randn_like(y)
    got = (y, *torch.autograd.grad(y, (x, w), dy))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact_y = F.conv2d(exact_x, exact_w, **options)
    exact = (exact_y, *torch.autograd.grad(exact_y, (exact_x, exact_w), dy.double()))
    (explained,) = polyconv.explain(polyconv.conv2d, x, w, **options).convolutions
    for one, value, truth in zip(explained.passes, got, exact, strict=True):
        error = (value.double() - truth).abs().max() / truth.square().mean().sqrt()
        predicted = float(one.text.split("predicted error ")[1].split()[0])
        assert predicted / 5 < error < predicted, f"{dtype}, {one.problem}: {error:.5f}, predicted {predicted:.5f}"


def check_all_predicted_errors() -> None:
    torch.manual_seed(0)
    for dtype in HALF:
        check_predicted_errors(dtype, 2, 3)
        check_predicted_errors(dtype, 2, 1)
        check_predicted_errors(dtype, 16, 5, padding=2)
        check_predicted_errors(dtype, 3, 3, dilation=2, groups=2)


def test_the_predicted_error_is_that_of_the_dtype() -> None:
    check_all_predicted_errors()


@pytest.mark.parametrize("dtype", HALF)
def test_an_output_of_one_column_is_right(dtype: torch.dtype) -> None:
    """With AMX, oneDNN's kernels give garbage if a stride goes past such an output."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(1, 3, 19, 9).to(dtype), torch.randn(33, 3, 2, 5).to(dtype), torch.randn(33).to(dtype)
    exact = F.conv2d(x.double(), w.double(), bias.double(), (1, 2), 0, 2)
    y = polyconv.conv2d(x, w, bias, stride=(1, 2), dilation=2)
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def check_all_without_onednn() -> None:
    torch.backends.mkldnn.set_flags(False)
    check_all_predicted_errors()


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "none"])
def test_the_predicted_error_is_that_of_the_dtype_on_other_processors(isa: str) -> None:
    """PyTorch and oneDNN query the processor once per process; here they see a smaller instruction set."""
    if isa == "none":  # without oneDNN
        run_fresh(check_all_without_onednn, ATEN_CPU_CAPABILITY="default")
    else:
        run_fresh(check_all_predicted_errors, ONEDNN_MAX_CPU_ISA=isa, ATEN_CPU_CAPABILITY="avx2")


# ---- training


def losses(model: nn.Module, dtype: torch.dtype | None = None) -> list[float]:
    """A few steps under autocast, with the gradient scaler that float16 needs; in float32 without a dtype."""
    torch.manual_seed(2)
    x, target = torch.randn(4, 3, 12, 12), torch.randn(4, 4, 5, 5)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype is not None)
    found = []
    for _ in range(5):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(x).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@both
def test_training_under_autocast(Conv2d: type[nn.Conv2d], dtype: torch.dtype, allowed: bool) -> None:
    """Losses equal those of float32, up to the rounding of the dtype."""
    with polyconv.allow_low_precision(allowed):
        found = losses(network(Conv2d), dtype)
    assert found[-1] < 0.95 * found[0]
    torch.testing.assert_close(found, losses(network(nn.Conv2d)), rtol=2e-2, atol=0)


@both
def test_the_scaler_skips_a_step_whose_gradients_overflow(Conv2d: type[nn.Conv2d]) -> None:
    conv = Conv2d(2, 3, 3)
    before = deepcopy(conv.state_dict())
    optimiser = torch.optim.SGD(conv.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", dtype=torch.float16):
        y = conv(torch.full((1, 2, 5, 5), 100.0))
    scaler.scale(y.sum() * 1e4).backward()
    scaler.step(optimiser)
    scaler.update()
    torch.testing.assert_close(conv.state_dict(), before)
    assert scaler.get_scale() < 2.0**16


# ---- on a GPU


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_cuda_tensors_are_taken(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        x, w = (torch.empty(4, 4, 4, 4, device="cuda:0", dtype=dtype) for _ in range(2))
        assert polyconv.conv2d(x, w).dtype == dtype
        with pytest.raises(RuntimeError, match="should be the same type"):
            polyconv.conv2d(x, w.float())
        with pytest.raises(RuntimeError, match=r"float32, float16 and bfloat16 only; got torch\.float64"):
            polyconv.conv2d(x.double(), w.double())


def cuda_passes() -> dict[str, Callable[..., Any]]:
    """The operators' kernels, here on CPU tensors of a backend named "cuda"."""
    return {kind.value: getattr(execute, f"run_{kind.value}") for kind in Pass}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("axes", "groups"), [(2, 6), (3, 6), (3, 1)], ids=["depthwise", "depthwise volume", "volume"])
def test_widened_results_are_rounded_once(axes: int, groups: int, last: bool, dtype: torch.dtype) -> None:
    """No depthwise kernel has a stride above 8, and a sum of slices is rounded once at the end."""
    x = torch.randn(2, 6, *(7, 8, 5)[:axes], dtype=dtype).to(memory_format=LAYOUTS[axes][last])
    w, bias = torch.randn(6, 6 // groups, *[3] * axes, dtype=dtype), torch.randn(6, dtype=dtype)
    ones, stride = (1,) * axes, (9 if axes == 2 else 1,) * axes
    geometry = Geometry(stride=stride, padding=2 * ones, dilation=ones, groups=groups, tolerance=1e-4)
    wide = [t.float() for t in (x, w, bias)]
    recorder, run = Recorder("cuda"), cuda_passes()
    with override("cpu", recorder):
        y = run["fprop"](x, w, bias, *geometry)
        dy = torch.randn_like(y)
        dx = run["dgrad"](dy, w, list(x.shape), False, *geometry)
        dw, db = run["wgrad"](dy, x, list(w.shape), False, True, *geometry)
    assert {problem.dtype for problem in recorder.problems} == {"float32"}
    with override("cpu", Recorder()):
        expected = dispatch.fprop(*wide, *geometry)
        assert torch.equal(y, expected.to(dtype))
        assert y.stride() == dispatch.fprop(x, w, bias, *geometry).stride()
        assert torch.equal(dx, dispatch.dgrad(dy.float(), wide[1], list(x.shape), False, *geometry).to(dtype))
        expected_dw, expected_db = dispatch.wgrad(dy.float(), wide[0], list(w.shape), False, True, *geometry)
        assert torch.equal(dw, expected_dw.to(dtype))
        assert torch.equal(db, expected_db.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["plain 3x3", "channels_last", "slice of an image", "groups"])
def test_what_has_kernels_is_not_widened(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, w, bias = case.tensors(dtype)
    geometry = Geometry(padding=(1, 1, 1, 1), groups=case.kwargs.get("groups", 1), tolerance=1e-4)
    recorder, run = Recorder("cuda"), cuda_passes()
    with override("cpu", recorder):
        y = run["fprop"](x, w, bias, *geometry)
        run["dgrad"](y, w, list(x.shape), False, *geometry)
        run["wgrad"](y, x, list(w.shape), False, True, *geometry)
    assert {problem.dtype for problem in recorder.problems} == {str(dtype).removeprefix("torch.")}


def test_extreme_geometry_is_widened() -> None:
    """Its gradient is assembled from parts: summed before rounding."""
    x, w = torch.randn(1, 2, 5, 5).half(), torch.randn(3, 2, 2, 2).half()
    geometry = Geometry(padding=(3000, 3000, 3000, 3000), dilation=(3001, 3001), stride=(1500, 1500), tolerance=1e-4)
    recorder = Recorder("cuda")
    with override("cpu", recorder):
        assert cuda_passes()["fprop"](x, w, None, *geometry).dtype == torch.float16
    assert {problem.dtype for problem in recorder.problems} <= {"float32"}


def test_on_the_virtual_gpu() -> None:
    run_in_virtual_gpu(_half_precision_passes, torch.float16)


def _half_precision_passes(dtype: torch.dtype) -> None:
    """Each result is the exact one, rounded: half a unit in the last place, plus a little where a sum was cut."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 5, 12, 13).to(dtype), torch.randn(9, 5, 3, 3).to(dtype), torch.randn(9).to(dtype)
    dy, geometry = torch.randn(2, 9, 12, 13).to(dtype), Geometry(padding=(1, 1, 1, 1), tolerance=1e-4)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        run = cuda_passes()
        y = run["fprop"](x, w, bias, *geometry)
        dx = run["dgrad"](dy, w, list(x.shape), False, *geometry)
        dw, db = run["wgrad"](dy, x, list(w.shape), False, True, *geometry)
        assert gpu.launches
    exact = [tensor.double().requires_grad_() for tensor in (x, w, bias)]
    expected = F.conv2d(*exact, padding=1)
    expected.backward(dy.double())
    for got, want in zip((y, dx, dw, db), (expected, *(tensor.grad for tensor in exact)), strict=True):
        assert want is not None
        torch.testing.assert_close(got.double(), want.detach(), rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


def test_explain_says_what_a_gpu_does() -> None:
    conv, depthwise = polyconv.Conv2d(32, 64, 3).half(), polyconv.Conv2d(32, 32, 3, groups=32).half()
    text = str(polyconv.explain(conv, (8, 32, 64, 64), device="v100"))
    assert "runs direct (implicit_gemm_mma_" in text
    assert "widened" not in text
    assert "runs direct (depthwise_strip_3x3_float16" in str(
        polyconv.explain(depthwise, (8, 32, 64, 64), device="v100")
    )
    text = str(polyconv.explain(polyconv.Conv2d(32, 32, 3, 9, groups=32).half(), (8, 32, 64, 64), device="v100"))
    assert "widened to float32 (no kernel takes it in half precision) and rounded to float16 once" in text


@pytest.mark.parametrize("allowed", [False, True])
def test_autocast_on_a_gpu_casts_to_one_dtype(allowed: bool) -> None:
    """The implementation under CUDA autocast, which torch enables only with a GPU."""
    seen: list[torch.dtype] = []

    def op(*args: Any) -> Tensor:
        seen.extend(arg.dtype for arg in args if isinstance(arg, Tensor))
        return args[0]

    with polyconv.allow_low_precision(allowed):
        autocast_kernel(op, "cuda", "AutocastCUDA")(torch.randn(1), torch.randn(1).half(), None, 3)
    assert seen == [torch.get_autocast_dtype("cuda")] * 2


# ---- the setting


def test_as_a_call_it_holds_and_as_a_context_it_ends() -> None:
    assert settings.current().allow_low_precision
    with polyconv.allow_low_precision(False):
        assert not settings.current().allow_low_precision
        with polyconv.allow_low_precision():
            assert settings.current().allow_low_precision
        assert not settings.current().allow_low_precision
    assert settings.current().allow_low_precision
    polyconv.allow_low_precision(False)
    assert not settings.current().allow_low_precision
    polyconv.allow_low_precision()
    assert settings.current().allow_low_precision


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("True", True), ("0", False), ("off", False)])
def test_from_the_environment(text: str, value: bool) -> None:
    found = settings.Settings.from_environment({"POLYCONV_ALLOW_LOW_PRECISION": text})
    assert found.allow_low_precision is value


def test_a_switch_that_is_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cannot read POLYCONV_ALLOW_LOW_PRECISION='maybe': expected on or off"):
        settings.Settings.from_environment({"POLYCONV_ALLOW_LOW_PRECISION": "maybe"})
