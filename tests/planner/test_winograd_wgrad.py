"""The Winograd weight gradient as sm_70 machine code against float64 PyTorch: named edges, random geometries, every
tile. Errors stay within the prediction and within 1e-4 of the result's scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from emulate import NAN, V100, execute, fingerprint
from machine_suites import EDGES, KERNELBENCH, Shape, explore, shapes
from nightly import NIGHTLY, sampled
from polyconv.cuda.planner.winograd import wgrad
from polyconv.cuda.planner.winograd.wgrad import WinogradWgradCandidate
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem

pytestmark = pytest.mark.usefixtures("every_arch")
RANDOM_PARTS, RANDOM_EACH = (4, 45) if NIGHTLY else (1, 12)
SMS = 2
MORE = {
    "three rows of tiles, five slices": Shape((5, 8, 12, 17), 8, (3, 3), padding=(1, 1, 1, 1)),
    "seven taps each way": Shape((1, 4, 15, 23), 5, (7, 7), padding=(3, 3, 3, 3)),
    "eleven taps along W": Shape((1, 4, 9, 37), 5, (3, 11), padding=(1, 1, 5, 5)),
    "thirteen taps along both": Shape((1, 3, 17, 18), 4, (13, 13), padding=(2, 2, 2, 2)),
    "one row of taps": Shape((2, 8, 6, 40), 8, (1, 5), padding=(0, 0, 2, 2)),
    "one column of taps": Shape((2, 8, 40, 6), 8, (5, 1), padding=(2, 2, 0, 0)),
    "four phases along W": Shape((1, 8, 9, 41), 8, (3, 3), dilation=(1, 4)),
    "five phases along W": Shape((1, 8, 9, 41), 8, (3, 5), dilation=(2, 5)),
    "six phases, nine taps": Shape((1, 8, 9, 90), 8, (2, 9), dilation=(1, 6)),
    "rows longer than a chunk": Shape((1, 4, 5, 150), 4, (3, 9), padding=(1, 1, 4, 4), dilation=(1, 3)),
    "tiles of channels in both directions": Shape((1, 70, 6, 9), 130, (3, 3), padding=(1, 1, 1, 1)),
    "seven by seven, stride two": Shape((1, 3, 23, 25), 10, (7, 7), (2, 2), (3, 3, 3, 3)),
    "nine by nine, stride two": Shape((1, 3, 23, 25), 10, (9, 9), (2, 2), (4, 4, 4, 4)),
    "groups of odd sizes, strided": Shape((2, 15, 11, 12), 21, (3, 5), (2, 1), (1, 1, 2, 2), groups=3),
}
NAMED = [
    pytest.param(shape, id=name)
    for name, shape in {**dict(sampled(EDGES.items(), 20, "wgrad")), **KERNELBENCH, **MORE}.items()
]


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, dy, with dy so small that dw is of order one, as for the gradient of a mean."""
    x, w, _, dy = shape.tensors()
    scale = max(1, dy.shape[0] * dy.shape[2] * dy.shape[3]) ** -0.5
    if shape.layout == "expanded":
        return x, w, (torch.randn(()) * scale).expand(dy.shape)
    return x, w, dy.mul_(scale)


