"""Long kernels by FFTs, and strided signals by a matrix product of frames: every pass and geometry against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyconv
from cpu_passes import load_native, same_bits_for_any_threads
from polyconv.cpu import weight_cache
from polyconv.cpu.engines import aten, signals
from polyconv.cpu.engines.in_torch import fourier, frames
from polyconv.cpu.planner import here, plan_cpu
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.numerics import known_weights, reference
from polyconv.numerics.prediction import Way
from polyconv.numerics.scale import largest, scales
from polyconv.problem import RESULTS, Pass, Problem
from polyconv.selection import Preference, by_cost

load_native()

OPERANDS = {Pass.FPROP: "xw", Pass.DGRAD: "yw", Pass.WGRAD: "xy"}


def operands(problem: Problem, factor: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    return {name: torch.randn(shapes[name]) * factor for name in OPERANDS[problem.kind]}


def deviation(engine: ModuleType, problem: Problem, given: dict[str, Tensor]) -> tuple[float, float]:
    """Observed and predicted error of an engine's candidate; of several, of that which is closest to its prediction.
    The output is poisoned before."""
    name = RESULTS[problem.kind]
    shape = {"y": problem.y_shape, "x": problem.x_shape, "dw": problem.w_shape}[name]
    if problem.kind is Pass.FPROP:
        exact = reference.fprop(problem, given["x"], given["w"])
    elif problem.kind is Pass.DGRAD:
        exact = reference.dgrad(problem, given["y"], given["w"], problem.x_shape)
    else:
        exact = reference.wgrad(problem, given["x"], given["y"], problem.w_shape)[0]
    found = []
    for candidate in engine.candidates(problem, here()):
        assert candidate.refusal is None
        tensors = {**given, name: torch.full(shape, torch.nan)}
        engine.prepare(candidate, problem, None)(tensors)
        found.append((largest((tensors[name].double() - exact).abs(), scales(problem, given)[name]), candidate.error))
    return max(found, key=lambda pair: pair[0] / pair[1])


@st.composite
def geometries(draw: st.DrawFn) -> Problem:
    rank = draw(st.integers(1, 3))
    kernel = [draw(st.sampled_from({1: [64, 100, 257], 2: [8, 9, 13, 64], 3: [4, 5, 7]}[rank])) for _ in range(rank)]
    stride, dilation = ([draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(2))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])) if rank > 1 else "zeros"
    padding = [draw(st.integers(-1 if mode == "zeros" else 0, 5)) for _ in range(2 * rank)]
    groups, c, k = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 14])), draw(st.sampled_from([1, 2, 13]))
    longest = 40 if rank < 3 else 9
    size = [(r - 1) * d + 3 + draw(st.integers(0, longest)) for r, d in zip(kernel, dilation, strict=True)]
    return Problem.make(
        draw(st.sampled_from(Pass)),
        (draw(st.integers(1, 3)), groups * c, *size),
        (groups * k, c, *kernel),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        groups=groups,
        padding_mode=mode,
    )


@given(geometries())
@settings(max_examples=60, deadline=None)
def test_any_geometry(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fourier, "CHUNK", 2**14)  # several chunks even for small problems
        observed, predicted = deviation(fourier, problem, operands(problem))
    assert observed <= predicted


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize(
    ("taps", "stride", "padding"),
    [(64, 16, (0, 0)), (40, 16, (-3, 9)), (8, 8, (5, 0)), (64, 8, (1, 2)), (30, 16, (0, 20))],
)
def test_frames(kind: Pass, taps: int, stride: int, padding: tuple[int, int]) -> None:
    """Direct summation and, where frames overlap, F(2, r) and F(4, r) of all overlaps."""
    shapes = (2, 5, 1, 333), (40, 5, 1, taps)
    problem = Problem.make(kind, *shapes, stride=(1, stride), padding=(0, 0, *padding))
    count = 1 if kind is Pass.WGRAD or taps == stride else 3
    assert len(list(frames.candidates(problem, here()))) == count
    observed, predicted = deviation(frames, problem, operands(problem))
    assert observed <= predicted


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
@pytest.mark.parametrize("frame_count", [5, 6, 7, 8])
def test_frames_of_an_image_do_not_reach_another(kind: Pass, frame_count: int) -> None:
    """An image of infinities beside two others, whose results have the bits of three finite images."""
    problem = Problem.make(kind, (3, 2, 1, 16 * frame_count + 48), (40, 2, 1, 64), stride=(1, 16))
    given, name = operands(problem), RESULTS[kind]
    for candidate in frames.candidates(problem, here()):
        found = []
        for special in (1.0, torch.inf):
            first, *_ = OPERANDS[kind]
            signal = given[first].clone()
            signal[1] = special
            shape = problem.y_shape if name == "y" else problem.x_shape
            tensors = {**given, first: signal, name: torch.full(shape, torch.nan)}
            frames.prepare(candidate, problem, None)(tensors)
            found.append(tensors[name][::2])
        assert torch.equal(*found), candidate.name


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
def test_transformed_weights_of_frames_are_kept_for_all_lengths(kind: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients; a changed weight is transformed again. The error for known weights is predicted once."""
    judged: list[Tensor] = []
    error_for = known_weights.error_for

    def counted(problem: Problem, ways: tuple[Way, ...], w: Tensor) -> float:
        judged.append(w)
        return error_for(problem, ways, w)

    monkeypatch.setattr(known_weights, "error_for", counted)
    torch.manual_seed(1)  # else x would repeat the numbers of w
    cache, w = TransformedWeights(), torch.randn(514, 1, 1, 512)
    for factor in (1.0, -2.0):
        w *= factor
        judged.clear()
        for frame_count in (301, 333, 350):
            problem = Problem.make(kind, (1, 1, 1, 128 * frame_count + 384), w.shape, stride=(1, 128))
            plan = plan_cpu(problem, inference=True, prefer=Preference("F(4,4), frames"))
            assert plan.engine is frames
            assert plan.keeps_weights
            given = {**operands(problem), "w": w}
            name = RESULTS[kind]
            tensors = {**given, name: torch.full(problem.y_shape if name == "y" else problem.x_shape, torch.nan)}
            plan.prepared(cache)(tensors)
            if kind is Pass.FPROP:
                exact = reference.fprop(problem, given["x"], w)
            else:
                exact = reference.dgrad(problem, given["y"], w, problem.x_shape)
            observed = largest((tensors[name].double() - exact).abs(), scales(problem, given)[name])
            assert observed <= plan.predicted_error
            assert cache.size == 4 * 7 * 514 * 128
        assert len(judged) == (1 if kind is Pass.FPROP else 0)


