"""Kernels compile without register spills with every NVRTC that a torch build or an extra may bring, and compute."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

import emulate
from emulate import A100
from machine_suites import Shape
from nightly import NIGHTLY, sampled
from other_nvrtc import nvrtc
from polyconv.activation import Activation
from polyconv.cuda.jit.compile import flags, search_path, without_spills
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner import KernelSpec, all_kernels
from polyconv.cuda.planner.codegen import source
from polyconv.cuda.planner.planner import FAMILIES, candidates, family_name, plan_within
from polyconv.numerics.prediction import with_numeric_tolerance
from polyconv.problem import TORCH_TOLERANCE, Pass

ARCHITECTURES = {
    "12.4.127": ("sm_70", "sm_80", "sm_90"),
    "12.6.85": ("sm_70", "sm_80", "sm_90"),
    "12.8.93": ("sm_70", "sm_80", "sm_90", "sm_100", "sm_120"),
    "13.0.88": ("sm_80", "sm_90", "sm_100", "sm_120"),
    "13.2.86": ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120"),
}
"""GPUs common with each release. The environment's own NVRTC compiles all kernels in other tests."""
SAMPLE = 6
"""Kernels per architecture, except nightly."""
SPILLING = {
    "sm_90": ("Toom4_3_1", "Toom4_5_1", "Toom4_4_5_1", "Toom4_4_4_5_1"),
    "sm_100": ("Toom4_5_1", "Toom4_4_5_1"),
    "sm_120": ("Toom4_5_1", "Toom4_4_5_1"),
}
"""Transforms along H of the weight gradients that 13.2 compiles with spills by default."""
NEWEST = list(ARCHITECTURES)[-1]
ONLY_VOLTA = {"winograd_fp16x3/fused", "winograd_fp16x3/wgrad"}
VOLUME = Shape((1, 16, 5, 9, 8), 32, (3, 3, 3), (1, 1, 1), padding=(1,) * 6, dilation=(1, 1, 1), layout="channels_last")
SHAPES = {
    "depthwise/line": Shape((1, 16, 1, 400), 16, (1, 4), padding=(0, 0, 3, 0), groups=16),
    "depthwise/band": Shape((1, 16, 20, 20), 16, (5, 5), padding=(2, 2, 2, 2), groups=16),
    "depthwise": Shape((1, 16, 20, 20), 16, (3, 3), padding=(1, 1, 1, 1), groups=16),
    "1x1": Shape((2, 20, 10, 14), 36, (1, 1)),
    "ndhwc": VOLUME,
    "halo_volume": VOLUME,
    "nhwc": Shape((1, 16, 20, 20), 32, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
    "": Shape((1, 16, 20, 20), 32, (3, 3), padding=(1, 1, 1, 1)),
}
"""By a part of a family's name."""


def cases() -> list[tuple[str, str]]:
    """Releases with architectures: nightly all pairs, else one architecture per release, in rotation."""
    if NIGHTLY:
        return [(version, arch) for version, archs in ARCHITECTURES.items() for arch in archs]
    return [(version, archs[number % len(archs)]) for number, (version, archs) in enumerate(ARCHITECTURES.items())]


def compiled(version: str, spec: KernelSpec, arch: str) -> bytes:
    options = [*flags(arch), *(f"--include-path={folder}" for folder in search_path())]

    def cubin(ptxas: str | None) -> bytes:
        more = [] if ptxas is None else [f"--ptxas-options={ptxas}"]
        return nvrtc(version).cubin(source(spec), f"{spec.symbol}.cu", [*options, *more])

    return without_spills(cubin)


@pytest.mark.parametrize(("version", "arch"), cases())
def test_kernels_compile_without_spills(version: str, arch: str) -> None:
    chosen = sampled(all_kernels(arch), SAMPLE, version)
    found = [kernel_info(compiled(version, spec, arch)) for spec in chosen]
    assert {info.arch for info in found} == {arch}
    assert not [str(info) for info in found if info.stack]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_kernels_that_spill_by_default_do_not(arch: str) -> None:
    """The largest tiles of the weight gradient, and on sm_100 a product on tensor cores."""
    names = [f"winograd_wgrad_{h}_Toom4_4_5_1_64x32" for h in sampled(SPILLING[arch], 1, arch)]
    names += ["winograd_fp16x3_gemm_k16_toom4_4_5_2"] if arch == "sm_100" else []
    chosen = [spec for spec in all_kernels(arch) if spec.symbol in names]
    assert len(chosen) == len(names)
    for spec in chosen:
        info = kernel_info(compiled(NEWEST, spec, arch))
        assert not info.stack, info


@pytest.mark.parametrize("family", [one for one in FAMILIES if family_name(one) not in ONLY_VOLTA], ids=family_name)
def test_machine_code_of_the_newest_computes(family: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that polyconv[cu13] runs on an A100, in every pass of each family, forward with an activation."""
    monkeypatch.setattr(emulate, "_compiled", lambda spec, arch: compiled(NEWEST, spec, arch))
    monkeypatch.setattr(emulate, "arch", A100.arch)
    shape = next(shape for part, shape in SHAPES.items() if part in family_name(family))
    x, w, bias, dy = shape.tensors(getattr(torch, getattr(family, "DTYPES", ("float32",))[0]))
    computed = 0
    for kind in Pass:
        problem = shape.problem(kind, x, w, dy)
        if kind is Pass.FPROP:
            problem = replace(problem, activation=Activation("relu6"))
        if family_name(family).startswith("scaled_fp16"):
            problem = with_numeric_tolerance(replace(problem, tolerance=TORCH_TOLERANCE), has_tf32=True)
        if any(one.refusal(problem) is None for one in candidates(problem, (family,), A100)):
            emulate.check(problem, x, w, bias, dy, plan_within((family,), problem, A100))
            computed += 1
    assert computed
