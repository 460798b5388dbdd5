"""3-D problems as 2-D problems of stacked slices: the layout of the stack, and correct results for any volume."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from any_volume import check, check_as_machine_code, volumes
from machine_suites import explore
from nightly import nightly
from polyconv.activation import Activation
from polyconv.autotune import preferences
from polyconv.backend import Run
from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.volumes import plan_volume, volume_us
from polyconv.lowering.lower import lower
from polyconv.lowering.volume_stack import NAMES, Side, Stack, stack
from polyconv.lowering.volume_sum import NAME as SUM_OF_SLICES
from polyconv.lowering.widen import Widened
from polyconv.numerics import reference
from polyconv.problem import HALF_DTYPES, PaddingMode, Pass, Problem
from polyconv.selection import Preference
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

SIDES: tuple[Side, ...] = ("x", "y")
AMPLE = 2**30


def found(problem: Problem, side: Side, room: int = AMPLE) -> Stack:
    answer = stack(problem, side, room)
    assert isinstance(answer, Stack), answer
    return answer


def by_torch(problem: Problem) -> Run:
    """Replaces the kernels of a 2-D problem."""

    def run(tensors: MutableMapping[str, Tensor]) -> None:
        w = tensors["dw" if problem.kind is Pass.WGRAD else "w"]
        for tensor, shape, strides in (
            (tensors["x"], problem.x_shape, problem.x_strides),
            (w, problem.w_shape, problem.w_strides),
            (tensors["y"], problem.y_shape, problem.y_strides),
        ):
            assert (tuple(tensor.shape), tensor.stride()) == (shape, strides)
        if problem.kind is Pass.WGRAD:
            tensors["dw"].copy_(
                reference.wgrad(problem, tensors["x"].double(), tensors["y"].double(), problem.w_shape)[0]
            )
            return
        w = w.double()
        if problem.kind is Pass.DGRAD:
            tensors["x"].copy_(reference.dgrad(problem, tensors["y"].double(), w, problem.x_shape))
            return
        bias, residual = (tensors[name].double() if name in tensors else None for name in ("bias", "residual"))
        y = reference.with_epilogue(problem, tensors["x"].double(), w, bias, residual, str(problem.activation))
        tensors["y"].copy_(y)

    return run


@given(volumes(), st.sampled_from(tuple(Pass)), st.sampled_from(SIDES), st.sampled_from([AMPLE, 3000, 800]))
@settings(max_examples=300, deadline=None)
def test_any_volume(problem: Problem, kind: Pass, side: Side, room: int) -> None:
    """For any memory limit of a stack."""
    answer = stack(problem.for_pass(kind), side, room)
    assume(isinstance(answer, Stack))
    assert isinstance(answer, Stack)
    assert 4 * answer.room <= room
    check(answer.problem, lambda _: answer.adapt({part: by_torch(part) for part in answer.problems}))


# ---- layout of the stack


def test_neighbouring_problems_share_their_slices() -> None:
    """With three taps of stride one each input slice is copied once, and no padding is."""
    problem = Problem.make(Pass.FPROP, (4, 3, 8, 9, 9), (16, 3, 3, 5, 5), padding=(1, 1, 0, 0, 0, 0))
    (block,) = found(problem, "x").blocks
    assert (len(block.images), block.slots) == (4, 10)
    assert block.pieces == ((slice(1, 9, 1), slice(0, 8, 1)),)
    assert block.zeros == (slice(0, 10, 9),)
    assert {call.problem.x_shape for call in block.calls} == {(8, 9, 9, 9)}
    assert {call.problem.x_strides for call in block.calls} == {(3 * 81, 81, 9, 1)}


def test_dilated_problems_share_nothing() -> None:
    problem = Problem.make(Pass.FPROP, (1, 3, 8, 9, 9), (16, 3, 3, 5, 5), dilation=(2, 1, 1))
    (block,) = found(problem, "x").blocks
    assert block.slots == 4 * 3
    assert [piece.slices for piece in block.pieces] == [slice(0, 4, 1), slice(2, 6, 1), slice(4, 8, 1)]


def test_slices_of_the_input_with_one_rest_have_the_same_taps() -> None:
    """Even outputs overlap the middle tap, odd ones the first and last; outputs run against the taps."""
    problem = Problem.make(Pass.DGRAD, (1, 4, 9, 8, 8), (6, 4, 3, 3, 3), stride=(2, 2, 2), padding=(1,) * 6)
    assert [phase.taps for phase in found(problem, "y").phases] == [(2, 0), (1,)]


def test_a_rest_that_no_tap_meets_is_zero() -> None:
    problem = Problem.make(Pass.DGRAD, (1, 4, 9, 8, 8), (6, 4, 2, 3, 3), stride=(3, 1, 1))
    stacked_outputs = found(problem, "y")
    assert stacked_outputs.gaps == (2, 5, 8)
    assert len(stacked_outputs.phases) == 2


def test_the_axis_with_the_fewest_taps_of_several_is_cut_across() -> None:
    for kernel, axis in (((3, 3, 1), 0), ((1, 5, 3), 2), ((3, 5, 7), 0), ((4, 2, 2), 1)):
        assert found(Problem.make(Pass.FPROP, (2, 4, 6, 7, 8), (4, 4, *kernel)), "x").axis == axis


def test_a_stack_keeps_to_its_memory() -> None:
    """In blocks of images; then in parts of an image, of about equal size; then refused."""
    problem = Problem.make(Pass.FPROP, (4, 2, 8, 16, 16), (16, 2, 3, 3, 3))
    image = 8 * 2 * 16 * 16 * 4
    assert [len(block.images) for block in found(problem, "x", 2 * image).blocks] == [2, 2]
    halves = found(problem, "x", image - 1)
    assert [block.slots for block in halves.blocks] == 8 * [5]
    assert stack(problem, "x", image // 4) == "3 slices take 0.0 MiB, and the workspace is 0.0 MiB"


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (Problem.make(Pass.FPROP, (1, 4, 4, 8, 8), (4, 4, 1, 1, 1)), "no axis has more than one tap"),
        (Problem.make(Pass.FPROP, (1, 4, 4, 8, 8), (4, 4, 3, 3, 3), w_strides=(0, 0, 0, 0, 0)), "repeat in memory"),
        (
            Problem.make(Pass.FPROP, (1, 4, 4, 8, 8), (4, 4, 3, 3, 3), padding=(1,) * 6, padding_mode="circular"),
            "with circular padding",
        ),
    ],
)
def test_what_cannot_be_stacked(problem: Problem, why: str) -> None:
    answer = stack(problem, "y", AMPLE)
    assert isinstance(answer, str)
    assert why in answer


# ---- which lowering runs


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD])
def test_few_channels_are_stacked_on_a_gpu(kind: Pass) -> None:
    """The plan says so, and why no other lowering runs."""
    problem = Problem.make(kind, (16, 3, 64, 64, 64), (64, 3, 3, 3, 3))
    plan = plan_volume(problem, DEVICES["v100"])
    assert plan.choice == NAMES["x"]
    text = plan.explain()
    assert "with the input slices of 3 taps stacked as 9 channels" in text
    assert "not sum of slices: estimated to take" in text
    assert "not stacked outputs: estimated to take" in text
    assert 0 < plan.predicted_error <= problem.tolerance
    assert plan.cost_us > plan.parts_cost


@pytest.mark.parametrize("name", [SUM_OF_SLICES, *NAMES.values()])
def test_a_way_can_be_preferred(name: str) -> None:
    problem = Problem.make(Pass.FPROP, (2, 16, 8, 32, 32), (32, 16, 3, 3, 3))
    plan = plan_volume(problem, DEVICES["v100"], prefer=Preference(name, "measured"))
    assert plan.choice == name
    assert plan.preference.startswith("measured")


def test_a_measured_way_runs() -> None:
    """Against the cost model; all three lowerings can be timed."""
    run_in_virtual_gpu(_a_measured_way_runs)


def _a_measured_way_runs() -> None:
    problem = Problem.make(Pass.FPROP, (1, 8, 6, 12, 12), (8, 8, 3, 3, 3))
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        ways = backend.plan(problem).trials()
        assert set(ways) <= {SUM_OF_SLICES, *NAMES.values()}
        assert len(ways) > 1
        for way in ways:
            with preferences.Forced({preferences.key_of(backend, problem): way}):
                plan = preferences.plan(backend, problem)
                assert plan.choice == way
                assert "chosen by the caller" in plan.explain()


def test_a_stack_has_to_be_ahead() -> None:
    """The sum needs no memory, so it runs unless a stack is clearly ahead."""
    problem = Problem.make(Pass.FPROP, (8, 48, 50, 50, 50), (48, 48, 3, 3, 3))
    device = DEVICES["v100"]
    summed, stack_of_inputs = (plan_volume(problem, device, prefer=Preference(n)) for n in (SUM_OF_SLICES, NAMES["x"]))
    assert volume_us(stack_of_inputs, device) < volume_us(summed, device) < stack_of_inputs.cost_us
    assert plan_volume(problem, device).choice == SUM_OF_SLICES


def test_the_gradient_of_a_plain_sum_is_not_copied() -> None:
    """An expanded gradient is one number, which the error model must know."""
    problem = Problem.make(Pass.DGRAD, (2, 64, 8, 32, 32), (4, 64, 3, 3, 3), y_strides=(0, 0, 0, 0, 0))
    rejected = {c.name: c.rejected for c in plan_volume(problem, DEVICES["v100"]).candidates}
    assert "elements repeat in memory" in (rejected[NAMES["y"]] or "")


# ---- as machine code


PLAIN = Problem.make(Pass.FPROP, (2, 3, 5, 9, 11), (8, 3, 3, 3, 3), padding=(1, 1, 1, 1, 0, 1), bias=True)
ON_A_GPU = {
    "padding": PLAIN,
    "residual and activation": replace(PLAIN, residual=True, activation=Activation.SILU),
    "stride": Problem.make(Pass.FPROP, (2, 3, 5, 9, 11), (8, 3, 3, 3, 3), stride=(2, 2, 1), padding=(1,) * 6),
    "stride and dilation": Problem.make(
        Pass.FPROP, (1, 4, 9, 8, 9), (6, 4, 3, 3, 3), stride=(2, 2, 2), padding=(1,) * 6, dilation=(2, 2, 2)
    ),
    "groups": Problem.make(Pass.FPROP, (2, 6, 5, 8, 9), (4, 3, 3, 3, 3), stride=(2, 1, 1), padding=(1,) * 6, groups=2),
    "channels_last": replace(PLAIN, stride=(2, 1, 2)).channels_last(),
    "one tap along the width": Problem.make(Pass.FPROP, (3, 3, 6, 9, 5), (12, 3, 3, 3, 1)),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_as_machine_code(name: str, kind: Pass, side: Side) -> None:
    run_in_virtual_gpu(check_as_machine_code, ON_A_GPU[name].for_pass(kind), NAMES[side])


def test_a_border_as_machine_code() -> None:
    for kind in Pass:
        problem = replace(PLAIN, padding_mode=PaddingMode.REFLECT).for_pass(kind)
        run_in_virtual_gpu(check_as_machine_code, problem, NAMES["x"])


@pytest.mark.parametrize("kind", list(Pass), ids=str)
def test_what_is_chosen_runs_as_machine_code(kind: Pass) -> None:
    run_in_virtual_gpu(_what_is_chosen_runs, PLAIN.for_pass(kind))


def _what_is_chosen_runs(problem: Problem) -> None:
    torch.manual_seed(0)
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        check(problem, lambda problem: backend.prepare(backend.plan(problem)))
        assert gpu.launches


HALVES = Problem.make(Pass.FPROP, (2, 8, 5, 9, 11), (16, 8, 3, 3, 3), padding=(1, 1, 1, 1, 0, 1), bias=True)
IN_HALF = {
    "padding": HALVES,
    "residual and activation, channels_last": replace(
        HALVES, residual=True, activation=Activation.SILU
    ).channels_last(),
    "stride": Problem.make(Pass.FPROP, (1, 16, 5, 9, 11), (8, 16, 3, 3, 3), stride=(2, 2, 1), padding=(1,) * 6),
    "one tap across": Problem.make(Pass.FPROP, (1, 8, 4, 9, 10), (8, 8, 1, 3, 3)).channels_last(),
}


@pytest.mark.parametrize("kind", list(Pass), ids=str)
@pytest.mark.parametrize("name", IN_HALF)
def test_half_precision_as_machine_code(name: str, kind: Pass) -> None:
    """Without copies in float32; a result is rounded once, a weight gradient's parts as well."""
    dtype = HALF_DTYPES[len(name) % 2]
    problem = replace(IN_HALF[name], dtype=dtype).for_pass(kind)
    assert lower(problem, "cuda") is None
    run_in_virtual_gpu(_what_is_chosen_runs, problem)


