"""A kernel that cannot be compiled, loaded or launched: one warning, then the fallback runs with correct results."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import polyconv
from polyconv import settings
from polyconv.autotune import preferences
from polyconv.backend import override
from polyconv.cuda import ContextLostError, LaunchError, RefusedKernelError
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.planner import KernelSpec
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import PACK, ROWS, ImplicitGemmCandidate
from polyconv.cuda.planner.implicit_gemm.tiles import SLIMMER
from polyconv.problem import Problem
from polyconv.selection import PlanError
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

NOT_STRICT = {"POLYCONV_STRICT": "off", "POLYCONV_TUNING_FILE": "off"}
INVALID_VALUE, OUT_OF_MEMORY, NO_BINARY, ILLEGAL_ADDRESS, OUT_OF_RESOURCES, CAPTURING = 1, 2, 209, 700, 701, 900
X, W = (1, 16, 20, 20), (32, 16, 3, 3)


def convolve(**arguments: Any) -> torch.Tensor:
    """A convolution with a fast plan, checked against float64."""
    torch.manual_seed(0)
    x, w = torch.randn(X), torch.randn(W)
    y = polyconv.conv2d(x, w, padding=1, **arguments)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    return y


@contextmanager
def said() -> Iterator[list[str]]:
    """Texts of the warnings."""
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [str(one.message) for one in caught]


def names(gpu: VirtualGpu) -> list[str]:
    """Kernels launched since the last call."""
    found = [launch.name for launch in gpu.launches]
    gpu.launches.clear()
    return found


# ---- a single fault


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("cuLibraryLoadData", NO_BINARY),
        ("cuLibraryGetKernel", INVALID_VALUE),
        ("cuLaunchKernel", OUT_OF_RESOURCES),
        ("cuLaunchKernel", 4321),
    ],
)
def test_the_next_candidate_runs(function: str, code: int) -> None:
    run_in_virtual_gpu(_goes_on, function, code, environment=NOT_STRICT, timeout=300)


def _goes_on(function: str, code: int) -> None:
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend:
        gpu.fail(function, 1, 1, code)
        with said() as words:
            convolve()
        assert gpu.repair() == 1
        (given_up,) = backend.description.refused
        (warning,) = words
        assert warning.startswith(f"{given_up} cannot be used here, and another kernel, which may be slower, runs")
        assert "Please report it, with the output of polyconv doctor (device cuda, name Virtual Tesla V100" in warning
        ran = names(gpu)
        with said() as words:  # blacklisted: no warning, no further attempt
            convolve()
        assert not words
        again = names(gpu)
        assert given_up not in again
        assert ran[-len(again) :] == again
        problem = Problem.make("fprop", X, W, padding=(1, 1, 1, 1))
        assert f"{given_up} cannot be used on this device" in preferences.plan(backend, problem).explain(verbose=True)


def test_a_call_that_ran_before_is_prepared_again() -> None:
    """A launch that works once and fails later: calls with a cached plan fall back, too."""
    run_in_virtual_gpu(_fails_later, environment=NOT_STRICT, timeout=300)


def _fails_later() -> None:
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend:
        convolve()
        names(gpu)
        gpu.fail("cuLaunchKernel", 2, 1, OUT_OF_RESOURCES)
        with said() as words:
            convolve()
        assert len(words) == len(backend.description.refused) == gpu.repair() == 1
        names(gpu)
        convolve()
        assert not set(names(gpu)) & set(backend.description.refused)


def test_a_residual_that_is_the_output_is_not_added_twice() -> None:
    with pytest.raises(LaunchError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        run_in_virtual_gpu(_fails_after_writing, environment=NOT_STRICT, timeout=300)


def _fails_after_writing() -> None:
    problem = Problem.make("fprop", X, W, padding=(1, 1, 1, 1), residual=True)
    y = torch.zeros(problem.y_shape)
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        gpu.fail("cuLaunchKernel", 2, 1, OUT_OF_RESOURCES)
        backend.run(problem, {"x": torch.zeros(X), "w": torch.zeros(W), "y": y, "residual": y})


# ---- down to the direct kernels


def compiles(only: Collection[str], folder: Path) -> KernelCache:
    """A cache whose compiler rejects all other kernels."""

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        if spec.symbol not in only:
            raise RefusedKernelError(f"NVRTC could not compile {spec.symbol} for {arch}:\nerror", symbol=spec.symbol)
        return compile_kernel(spec, arch)

    return KernelCache(folder, compiler=compiler)


def test_down_to_the_plainest_direct_kernel(tmp_path: Path) -> None:
    run_in_virtual_gpu(_down_to_the_plainest, tmp_path, environment=NOT_STRICT, timeout=500)


def _down_to_the_plainest(folder: Path) -> None:
    plainest = ImplicitGemmCandidate(SLIMMER, ROWS).kernel
    with VirtualGpu() as gpu:
        backend = gpu.backend(cache=compiles({PACK.symbol, plainest.symbol}, folder))
        with override("cpu", backend), said() as words:
            convolve()
        assert len(words) == len(backend.description.refused) > 1
        assert names(gpu) == [PACK.symbol, plainest.symbol]


def test_where_no_kernel_is_left_the_error_says_of_each_why(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no kernel can run .* cannot be used on this device: NVRTC could not compile"):
        run_in_virtual_gpu(_nothing_compiles, tmp_path, environment=NOT_STRICT, timeout=300)


def _nothing_compiles(folder: Path) -> None:
    with VirtualGpu() as gpu, said(), override("cpu", gpu.backend(cache=compiles((), folder))):
        convolve()


# ---- errors that are raised


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, CAPTURING])
def test_what_is_not_the_kernels_is_raised(code: int) -> None:
    run_in_virtual_gpu(_raises, code, LaunchError, "when launching", environment=NOT_STRICT, timeout=300)


def test_a_sticky_error_is_told_apart() -> None:
    words = "With this error the GPU stops working for the whole process"
    run_in_virtual_gpu(_raises, ILLEGAL_ADDRESS, ContextLostError, words, environment=NOT_STRICT, timeout=300)


def test_strict_raises_at_once() -> None:
    strict = {**NOT_STRICT, "POLYCONV_STRICT": "on"}
    run_in_virtual_gpu(_raises, OUT_OF_RESOURCES, LaunchError, "OUT_OF_RESOURCES", environment=strict, timeout=300)


def _raises(code: int, kind: type[Exception], words: str) -> None:
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend:
        gpu.fail("cuLaunchKernel", 1, 1, code)
        with pytest.raises(kind, match=words), said() as warned:
            convolve()
        assert not warned
        assert gpu.repair() == 1
        assert not backend.description.refused
        convolve()


def test_all_tests_are_strict() -> None:
    assert settings.current().strict
