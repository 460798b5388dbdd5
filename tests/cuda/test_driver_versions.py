"""Drivers that are too old, for polyconv or for the installed NVRTC: errors and ``polyconv doctor`` say so."""

from __future__ import annotations

import pytest

from polyconv.cuda import DriverError
from polyconv.cuda.driver import bindings
from polyconv.cuda.jit.compile import why_unloadable
from polyconv.problem import Problem
from polyconv.tools.doctor import environment
from polyconv.tools.doctor.check import Verdict
from polyconv.tools.doctor.environment import Finding
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

CUDA_11 = {"FAKE_CUDA_VERSION": "11080"}
OLDER_THAN_NVRTC = {"FAKE_CUDA_VERSION": "12020", "FAKE_CUDA_DEVICES": "unborn", "POLYCONV_STRICT": "off"}
"""A GPU that is served by PTX, which the driver must know."""
UNSUPPORTED_PTX_VERSION = 222


def test_a_driver_of_cuda_11_is_refused_in_words() -> None:
    with pytest.raises(DriverError, match=r"is for CUDA 11\.8, and polyconv needs one for CUDA 12\.0"):
        run_in_virtual_gpu(bindings, environment=CUDA_11)
    (found,) = run_in_virtual_gpu(_findings, "driver", environment=CUDA_11)
    assert found.state is Verdict.PROBLEM
    assert "is for CUDA 11.8" in found.text
    assert "pip" not in found.advice


def test_code_of_an_nvrtc_that_is_newer_than_the_driver() -> None:
    """The first kernel that is refused ends the call: others would be refused, too."""
    words = r"could not be loaded .* NVRTC 12\.\d+ is newer than the NVIDIA driver, which is for CUDA 12\.2 .* its PTX"
    with pytest.raises(DriverError, match=words):
        run_in_virtual_gpu(_load_unsupported_ptx, environment=OLDER_THAN_NVRTC)
    found = run_in_virtual_gpu(_findings, "compiler", environment=OLDER_THAN_NVRTC)
    assert [one.state for one in found] == [Verdict.OK, Verdict.PROBLEM, Verdict.WARNING]
    assert "is newer than the NVIDIA driver" in found[1].text


@pytest.mark.parametrize(
    ("nvrtc", "driver", "arch", "loads"),
    [
        ((12, 9), 12090, "sm_80", True),
        ((12, 9), 12000, "sm_80", True),
        ((12, 9), 13020, "sm_999", True),
        ((12, 9), 12080, "sm_999", False),
        ((13, 0), 12090, "sm_80", False),
        ((13, 2), 13000, "sm_80", True),
    ],
)
def test_which_code_a_driver_loads(
    nvrtc: tuple[int, int], driver: int, arch: str, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver loads cubins of the same CUDA major version, and PTX of the same or an older CUDA version."""
    from cuda.bindings import nvrtc as compiler

    monkeypatch.setattr(compiler, "nvrtcVersion", lambda: (0, *nvrtc))
    assert (why_unloadable(driver, arch) is None) == loads


def _findings(name: str) -> list[Finding]:
    return [found for found in environment.findings() if found.name == name]


def _load_unsupported_ptx() -> None:
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        gpu.fail("cuLibraryLoadData", 1, 1, UNSUPPORTED_PTX_VERSION)
        try:
            backend.prepare(backend.plan(Problem.make("fprop", (1, 8, 12, 12), (8, 8, 1, 1))))
        finally:
            assert not backend.description.refused
            assert gpu.repair() == 1
