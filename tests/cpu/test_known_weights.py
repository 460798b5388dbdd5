"""Plans for known weights: the predicted error holds, and the plan that runs keeps the tolerance."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from every_candidate import Layer, Trial
from nightly import sampled
from polyconv.algebra.segments import AxisScheme, Scheme2d, schemes
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines import channel_lanes, tile_lanes
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import plan_cpu
from polyconv.measure.workloads import find
from polyconv.numerics import known_weights
from polyconv.numerics.error_model import axis_growth
from polyconv.numerics.known_weights import EVEN, error_for
from polyconv.numerics.prediction import Way
from polyconv.numerics.scale import largest, scales
from polyconv.numerics.tap_forms import Form, tap_forms
from polyconv.problem import DEFAULT_TOLERANCE, Pass, Problem
from tap_distributions import TAPS

KERNELS = [(3, 3), (5, 5), (5, 9), (7, 7), (1, 9), (1, 31)]
FAST = Scheme2d(AxisScheme.cut(4, 5), AxisScheme.cut(4, 5))


# --------------------------------------------------------------------------------------------------- tap moments


@pytest.mark.parametrize("taps", [1, 3, 5, 9])
def test_even_weights_are_the_traces(taps: int) -> None:
    """Independent taps of equal energy have the sums that the error model assumes."""

    def trace(form: Form) -> float:
        return sum(row[k] for k, row in enumerate(form))

    for scheme in (AxisScheme.direct(taps), *schemes(taps, max_segments=3)[:8]):
        forms, grown = tap_forms(scheme), axis_growth(scheme)
        for mine, theirs in ((forms.product, grown.product), (forms.input, grown.input), (forms.output, grown.output)):
            assert [trace(form) for form in mine] == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
def test_of_moments_that_are_even_the_prediction_is_the_usual_one(kind: Pass) -> None:
    """Each channel has all its energy in another tap, and equal energy."""
    w = torch.eye(25).reshape(1, 25, 5, 5)
    w = w.expand(8, -1, -1, -1).clone() if kind is Pass.FPROP else w.transpose(0, 1).expand(-1, 8, -1, -1).clone()
    problem = Problem.make(kind, (1, w.shape[1], 40, 40), tuple(w.shape))
    way = Way(FAST, 25, (), (5, 5))
    # The ratio of largest magnitude to rms does not enter in float32.
    assert error_for(problem, [way], w) == pytest.approx(way.error(problem), rel=1e-3)


def test_the_scale_of_weights_does_not_matter() -> None:
    problem, way = Problem.make("fprop", (1, 8, 40, 40), (6, 8, 5, 5)), Way(FAST, 8, (), (5, 5))
    torch.manual_seed(0)
    w = TAPS["causal half"]((6, 8, 5, 5))
    by_filter = torch.logspace(-15, 15, 6).reshape(-1, 1, 1, 1)
    assert error_for(problem, [way], w * by_filter) == pytest.approx(error_for(problem, [way], w), rel=1e-3)
    assert error_for(problem, [way], torch.zeros_like(w)) == 0.0
    beside = torch.cat([w, torch.zeros_like(w)])
    assert error_for(replace(problem, out_channels=12), [way], beside) == pytest.approx(
        error_for(problem, [way], w), rel=0.1
    )


# ------------------------------------------------------------------------------- predicted errors, for every kernel


def ways_of(candidate: CpuCandidate, problem: Problem) -> tuple[Way, ...]:
    engines = {tile_lanes.NAME: tile_lanes, channel_lanes.NAME: channel_lanes}
    return tuple(engines[candidate.engine].ways(candidate, problem)) if candidate.engine in engines else ()


CASES = [(kind, kernel, name) for kind in (Pass.FPROP, Pass.DGRAD) for kernel in KERNELS for name in TAPS]


@pytest.mark.parametrize(("kind", "kernel", "name"), sampled(CASES, 36, "taps"), ids=str)
def test_every_kernel_keeps_what_is_predicted_for_its_weights(kind: Pass, kernel: tuple[int, int], name: str) -> None:
    torch.manual_seed(prod(kernel))
    layer = Layer(1, 24, 20, 44, kernel, pad=0)
    layer = replace(layer, batch=2) if kind is Pass.DGRAD else layer
    images, _ = layer.operands(kind)
    trial = Trial(layer, kind, torch.randn(images), TAPS[name](layer.w))
    problem, broken, fast = trial.problem, [], 0
    for candidate, observed in trial.errors(trial.scale):
        ways = ways_of(candidate, problem)
        fast += bool(ways)
        promised = error_for(problem, ways, trial.other) if ways else candidate.error
        if observed > promised:
            broken.append(f"{candidate.name}: {observed:.1e}, predicted {promised:.1e}")
    assert not broken
    assert fast


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (5, 9)], ids=str)
def test_a_weight_gradient_has_no_weights(kernel: tuple[int, int]) -> None:
    """Both operands are data: the prediction for even data holds, and nothing is measured."""
    torch.manual_seed(0)
    layer = Layer(2, 20, 16, 40, kernel, pad=0)
    trial = Trial(layer, Pass.WGRAD, torch.randn(layer.x), torch.randn(layer.y))
    for candidate, observed in trial.errors(trial.scale):
        assert not ways_of(candidate, trial.problem)
        assert observed <= candidate.error


STRIDED = [
    ("fprop", (5, 5), (2, 2), (1, 1)),
    ("fprop", (5, 9), (2, 1), (1, 1)),
    ("fprop", (5, 5), (1, 1), (2, 2)),
    ("dgrad", (5, 5), (2, 2), (1, 1)),
    ("dgrad", (5, 6), (3, 2), (1, 1)),
    ("dgrad", (5, 5), (2, 2), (3, 1)),
]


@pytest.mark.parametrize("place", [(-1, -1), (0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize(("kind", "kernel", "stride", "dilation"), STRIDED, ids=str)
def test_taps_of_strides_and_dilations_are_found(
    kind: str, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], place: tuple[int, int]
) -> None:
    """All of a filter's energy in one tap: the phases together have it once, at its polyphase position."""
    problem = Problem.make(kind, (1, 4, 60, 60), (3, 4, *kernel), stride=stride, dilation=dilation)
    tap = range(prod(kernel))[place[0] % kernel[0] * kernel[1] + place[1] % kernel[1]]
    seen = []
    for phases in [(h, w) for h in range(1, 10) for w in range(1, 10)]:
        for index in known_weights._places(problem, Way(FAST, 4, (), phases)):
            assert index.shape[1] == 25
            seen += index.flatten().tolist()
    assert seen.count(tap) == 1


