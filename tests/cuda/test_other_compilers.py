"""Kernels compile without register spills with every NVRTC that a torch build may bring."""

from __future__ import annotations

import pytest

from nightly import NIGHTLY, sampled
from other_nvrtc import nvrtc
from polyconv.cuda.jit.compile import flags, search_path
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner import all_kernels
from polyconv.cuda.planner.codegen import source

ARCHITECTURES = {
    "12.4.127": ("sm_70", "sm_80", "sm_90"),
    "12.6.85": ("sm_70", "sm_80", "sm_90"),
    "12.8.93": ("sm_70", "sm_80", "sm_90", "sm_100", "sm_120"),
    "13.0.88": ("sm_80", "sm_90", "sm_100", "sm_120"),
}
"""GPUs common with each release. The environment's own NVRTC compiles all kernels in other tests."""
SAMPLE = 6
"""Kernels per architecture, except nightly."""


def cases() -> list[tuple[str, str]]:
    """Releases with architectures: nightly all pairs, else one architecture per release, in rotation."""
    if NIGHTLY:
        return [(version, arch) for version, archs in ARCHITECTURES.items() for arch in archs]
    return [(version, archs[number % len(archs)]) for number, (version, archs) in enumerate(ARCHITECTURES.items())]


@pytest.mark.parametrize(("version", "arch"), cases())
def test_kernels_compile_without_spills(version: str, arch: str) -> None:
    chosen = sampled(all_kernels(arch), SAMPLE, version)
    compiler = nvrtc(version)
    options = [*flags(arch), *(f"--include-path={folder}" for folder in search_path())]
    found = [kernel_info(compiler.cubin(source(spec), f"{spec.symbol}.cu", options)) for spec in chosen]
    assert {info.arch for info in found} == {arch}
    assert not [str(info) for info in found if info.stack]
