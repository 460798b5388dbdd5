"""The kernels that the tests compile, per architecture."""

from __future__ import annotations

from nightly import sampled
from polyconv.cuda.planner import KernelSpec, all_kernels

ARCHS = ("sm_70", "sm_80", "sm_90", "sm_100", "sm_120")
SAMPLE = 16
"""Number of kernels compiled also for each later generation, except nightly."""


def compiled() -> list[tuple[KernelSpec, str]]:
    """Every kernel for the first generation that has it, and a sample for each later one; nightly all."""
    found: list[tuple[KernelSpec, str]] = []
    for number, arch in enumerate(ARCHS):
        inherited = [spec for spec in all_kernels(arch) if any(map(spec.runs_on, ARCHS[:number]))]
        kept = {spec.symbol for spec in sampled(inherited, SAMPLE, arch)}
        found += [(spec, arch) for spec in all_kernels(arch) if spec not in inherited or spec.symbol in kept]
    return found