def gradients(
    way: WinogradWgradCandidate, problem: Problem, x: Tensor, dy: Tensor, workspace: int
) -> tuple[Tensor, Tensor]:
    """dw and db by the emulator, with all buffers poisoned."""
    schedule = way.schedule(problem, SMS, workspace)
    assert schedule.workspace_bytes <= max(workspace, way.schedule(problem, SMS, 0).workspace_bytes)
    buffers = {
        "x": x,
        "y": dy,
        "dw": torch.empty_strided(problem.w_shape, problem.w_strides).fill_(NAN),
        "db": torch.full((problem.out_channels,), NAN),
        "workspace": torch.full((schedule.workspace_bytes // 4 + 1,), NAN),
    }
    before = fingerprint(x), fingerprint(dy)
    for launch in schedule.launches:
        execute(launch, buffers)
    assert before == (fingerprint(x), fingerprint(dy)), "an input was changed"
    return buffers["dw"], buffers["db"]


def check(shape: Shape, workspace: int = 2**22) -> int:
    """Every variant that takes the shape; returns their number."""
    x, w, dy = inputs(shape)
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    found = 0
    for way in wgrad.candidates(problem):
        if way.refusal(problem) is not None:
            continue
        found += 1
        dw, db = gradients(way, problem, x, dy, workspace)
        want_dw, want_db = reference.wgrad(problem, x, dy, problem.w_shape)
        error = (dw.double() - want_dw).abs()
        assert not error.isnan().any(), f"{way.name}: elements of dw were not written: {problem}"
        assert (error <= 1e-4 + 1e-4 * want_dw.abs()).all(), f"{way.name}: off by {error.max():.1e}: {problem}"
        if shape.layout != "expanded":  # the prediction assumes random data, not a constant
            observed, predicted = (
                largest(error, scales(problem, {"x": x, "y": dy})["dw"]),
                way.error(problem, SMS, workspace),
            )
            assert observed <= predicted, f"{way.name}: {observed:.1e} > {predicted:.1e}"
        if problem.bias:
            total = dy.double().abs().sum((0, 2, 3))
            assert ((db.double() - want_db).abs() <= 1e-6 * total + 1e-30).all(), f"{way.name}: db: {problem}"
        else:
            assert db.isnan().all()
    return found


@pytest.mark.parametrize("shape", NAMED)
def test_named(shape: Shape) -> None:
    torch.manual_seed(1)
    check(shape)


@st.composite
def fast_shapes(draw: st.DrawFn) -> Shape:
    """Geometries that some variant takes: zero borders, taps worth a transform, not depthwise."""
    shape = draw(shapes().filter(lambda s: s.groups == 1 or s.groups < s.x[1]))
    return replace(shape, mode="zeros")


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
def test_random(part: int) -> None:
    taken = 0

    def runs(shape: Shape) -> None:
        nonlocal taken
        taken += check(shape) > 0

    explore(fast_shapes(), runs, part=part, each=RANDOM_EACH)
    assert taken >= RANDOM_EACH // 2


def test_small_workspace_and_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slice, added to memory many times; then one slice per row."""
    monkeypatch.setattr(wgrad, "FLUSH", 8)
    torch.manual_seed(2)
    shape = Shape((2, 8, 21, 70), 8, (3, 3), padding=(1, 1, 1, 1))
    assert check(shape, workspace=0)
    assert check(shape, workspace=2**26)


def test_same_input_same_bits() -> None:
    x, w, dy = inputs(EDGES["tiles across images"])
    problem = EDGES["tiles across images"].problem(Pass.WGRAD, x, w, dy)
    for way in wgrad.candidates(problem):
        first, second = (gradients(way, problem, x, dy, 2**22) for _ in range(2))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_infinities_stay_in_their_channels() -> None:
    """Ragged tiles multiply by zero; a value outside an element's sum must not reach it."""
    shape = Shape((2, 5, 9, 9), 7, (3, 3), padding=(1, 1, 1, 1))
    x, w, dy = inputs(shape)
    dy[0, 3] = torch.inf
    x[1, 2] = torch.nan
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    for way in wgrad.candidates(problem):
        dw, db = gradients(way, problem, x, dy, 2**22)
        assert torch.isfinite(dw[[0, 1, 2, 4, 5, 6]][:, [0, 1, 3, 4]]).all()
        assert torch.isfinite(db[[0, 1, 2, 4, 5, 6]]).all()


def test_columns_that_no_output_reads_do_not_matter() -> None:
    shape = Shape((1, 4, 12, 13), 4, (3, 3), stride=(1, 1), padding=(0, -2, 0, -3), bias=False)
    x, w, dy = inputs(shape)
    x[:, :, 10:], x[..., 10:] = torch.nan, torch.nan
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    for way in wgrad.candidates(problem):
        assert torch.isfinite(gradients(way, problem, x, dy, 2**22)[0]).all()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape((1, 4, 9, 9), 4, (3, 3), groups=4), "depthwise"),
        (Shape((1, 4, 9, 9), 4, (3, 3), padding=(1, 1, 1, 1), mode="reflect"), "border"),
        (Shape((1, 4, 9, 9), 4, (1, 1)), "saves no"),
    ],
)
def test_refusals(shape: Shape, reason: str) -> None:
    x, w, dy = inputs(shape)
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    for way in wgrad.candidates(problem):
        assert reason in (way.refusal(problem) or "")
        assert "only for" in (way.refusal(problem.for_pass(Pass.FPROP)) or "")


def test_nothing_for_more_taps_than_any_algorithm_has() -> None:
    problem = Problem.make(Pass.WGRAD, (1, 4, 40, 40), (4, 4, 14, 3))
    assert not list(wgrad.candidates(problem))


WORKLOADS = {
    "W1": Problem.make("wgrad", (8, 32, 512, 512), (64, 32, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "W2": Problem.make("wgrad", (16, 16, 1024, 1024), (128, 16, 3, 3)),
    "W3": Problem.make("wgrad", (8, 32, 512, 512), (64, 32, 5, 9)),
    "kb50": Problem.make("wgrad", (256, 3, 224, 224), (96, 3, 11, 11), stride=(4, 4), padding=(2, 2, 2, 2)),
    "kb55": Problem.make("wgrad", (8, 64, 512, 1024), (128, 64, 3, 3)),
    "kb56": Problem.make("wgrad", (8, 64, 512, 256), (128, 64, 5, 7)),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_stay_within_tolerance_and_workspace(name: str) -> None:
    problem, workspace = WORKLOADS[name], 64 * 2**20
    ways = [way for way in wgrad.candidates(problem) if way.refusal(problem) is None]
    assert min(way.error(problem, V100.sms, workspace) for way in ways) <= problem.tolerance
    assert all(way.schedule(problem, V100.sms, workspace).workspace_bytes <= workspace for way in ways)


def test_every_kernel_fits_the_smallest_shared_memory() -> None:
    symbols = [spec.symbol for spec in wgrad.all_kernels()]
    assert len(set(symbols)) == len(symbols)
    for h in wgrad.ALONG_H:
        for w in wgrad.ALONG_W:
            for classed in (False, True):
                for tile in wgrad.tiles(h, w, classed):
                    assert wgrad.shared_bytes(w, tile) <= V100.shared_per_block_optin
                    assert wgrad.kernel(h, w, tile, classed).threads % tile.k == 0
