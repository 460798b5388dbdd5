"""The CPU planner: its choices, its reasons, and that it depends on its arguments only."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import polyconv
from nightly import sampled
from polyconv.cli import main
from polyconv.cpu import native, planner
from polyconv.cpu.device import CpuDevice, this_machine
from polyconv.cpu.engines import aten, reference
from polyconv.cpu.engines.in_torch import patches
from polyconv.cpu.planner import offered, plan_cpu
from polyconv.cpu.profiles import Profile, shipped
from polyconv.measure.workloads import find
from polyconv.problem import PaddingMode, Pass, Problem

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

SERVER = CpuDevice("avx512", cores=2)
PASSES = list(Pass)
ALL = sampled([(workload, kind) for workload in find("all") for kind in PASSES], 40, "plans within their budget")


@pytest.mark.parametrize(("workload", "kind"), ALL, ids=[f"{w.name}-{k}" for w, k in ALL])
def test_every_workload_has_a_plan_within_its_budget(workload, kind) -> None:
    plan = plan_cpu(workload.problem(kind), SERVER)
    assert plan.chosen.refusal is None
    others = [candidate for candidate in plan.candidates if candidate.name != plan.choice]
    assert len({candidate.name for candidate in others}) == len(others) == len(plan.candidates) - 1
    assert plan.chosen.direct or 0 < plan.predicted_error <= plan.problem.tolerance
    assert all(candidate.rejected for candidate in others)
    assert plan.choice in plan.explain()


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", ["W1", "W2", "W3"])
def test_headline_workloads_run_fast_forms(name: str, kind: Pass) -> None:
    (workload,) = find(name)
    plan = plan_cpu(workload.problem(kind), SERVER)
    assert not plan.chosen.direct
    assert "as fast as direct summation" in plan.reason


@pytest.mark.parametrize("kind", PASSES)
def test_without_a_budget_only_direct_summation_runs(kind: Pass) -> None:
    for workload in find("all"):
        problem = replace(workload.problem(kind), tolerance=0.0)
        plan = plan_cpu(problem, SERVER)
        assert plan.chosen.direct
        fast = {c.name for c in offered(problem, SERVER) if not c.direct and c.refusal is None}
        reasons = [c.rejected or "" for c in plan.candidates if c.name in fast]
        assert len(reasons) == len(fast)
        assert all("exceeds the tolerance 0.0e+00" in reason for reason in reasons)


def test_a_larger_budget_never_costs_more() -> None:
    for workload in find("all"):
        costs = [
            plan_cpu(replace(workload.problem("fprop"), tolerance=tolerance), SERVER).chosen.cycles
            for tolerance in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
        ]
        assert costs == sorted(costs, reverse=True)


def test_float64_and_half_precision() -> None:
    double = Problem.make("fprop", (1, 8, 32, 32), (8, 8, 3, 3), dtype="float64")
    assert plan_cpu(double, SERVER).chosen.engine == reference.NAME
    half = replace(double, dtype="bfloat16")
    plan = plan_cpu(half, SERVER)
    assert plan.chosen.engine != aten.NAME
    assert plan.chosen.widened
    assert "PyTorch's convolution in float32, ATen" in {one.name for one in plan.candidates}


def test_the_border_of_an_input_gradient_is_folded() -> None:
    problem = Problem.make(
        "dgrad", (1, 16, 64, 64), (16, 16, 3, 3), padding=(1, 1, 1, 1), padding_mode=PaddingMode.REFLECT
    )
    plan = plan_cpu(problem, SERVER)
    assert plan.folded
    assert plan.ran.in_size == (66, 66)
    assert plan.name.endswith("border folded")
    assert not plan_cpu(replace(problem, padding_mode=PaddingMode.ZEROS), SERVER).folded


def test_kept_weights_may_change_the_choice() -> None:
    (workload,) = find("tiny-batch")
    problem = workload.problem("fprop")
    fresh, kept = plan_cpu(problem, SERVER), plan_cpu(problem, SERVER, inference=True)
    assert kept.chosen.cycles - kept.chosen.weight_cycles <= fresh.chosen.cycles - fresh.chosen.weight_cycles


def test_deterministic() -> None:
    problem = find("W1")[0].problem("fprop")
    first = plan_cpu(problem, SERVER)
    planner._plan.cache_clear()
    assert plan_cpu(problem, SERVER) == first


def test_narrower_vectors_cost_more() -> None:
    problem = find("W1")[0].problem("fprop")
    wide, narrow = (plan_cpu(problem, CpuDevice(name)) for name in ("avx512", "sse4"))
    assert narrow.chosen.cycles > 2 * wide.chosen.cycles


def test_threads_without_a_chunk_are_counted() -> None:
    """Costs are those of all cores. One chunk occupies one of two, unless output channels are cut, too."""

    def ratios(batch: int, size: int, outputs: int = 256, width: int | None = None) -> dict[str, float]:
        x = batch, 64, size, width or size
        problem = Problem.make("fprop", x, (outputs, 64, 3, 3), padding=(1, 1, 1, 1))
        two, one = (
            {each.name: each.cycles - each.weight_cycles for each in offered(problem, device) if not each.refusal}
            for device in (SERVER, replace(SERVER, cores=1))
        )
        return {name: two[name] / one[name] for name in two if name.startswith("F(4,3) x F(4,3)")}

    few = ratios(1, 13)
    assert few["F(4,3) x F(4,3), tile lanes"] == pytest.approx(2, rel=0.3)
    assert 1 < few["F(4,3) x F(4,3), channel lanes"] < 1.3
    assert 1 < ratios(1, 28, 64)["F(4,3) x F(4,3), channel lanes"] < 1.2  # 4 and 3 rows of tiles
    assert 1 <= ratios(1, 4, 64, 700)["F(4,3) x F(4,3), channel lanes"] < 1.1  # four parts of one row
    assert 1.2 < ratios(3, 12, 64)["F(4,3) x F(4,3), channel lanes"] < 1.4  # two images and one
    assert max(ratios(8, 130).values()) < 1.02


@pytest.mark.parametrize("has_affinity", [True, False])
def test_this_machine(has_affinity: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_affinity:
        monkeypatch.delattr("os.sched_getaffinity", raising=False)
    device = this_machine.__wrapped__("avx2")
    assert device.lanes == 8
    assert device.cores >= 1
    assert 2**14 <= device.l1_bytes <= device.l2_bytes
    assert "avx2" in str(device)


@pytest.mark.parametrize(
    ("x", "w", "columns"),
    [
        ((1, 512, 4, 4), (512, 512, 3, 3), True),
        ((1, 512, 1, 40), (64, 512, 1, 7), True),
        ((1, 320, 8, 8, 8), (320, 320, 3, 3, 3), True),
        ((1, 512, 7, 7), (512, 512, 3, 3), False),  # too large
        ((2, 512, 4, 4), (512, 512, 3, 3), False),  # several images
        ((1, 512, 4, 4), (512, 512, 5, 5), False),
        ((1, 512, 4, 4), (512, 512, 1, 1), False),  # single taps are estimated as such
    ],
)
def test_aten_lays_out_columns_of_small_maps(x, w, columns: bool) -> None:
    for kind in PASSES:
        problem = Problem.make(kind, x, w, padding=tuple(size // 2 for size in w[2:] for _ in range(2)))
        assert aten._lays_out_columns(problem, SERVER) is columns
        assert aten.direct_cycles(problem, SERVER) > 0


def test_a_weight_that_few_pixels_share_is_left_to_aten() -> None:
    """Reading the weight takes the time, and a transformed one is larger."""
    profile = next(known.read() for known in shipped("avx512") if known.threads == 1)
    device = CpuDevice("avx512", 1, profile=Profile("measured", profile.records))
    for frozen in (False, True):
        problem = replace(Problem.make("fprop", (1, 512, 4, 4), (512, 512, 3, 3), padding=(1, 1, 1, 1)), frozen=frozen)
        assert plan_cpu(problem, device, inference=True).passthrough


@pytest.mark.parametrize("threads", [1, 2])
def test_forward_passes_of_several_patches_are_mostly_atens(threads: int) -> None:
    """Both compute a matrix product. Gradients, and images that are one patch, are faster as one."""
    profile = next(known.read() for known in shipped("avx512") if known.threads == threads)
    device = CpuDevice("avx512", threads, profile=Profile("measured", profile.records))
    for size, stays in ((14, True), (16, True), (224, False)):
        layer = (8, 3, 224, 224), (768, 3, size, size)
        given = Problem.make("fprop", *layer, stride=(size, size))
        assert plan_cpu(given, device, inference=True).passthrough is stays
    assert plan_cpu(given.another_pass(Pass.WGRAD), device).chosen.engine == patches.NAME


def test_explain_names_the_engine() -> None:
    text = str(polyconv.explain(polyconv.Conv2d(32, 64, (5, 9), dilation=(2, 3)), (1, 32, 256, 256)))
    assert "F(4,5) x F(4,5) in two nested segments, tile lanes" in text


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "W1", "--device", "cpu", "--pass", "fprop", "-v"]) == 0
    assert "exceeds the tolerance" in capsys.readouterr().out
    assert main(["plan", "W1", "--device", "cpu", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["pass"] for plan in plans] == ["fprop", "dgrad", "wgrad"]
    for plan in plans:
        assert plan["algorithm"] == plan["candidates"][0]["name"]
        assert plan["candidates"][0]["rejected"] is None
        assert all(candidate["rejected"] for candidate in plan["candidates"][1:])


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(("kernel", "axes"), [((1, 1), "down across"), ((1, 3), "down"), ((3, 1), "across")])
def test_no_scheme_combines_taps_that_are_not_there(kernel: tuple[int, int], axes: str, kind: Pass) -> None:
    padding = (kernel[0] // 2,) * 2 + (kernel[1] // 2,) * 2
    plan = plan_cpu(Problem.make(kind, (1, 16, 16, 16), (16, 16, *kernel), padding=padding), SERVER)
    refused = {c.name: c.rejected for c in plan.candidates if "where the kernel has one" in (c.rejected or "")}
    assert "F(6,3) x F(6,3), " + ("channel lanes" if kind is Pass.WGRAD else "tile lanes") in refused
    assert {reason.partition(",")[0].split()[-1] for reason in refused.values() if reason} <= set(axes.split())
    for name in (c.name for c in plan.candidates if c.cost is not None and c.name.startswith("F(")):
        down, across = name.split(" x ")
        assert down == "F(1,1)" or kernel[0] > 1
        assert across.startswith("F(1,1)") or kernel[1] > 1


def test_phases_of_a_stride_keep_their_schemes() -> None:
    """The input gradient of a strided 3x3 kernel has phases of two taps and of one: three-tap schemes may still pay."""
    plan = plan_cpu(Problem.make("dgrad", (1, 96, 64, 64), (96, 96, 3, 3), stride=(2, 2), padding=(1,) * 4), SERVER)
    (tried,) = (c for c in plan.candidates if c.name == "F(6,3) x F(1,1), tile lanes")
    assert tried.cost is not None


def test_extents_beyond_32_bits_are_atens() -> None:
    """The kernels use 32-bit indices; ATen takes such tensors, so the plan is a passthrough."""
    plan = plan_cpu(Problem.make("fprop", (3_000_000_000, 1, 1, 1), (1, 1, 1, 1)))
    assert plan.choice.endswith(", ATen")
    assert "extents of at most 2146435072" in plan.explain()