def test_frozen_weights_of_inverse_transforms_are_not_read_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of an input gradient does not say that the weight is frozen; the weight does. A change is still seen."""
    module = torch.nn.ConvTranspose1d(514, 1, 512, stride=128, bias=False).eval()
    weight, x = module.weight, torch.randn(1, 514, 300)
    polyconv.replace(module)
    polyconv.freeze(module)
    hashed: list[str] = []
    operator = weight_cache._operator

    def counted(name: str) -> object:
        hashed.append(name)
        return operator(name)

    monkeypatch.setattr(weight_cache, "_operator", counted)
    for changed, reads in ((False, 1), (False, 0), (True, 1), (False, 0)):
        hashed.clear()
        with torch.no_grad():
            if changed:
                weight *= -2.0
            found = module(x)
        assert hashed.count("hash") == reads
        wanted = torch.nn.functional.conv_transpose1d(x.double(), weight.double(), stride=128)
        assert torch.allclose(found.double(), wanted, atol=1e-3)


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frames_of_weights_that_cannot_be_kept(kind: Pass, dtype: str) -> None:
    """A tiny weight needs its values, and an inference tensor counts no changes: frames are summed directly. Half
    precision is widened."""
    problem = Problem.make(kind, (2, 1, 1, 16000), (130, 1, 1, 128), stride=(1, 32), dtype=dtype)
    form = "F(4,4)" if dtype == "float32" else "F(4,4) in float32"
    plan = plan_cpu(problem, inference=True, prefer=Preference(f"{form}, frames"))
    assert plan.keeps_weights, plan.explain()
    run, name = plan.prepared(TransformedWeights()), RESULTS[kind]
    for factor, inference in ((1.0, False), (1.0, True), (1e-30, False)):
        with torch.inference_mode(inference):
            given = {name: values.to(getattr(torch, dtype)) for name, values in operands(problem).items()}
            given["w"] = given["w"] * factor
            shape = problem.y_shape if name == "y" else problem.x_shape
            tensors = {**given, name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))}
            run(tensors)
            if kind is Pass.FPROP:
                exact = reference.fprop(problem, given["x"], given["w"])
            else:
                exact = reference.dgrad(problem, given["y"], given["w"], problem.x_shape)
            observed = largest((tensors[name].double() - exact).abs(), scales(problem, given)[name])
            assert observed <= plan.predicted_error


def spiked(shape: tuple[int, ...]) -> Tensor:
    """One value far above the others."""
    values = torch.randn(shape)
    values.view(-1)[values.numel() // 3] = 1e4
    return values


DATA = {
    "constant": lambda shape: torch.full(shape, 0.3),
    "ramp": lambda shape: torch.linspace(-1, 1, shape[-1]).expand(shape).clone(),
    "one-hot": lambda shape: torch.eye(1, shape[-1]).expand(shape).clone(),
    "of one sign": torch.rand,
    "spiked": spiked,
}


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("which", range(2), ids=["one", "other"])
@pytest.mark.parametrize("data", DATA)
def test_errors_are_predicted_for_uneven_operands(kind: Pass, which: int, data: str) -> None:
    """The error depends on the energy of a block, not on where it is, so it needs no known weights."""
    problem = Problem.make(kind, (1, 4, 1, 900), (4, 4, 1, 128))
    given = operands(problem)
    name = OPERANDS[kind][which]
    given[name] = DATA[data](given[name].shape)
    observed, predicted = deviation(fourier, problem, given)
    assert observed <= predicted


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("factor", [1e-40, 1e-19, 1e15])
@pytest.mark.parametrize("engine", [fourier, frames], ids=["fourier", "frames"])
def test_errors_are_relative_for_tiny_and_large_operands(engine: ModuleType, kind: Pass, factor: float) -> None:
    problem = Problem.make(kind, (1, 2, 1, 500), (3, 2, 1, 96), stride=(1, 16))
    given = operands(problem)
    given[OPERANDS[kind][0]] *= factor
    observed, predicted = deviation(engine, problem, given)
    # Denormal results are multiples of 2^-149.
    assert observed <= predicted + (2.0**-149 / (factor * 10) if factor < 1e-30 else 0.0)


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize(
    ("x", "w", "stride"), [((2, 20, 1, 700), (24, 20, 1, 65), 1), ((1, 1, 90, 90), (1, 1, 9, 9), 1)], ids=str
)
def test_bits_do_not_depend_on_threads(kind: Pass, x: tuple[int, ...], w: tuple[int, ...], stride: int) -> None:
    problem = Problem.make(kind, x, w, stride=(1, stride))
    given, name = operands(problem), RESULTS[kind]
    shape = {"y": problem.y_shape, "x": problem.x_shape, "dw": problem.w_shape}[name]

    def compute() -> list[Tensor]:
        (candidate,) = fourier.candidates(problem, here())
        tensors = {**given, name: torch.full(shape, torch.nan)}
        fourier.prepare(candidate, problem, None)(tensors)
        return [tensors[name]]

    same_bits_for_any_threads(compute)


def test_long_kernels_are_planned_as_ffts() -> None:
    """1024 taps; frames of a short-time Fourier transform before PyTorch's convolution; 3x3 as neither."""
    for kind in Pass:
        signal = Problem.make(kind, (1, 64, 1, 16000), (64, 64, 1, 1024))
        assert plan_cpu(signal).engine is fourier
        synthesis = Problem.make(kind, (1, 1, 1, 58112), (1026, 1, 1, 1024), stride=(1, 256))
        names = [one.name for one in by_cost(plan_cpu(synthesis).candidates)]
        assert names.index("direct, frames") < names.index("PyTorch's convolution, ATen")
        volume = Problem.make(kind, (1, 2, 48, 48, 48), (2, 2, 15, 15, 15))
        assert plan_cpu(volume).engine is fourier
        small = plan_cpu(Problem.make(kind, (1, 8, 64, 64), (8, 8, 3, 3)))
        refused = {one.name: one.rejected for one in small.candidates if one.error is None}
        assert "of at least 64 taps, not 9" in (refused["FFT, Fourier"] or "")


