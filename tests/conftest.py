"""Shared configuration: one thread (the cores serve the test workers), a fixed seed, hypothesis profiles.

No tuning file and no profile, so that measurements of any machine do not change the plans under test. Strict mode: a
kernel that cannot be compiled, loaded or launched is an error, without a fallback.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from nightly import nightly

torch.set_num_threads(1)
os.environ["POLYCONV_TUNING_FILE"] = "off"
os.environ["POLYCONV_PROFILE"] = "off"
os.environ["POLYCONV_STRICT"] = "on"

# Derandomised, so that failures are reproducible. --hypothesis-profile=wide searches more widely.
settings.register_profile(
    "default", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("wide", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def new_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that are given once per process are given again."""
    from polyconv.runtime import warn_once

    monkeypatch.setattr(warn_once, "_said", {})


@pytest.fixture
def direct() -> Iterator[None]:
    """Tolerance 0, for comparisons with PyTorch's sums: the errors of faster plans depend on the processor."""
    import polyconv

    with polyconv.tolerance(0):
        yield


@pytest.fixture(params=["neon"] if platform.machine() == "aarch64" else ["avx512", "avx2", "sse4"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native CPU kernels of each instruction set that the processor has, in turn."""
    from cpu_passes import on_instruction_set

    with on_instruction_set(request.param):
        yield request.param


@pytest.fixture(params=["sm_70", pytest.param("sm_80", marks=nightly)])
def every_arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code of each GPU that the emulator knows: a sample for the newer one, nightly all."""
    import emulate

    monkeypatch.setattr(emulate, "arch", request.param)