# ------------------------------------------------------------------------------------------------ plans that run


def error_of(conv: polyconv.Conv2d, x: Tensor) -> float:
    y = conv(x)
    exact = F.conv2d(x.double(), conv.weight.double(), None, conv.stride, conv.padding)
    problem = Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape), padding=tuple(2 * [*conv.padding]))
    unit = scales(problem, {"x": x, "w": conv.weight.detach()})["y"]
    return largest((y.double() - exact).abs(), unit)


def layer_of(kernel: tuple[int, int], name: str, channels: int = 32) -> polyconv.Conv2d:
    torch.manual_seed(0)
    conv = polyconv.Conv2d(channels, 64, kernel, bias=False)
    with torch.no_grad():
        conv.weight.copy_(TAPS[name](tuple(conv.weight.shape)))
    return conv


def cpu() -> CpuBackend:
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    return backend


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans whose weights were measured."""
    seen: list[str] = []
    usual = known_weights.error_for

    def counted(problem: Problem, ways: tuple[Way, ...], w: Tensor) -> float:
        seen.append(", ".join(str(way.scheme) for way in ways))
        return usual(problem, ways, w)

    monkeypatch.setattr(known_weights, "error_for", counted)
    return seen


@pytest.mark.parametrize("frozen", [False, True], ids=["kept", "frozen"])
@pytest.mark.parametrize("name", ["last tap", "first tap", "shift", "geometric growth"])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (5, 9)], ids=str)
def test_a_known_weight_stays_within_the_tolerance(kernel: tuple[int, int], name: str, frozen: bool) -> None:
    conv, x = layer_of(kernel, name), torch.randn(1, 32, 140, 148)
    if frozen:
        polyconv.freeze(conv)
    with torch.inference_mode():
        assert error_of(conv, x) <= DEFAULT_TOLERANCE
    problem = replace(Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape)), frozen=frozen)
    usual = preferences.plan(cpu(), problem, inference=True)
    assert usual.keeps_weights
    chosen = preferences.plan(cpu(), problem, inference=True, w=conv.weight)
    for plan in (usual, chosen):
        uneven = known_weights.error_for(problem, plan.ways, conv.weight) if plan.ways else 0.0
        assert (uneven > max(DEFAULT_TOLERANCE, EVEN * plan.predicted_error)) == (plan is usual and chosen is not usual)


def test_energy_in_the_last_tap_has_another_plan() -> None:
    """Energy in the last tap: the plan for even weights would exceed its prediction, so it does not run."""
    for kernel in ((5, 5), (5, 9)):
        conv, x = layer_of(kernel, "last tap"), torch.randn(1, 32, 260, 260)
        problem = Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape))
        plan = preferences.plan(cpu(), problem, inference=True)
        assert preferences.plan(cpu(), problem, inference=True, w=conv.weight).choice != plan.choice
        with torch.inference_mode():
            tolerant = polyconv.conv2d(x, conv.weight, tolerance=1.0)
            exact = F.conv2d(x.double(), conv.weight.double())
            unit = scales(problem, {"x": x, "w": conv.weight})["y"]
            strayed = largest((tolerant.double() - exact).abs(), unit)
            assert strayed > plan.predicted_error
            assert error_of(conv, x) < strayed / 2


@pytest.mark.parametrize("frozen", [False, True], ids=["kept", "frozen"])
def test_a_weight_is_measured_once_and_gives_the_same_bits(frozen: bool, measured: list[str]) -> None:
    conv, x = layer_of((5, 5), "last tap"), torch.randn(1, 32, 140, 140)
    if frozen:
        polyconv.freeze(conv)
    with torch.no_grad():
        first = conv(x)
        count = len(measured)
        assert count >= 2  # the usual plan, and its replacement
        for _ in range(3):
            assert torch.equal(conv(x), first)
        assert len(measured) == count
        conv.weight.copy_(TAPS["even"](tuple(conv.weight.shape)))
        conv(x)
        assert len(measured) == count + 1  # the usual plan suits this weight
        conv.weight.copy_(layer_of((5, 5), "last tap").weight)
        assert torch.equal(conv(x), first)


def test_layers_that_are_alike_have_verdicts_of_their_own(measured: list[str]) -> None:
    even, uneven = layer_of((5, 5), "even"), layer_of((5, 5), "last tap")
    x = torch.randn(1, 32, 140, 140)
    with torch.no_grad():
        first = [conv(x) for conv in (even, uneven)]
        count = len(measured)
        for conv, before in zip((even, uneven), first, strict=True):
            assert torch.equal(conv(x), before)
    assert len(measured) == count


@pytest.mark.parametrize("frozen", [False, True], ids=["kept", "frozen"])
def test_one_axis(frozen: bool, measured: list[str]) -> None:
    """The weight of a 1-D problem is identified by itself, and measured as that of its 2-D problem."""
    torch.manual_seed(0)
    conv, x = polyconv.Conv1d(64, 64, 9, bias=False), torch.randn(4, 64, 20000)
    with torch.no_grad():
        conv.weight.copy_(TAPS["last tap"](tuple(conv.weight.shape)))
        if frozen:
            polyconv.freeze(conv)
        exact = F.conv1d(x.double(), conv.weight.double())
        problem = Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape))
        unit = scales(problem, {"x": x, "w": conv.weight})["y"]
        y = conv(x)
        count = len(measured)
        assert largest((y.double() - exact).abs(), unit) <= DEFAULT_TOLERANCE
        assert torch.equal(conv(x), y)
    assert len(measured) == count
    plan = preferences.plan(cpu(), replace(problem.as_2d(), frozen=frozen), inference=True)
    assert bool(count) == bool(plan.ways and plan.keeps_weights)


def test_a_weight_that_cannot_be_kept_is_not_measured_at_each_call(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, x = layer_of((5, 5), "last tap"), torch.randn(1, 32, 140, 140)
    monkeypatch.setattr(cpu().weights, "limit", 0)
    with torch.no_grad():
        for _ in range(2):
            conv(x)
    assert not measured


def test_a_tolerance_decides_for_itself() -> None:
    conv, x = layer_of((5, 5), "last tap"), torch.randn(1, 32, 140, 140)
    with torch.no_grad():
        conv.tolerance = 1e-3
        far = error_of(conv, x)
        conv.tolerance = 1e-4
        assert error_of(conv, x) < far
        conv.tolerance = 1e-3
        assert error_of(conv, x) == far


def test_ordinary_weights_keep_their_plans() -> None:
    """Freshly initialised weights: for every workload, the plan without known weights runs."""
    torch.manual_seed(0)
    asked = 0
    for workload in sampled(find("all"), 24, "ordinary weights"):
        problem = replace(workload.problem(Pass.FPROP), frozen=True)
        if problem.rank != 2 or problem.dtype != "float32":
            continue
        plan = plan_cpu(problem, inference=True)
        if plan.ways:
            asked += 1
            assert plan.for_weights(torch.rand(problem.w_shape) * 2 - 1) is plan
    assert asked >= 5


@pytest.mark.parametrize("name", ["middle tap", "Laplacian"])
def test_energy_in_the_middle_is_no_reason_for_another_plan(name: str) -> None:
    conv = layer_of((3, 3), name)
    problem = Problem.make("fprop", (1, 32, 140, 140), tuple(conv.weight.shape))
    plan = preferences.plan(cpu(), problem, inference=True)
    assert plan.ways
    assert preferences.plan(cpu(), problem, inference=True, w=conv.weight) is plan


# ---------------------------------------------------------------------------------------------------- explain


def test_an_audit_says_how_concentrated_weights_are() -> None:
    conv, x = layer_of((5, 5), "last tap").eval(), torch.randn(1, 32, 140, 140)
    row = polyconv.audit(conv, x, quiet=True).rows[0]
    assert row.error <= row.tolerance == DEFAULT_TOLERANCE
    assert row.error <= row.predicted * max(1.0, row.concentration) <= row.tolerance * EVEN
    training = polyconv.audit(conv.train(), x, quiet=True, backward=False).rows[0]
    assert training.plan != row.plan
    assert training.concentration > 3
    assert training.predicted < training.error <= training.predicted * training.concentration
    assert f"x {training.concentration:.1f}" in str(polyconv.audit(conv, x, quiet=True, backward=False))
    limited = polyconv.audit(conv, x, quiet=True, backward=False, limit=training.error / 4)
    remedy = limited.rows[0].remedy
    assert remedy is not None
    assert remedy.error <= training.error / 4


def test_an_explanation_says_what_runs_for_the_weights() -> None:
    even, uneven = layer_of((5, 5), "even"), layer_of((5, 5), "last tap")
    shape = (1, 32, 140, 140)
    said, about = (str(polyconv.explain(conv, shape).convolutions[0].passes[0]) for conv in (even, uneven))
    assert "for its weights as they are: predicted error" in said
    assert "runs instead" not in said
    problem = Problem.make("fprop", shape, tuple(uneven.weight.shape))
    instead = preferences.plan(cpu(), problem, inference=True, w=uneven.weight)
    assert f"where they are kept, {instead.name} runs instead" in about
    on_gpu = str(polyconv.explain(uneven, shape, device="v100").convolutions[0].passes[0])
    assert "for its weights as they are: predicted error" in on_gpu


def test_every_replacement_writes_the_output() -> None:
    """For every preferred candidate, also if another plan replaces it because the weight is known, and if that plan is
    ATen's, which allocates its result."""
    conv, x = polyconv.Conv2d(1, 1, (5, 9), bias=False).eval(), torch.randn(1, 1, 7, 41)
    polyconv.freeze(conv)
    backend = backend_for(x.device)
    with torch.no_grad(), preferences.watched() as seen:
        conv(x)
    (decision,) = seen
    for name in candidate_names(backend, decision.problem, inference=decision.inference):
        with preferences.Forced({decision.key: name}), torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight), rtol=1e-3, atol=1e-3)