@pytest.mark.parametrize("frame_count", [4, 16, 32, 60])
@pytest.mark.parametrize(("kernel", "stride"), [(1024, 256), (1024, 512), (512, 128), (256, 64)])
def test_short_spectrograms_are_left_to_pytorch(kernel: int, stride: int, frame_count: int) -> None:
    """Measured on a Xeon of model 207: copying the signal for each channel takes 7 to 25 times as long as oneDNN's
    whole convolution, and a matrix product of few frames up to 1.3 times."""
    length = kernel + stride * (frame_count - 1)
    problem = Problem.make("fprop", (1, 1, 1, length), (kernel + 2, 1, 1, kernel), stride=(1, stride))
    (theirs,) = aten.candidates(problem, here())
    for ours in (*signals.candidates(problem, here()), *frames.candidates(problem, here())):
        assert ours.cycles - ours.weight_cycles > theirs.cycles, ours.name


def test_a_tolerance_below_the_prediction_refuses_ffts() -> None:
    problem = Problem.make("fprop", (1, 1, 1, 64000), (1, 1, 1, 1024), tolerance=1e-7)
    assert plan_cpu(problem).engine is not fourier


def test_spectra_of_weights_are_kept_in_inference() -> None:
    problem = Problem.make("fprop", (1, 16, 1, 16000), (16, 16, 1, 512), bias=True, activation="silu", residual=True)
    plan = plan_cpu(problem, inference=True, prefer=Preference(fourier_name(problem)))
    assert plan.keeps_weights
    cache, given = TransformedWeights(), operands(problem)
    given |= {"bias": torch.randn(16), "residual": torch.randn(problem.y_shape)}
    run = plan.prepared(cache)
    for factor in (1.0, -2.0):  # a changed weight is transformed again
        given["w"] *= factor
        tensors = {**given, "y": torch.full(problem.y_shape, torch.nan)}
        run(tensors)
        assert cache.size > 0
        exact = reference.with_epilogue(problem, given["x"], given["w"], given["bias"], given["residual"], "silu")
        assert largest((tensors["y"].double() - exact).abs(), scales(problem, given)["y"]) <= plan.predicted_error


def fourier_name(problem: Problem) -> str:
    (candidate,) = fourier.candidates(problem, here())
    return candidate.name


def test_modules_train_through_ffts() -> None:
    """Through autograd: a signal, and its transposed convolution."""
    torch.manual_seed(0)
    for ours, theirs, shape in (
        (polyconv.Conv1d(2, 3, 600), torch.nn.Conv1d(2, 3, 600), (1, 2, 20000)),
        (polyconv.ConvTranspose1d(2, 3, 600, stride=2), torch.nn.ConvTranspose1d(2, 3, 600, stride=2), (1, 2, 9000)),
    ):
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(shape)
        grads = []
        for module in (ours, theirs):
            leaf = x.clone().requires_grad_()
            (module(leaf).square().mean()).backward()
            grads.append([leaf.grad, *(p.grad for p in module.parameters())])
            module.zero_grad()
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
