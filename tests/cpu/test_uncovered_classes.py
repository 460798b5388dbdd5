"""Problem classes without measurements: ATen runs unless polyconv's kernel is far ahead."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import lru_cache
from math import exp
from pathlib import Path
from types import ModuleType

import pytest

import polyconv
from nightly import nightly, sampled
from polyconv import settings
from polyconv.cpu import native
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines import aten, depthwise, signals
from polyconv.cpu.engines.in_torch import fourier
from polyconv.cpu.planner import plan_cpu
from polyconv.cpu.profiles import Correction, Kernel, Profile, Record, Spent, in_words, shipped
from polyconv.cpu.profiles.profile import CAUTION, EXTREME, UNMEASURED, is_extreme
from polyconv.model.explain import problems_of
from polyconv.problem import Pass, Problem
from polyconv.tools.bench.cases import Mode

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu" / "uncovered_classes.py"
PROBLEM = Problem.make("fprop", (1, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
KERNEL = Kernel("F(4,3) x F(4,3), tile lanes")
LONG = Problem.make("fprop", (1, 8, 4, 4096), (8, 1, 1, 1024), groups=8, tolerance=0.0)


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uncovered_classes", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SWEEP = _loaded()
CLASSES = {one.name: one for one in SWEEP.classes()}
PROFILES = {
    f"{one.model}, {name}, {one.threads} threads": (name, one) for name in ("avx512", "avx2") for one in shipped(name)
}


def profile(weight: int) -> Profile:
    record = Record(PROBLEM, Spent(1e-3, 1e6), ((KERNEL, Spent(1e-3, 1e6)),))
    return Profile("a test", [record] * weight)


# ---- the rule


def test_a_problem_is_covered_where_enough_was_measured_near_it() -> None:
    """One measured problem covers its own place; a place further off needs several on all sides."""
    found = profile(1).correction(PROBLEM, KERNEL)
    assert found.covered
    assert found.factor == exp(found.shift + CAUTION * found.doubt)
    far = replace(PROBLEM, in_size=(224, 224))
    assert not profile(1).correction(far, KERNEL).covered
    assert profile(20).correction(far, KERNEL).covered


@pytest.mark.parametrize(
    "other",
    [
        replace(PROBLEM, kind=Pass.WGRAD),
        PROBLEM.channels_last(),
        replace(PROBLEM, kernel=(9, 9)),
        replace(PROBLEM, stride=(4, 4)),
        replace(PROBLEM, batch=1024, in_size=(14, 14)),
        Problem.make("fprop", (1, 64, 56, 56), (64, 1, 3, 3), padding=(1, 1, 1, 1), groups=64),
        Problem.make("fprop", (1, 64, 1, 3136), (64, 64, 1, 3), padding=(0, 0, 1, 1)),
    ],
    ids=["pass", "layout", "taps", "stride", "batch", "depthwise", "signal"],
)
def test_each_property_of_a_class_counts(other: Problem) -> None:
    found = profile(20).correction(other, KERNEL)
    assert not found.covered
    assert found == UNMEASURED
    assert found.factor > 2 * UNMEASURED.factor > 6


def test_another_kind_of_kernel_is_another_class() -> None:
    assert not profile(20).correction(PROBLEM, Kernel("direct, tile lanes")).covered
    assert not profile(20).correction(PROBLEM, replace(KERNEL, kept=True)).covered


def test_a_profile_behind_covers_too() -> None:
    mine = Profile("here", (), profile(20), 0.3)
    assert mine.correction(PROBLEM, KERNEL).covered
    assert not mine.correction(replace(PROBLEM, kernel=(9, 9)), KERNEL).covered


@pytest.mark.parametrize(
    "extreme",
    [
        LONG,
        Problem.make("fprop", (1, 8, 160, 160), (8, 8, 33, 1)),
        Problem.make("fprop", (1, 8, 160, 160), (8, 8, 16, 16), stride=(16, 16)),
        Problem.make("fprop", (1, 16, 1, 8192), (16, 16, 1, 9), dilation=(1, 512)),
        Problem.make("dgrad", (1, 1, 1, 2000), (64, 1, 1, 20), dilation=(1, 100)),
        Problem.make("dgrad", (1, 8, 30, 30), (8, 8, 25, 25)),
    ],
    ids=["long taps", "tall taps", "stride", "dilation", "dilated gradient", "gradient of a border"],
)
def test_extents_beyond_the_cost_model_need_the_largest_advantage(extreme: Problem) -> None:
    assert is_extreme(extreme)
    for known in (profile(20), Profile("nothing", ()), Profile("here", (), profile(20), 0.3)):
        assert known.correction(extreme, KERNEL) == EXTREME
    assert EXTREME.factor > 30
    at_its_place = Record(extreme, Spent(1e-3, 1e6), ((KERNEL, Spent(1e-3, 1e6)),))
    assert Profile("measured", [at_its_place]).correction(extreme, KERNEL).covered


def test_layers_of_networks_are_not_extreme() -> None:
    assert not is_extreme(PROBLEM)
    assert not is_extreme(
        Problem.make("dgrad", (8, 32, 512, 512), (64, 32, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3))
    )
    assert not is_extreme(Problem.make("dgrad", (1, 96, 64, 64), (96, 96, 3, 3), stride=(2, 2), padding=(1,) * 4))


# ---- shipped profiles


@lru_cache(maxsize=8)
def device(name: str) -> CpuDevice:
    instruction_set, known = PROFILES[name]
    section = known.read()
    return CpuDevice(instruction_set, cores=section.threads, profile=Profile(str(section), section.records))


@pytest.mark.parametrize("name", PROFILES)
def test_what_was_measured_is_covered_and_decided_as_before(name: str) -> None:
    """Where a profile covers a problem, the factor is that of the uncertainty, counted once."""
    _, known = PROFILES[name]
    section = known.read()
    found = Profile(str(section), section.records)
    for record in sampled(section.records, 200, name):
        for kernel, _ in record.kernels:
            correction = found.correction(record.problem, kernel)
            assert correction.covered
            assert correction.factor == Correction(correction.shift, correction.doubt).factor


SLOWER = [
    *(f"Conv1d, depthwise k{taps}, {channels} to {channels}" for taps in (64, 256, 1024, 4096) for channels in (8, 32)),
    *(f"Conv1d, depthwise k{taps}, 4 to 4" for taps in (256, 1024, 4096)),
    "Conv1d, dense k1024, 8 to 8",
    "Conv1d, dense k4096, 8 to 8",
    "Conv1d, dilated k9 by 512, 16 to 16",
    "Conv2d, large batch, 16 to 16",
    "ConvTranspose1d, k64 by 1, 16 to 1",
]
"""Classes in which polyconv's direct kernel was measured slower than ATen while estimated faster. Of depthwise signals
it was the engine ``depthwise``; ``signals`` came later, and was faster than ATen where timed (64 to 1024 taps)."""


@pytest.mark.parametrize("profile_name", PROFILES)
@pytest.mark.parametrize("name", SLOWER)
def test_pytorch_runs_where_an_estimate_was_far_off(name: str, profile_name: str) -> None:
    """Decided without timing."""
    module = CLASSES[name].module()
    polyconv.replace(module)
    forward = problems_of(module, CLASSES[name].shape)[0]
    assert forward.kind is (Pass.DGRAD if "Transpose" in name else Pass.FPROP)
    engine = plan_cpu(forward, device(profile_name), inference=True).chosen.engine
    assert engine in (aten.NAME, fourier.NAME, signals.NAME)
    plan = plan_cpu(replace(forward, tolerance=0.0), device(profile_name), inference=True)
    if "depthwise" in name:
        cost = {candidate.name: candidate.cost for candidate in plan.candidates}
        assert cost[f"direct, {depthwise.NAME}"] > cost[f"PyTorch's convolution, {aten.NAME}"]
        assert plan.chosen.engine == signals.NAME
        return
    assert plan.chosen.engine == aten.NAME
    assert plan.uncovered.startswith(f"not covered by it: {in_words(plan.ran)}; a kernel of polyconv's runs if")


@pytest.mark.parametrize("profile_name", PROFILES)
@pytest.mark.parametrize("name", [name for name in CLASSES if "few channels" in name])
def test_pytorch_runs_small_layers_of_few_channels(name: str, profile_name: str) -> None:
    """Its calls cost less than ours, and the matrix products that it runs there less than oneDNN's kernels: their
    estimates were up to 20 times too high."""
    module = CLASSES[name].module()
    polyconv.replace(module)
    forward = problems_of(module, CLASSES[name].shape)[0]
    assert plan_cpu(forward, device(profile_name), inference=True).chosen.engine == aten.NAME


def test_explain_says_that_a_class_is_not_covered() -> None:
    known = next(iter(PROFILES))
    text = plan_cpu(LONG, device(known), inference=True).explain()
    words = "depthwise fprop of images, 1x1024 taps, 1 to 1 channels in 8 groups, 1 of 4x3073 in NCHW"
    assert f"not covered by it: {words}; a kernel of polyconv's runs if it is estimated to be ahead by 32 times" in text
    assert "not covered" not in plan_cpu(PROBLEM, device(known)).explain()
    volume = Problem.make("fprop", (1, 8, 6, 12, 12), (16, 8, 3, 3, 3), padding=(1,) * 6)
    assert "not covered by it: convolutions over three axes" in plan_cpu(volume, device(known)).explain()
    assert "not covered" not in plan_cpu(LONG, replace(device(known), profile=None)).explain()


def test_nothing_is_promised_of_a_class_that_is_not_covered() -> None:
    """A kernel that runs there is ahead by more than the largest error seen, and explain promises only that."""
    gradient = replace(LONG, kind=Pass.WGRAD)
    plan = plan_cpu(gradient, device(next(iter(PROFILES))))
    assert plan.chosen.engine != aten.NAME
    assert plan.uncovered
    assert plan.reason.startswith("probably at least ")


# ---- measured times


@nightly
@pytest.mark.parametrize("name", CLASSES)
def test_no_class_is_slower_after_replace(name: str) -> None:
    """On this machine, with its profile: slower beyond the noise of PyTorch against itself."""
    with settings.use(profile=None):
        for mode in Mode:
            found = SWEEP.measured(CLASSES[name], mode)
            assert not found.slower, found
