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
        every = all_kernels(arch)
        inherited = [spec.symbol for spec in every if any(map(spec.runs_on, ARCHS[:number]))]
        left_out = set(inherited).difference(sampled(inherited, SAMPLE, arch))
        found += [(spec, arch) for spec in every if spec.symbol not in left_out]
    return found