def test_slices_are_not_added_in_half_precision() -> None:
    for kind in (Pass.FPROP, Pass.DGRAD):
        problem = replace(HALVES, dtype="float16").for_pass(kind)
        plan = plan_volume(problem, DEVICES["a100"])
        rejected = {one.name: one.rejected for one in plan.candidates}
        assert plan.choice == NAMES["x" if kind is Pass.FPROP else "y"]
        assert rejected[SUM_OF_SLICES] == "parts of a sum would be rounded to float16 in memory"
    few = replace(PLAIN, dtype="float16")
    assert isinstance(lower(few, "cuda"), Widened)


@nightly
@pytest.mark.parametrize("kind", list(Pass), ids=str)
def test_any_volume_as_machine_code(kind: Pass) -> None:
    """Every side that can be stacked."""
    run_in_virtual_gpu(_any_volume_as_machine_code, kind, timeout=3600)


def _any_volume_as_machine_code(kind: Pass) -> None:
    drawn: set[tuple[Problem, Side]] = set()

    def run(pair: tuple[Problem, Side]) -> None:
        problem, side = pair[0].for_pass(kind), pair[1]
        if isinstance(stack(problem, side, AMPLE), Stack):
            drawn.add((problem, side))
            check_as_machine_code(problem, NAMES[side])

    explore(st.tuples(volumes(), st.sampled_from(SIDES)), run, each=300)
    assert len(drawn) >= 100
