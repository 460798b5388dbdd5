"""docs/adding-a-kernel.md, followed: a toy CUDA family and a toy CPU engine, each a module and one name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from emulate import V100, check
from polyconv import backend as the_backend
from polyconv.autotune import preferences
from polyconv.backend import candidate_names
from polyconv.cpu import native
from polyconv.cpu import planner as cpu_planner
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.plan import CpuCandidate
from polyconv.cuda.planner import KernelSpec, plan_cuda
from polyconv.cuda.planner import planner as planner_planner
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import ImplicitGemmCandidate
from polyconv.model.explain import explain_plans
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem

PROBLEM = Problem.make("fprop", (2, 5, 7, 9), (6, 5, 3, 3), padding=(1, 1, 1, 1))


@dataclass(frozen=True)
class ToyCandidate(ImplicitGemmCandidate):
    """Forward passes on an existing kernel, under a new name."""

    @property
    def name(self) -> str:
        return f"toy_{self.tile.name}"

    def refusal(self, problem: Problem) -> str | None:
        return "no bias" if problem.bias else super().refusal(problem)


TOYS = tuple(ToyCandidate(tile, fprop_dgrad.ROWS) for tile in fprop_dgrad.FPROP_DGRAD_TILES)


def toy_kernels() -> Iterator[KernelSpec]:
    return (toy.kernel for toy in TOYS)


FAMILY = SimpleNamespace(
    candidates=lambda problem: TOYS if problem.kind is Pass.FPROP else (),
    all_kernels=toy_kernels,
)


def test_a_family_of_cuda_kernels_is_a_module_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned, explained, refused with its own reason, and executed as machine code against float64."""
    before = set(planner_planner.all_kernels())
    monkeypatch.setattr(planner_planner, "FAMILIES", (FAMILY,))
    plan_cuda.cache_clear()
    try:
        assert set(planner_planner.all_kernels()) == set(toy_kernels()) <= before
        plan = plan_cuda(PROBLEM, V100)
        assert plan.choice.startswith("toy_")
        assert f"runs direct ({plan.choice})" in plan.explain()
        assert "not toy_" in plan.explain()
        with pytest.raises(planner_planner.PlanError, match=r"no kernel can run .*toy_.*: no bias"):
            plan_cuda(Problem.make("fprop", (2, 5, 7, 9), (6, 5, 3, 3), bias=True), V100)
    finally:
        plan_cuda.cache_clear()
    x, w = torch.randn(PROBLEM.x_shape), torch.randn(PROBLEM.w_shape)
    check(PROBLEM, x, w, None, torch.empty(PROBLEM.y_shape), plan)


def toy_candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    refusal = None if problem.kind is Pass.FPROP else "only forward"
    yield CpuCandidate("toy", "exact", direct=True, cycles=1.0, error=1e-6, refusal=refusal)


def toy_prepare(chosen: CpuCandidate, problem: Problem, weights: object) -> the_backend.Run:
    return lambda t: t["y"].copy_(reference.fprop(problem, t["x"], t["w"], t.get("bias")))  # type: ignore[return-value]


ENGINE = SimpleNamespace(NAME="toy", candidates=toy_candidates, prepare=toy_prepare)


@pytest.mark.skipif(not native.is_available(), reason=str(native.why_absent()))
def test_a_cpu_engine_is_a_module_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned, explained, refused with its own reason, and executed against float64."""
    monkeypatch.setattr(cpu_planner, "ENGINES", (*cpu_planner.ENGINES, ENGINE))
    cpu_planner._plan.cache_clear()
    try:
        backend = CpuBackend()
        assert preferences.plan(backend, PROBLEM).choice == candidate_names(backend, PROBLEM)[0] == "exact, toy"
        assert "runs exact, toy" in explain_plans(backend, PROBLEM)
        gradient = cpu_planner.plan_cpu(Problem.make("dgrad", PROBLEM.x_shape, PROBLEM.w_shape))
        assert "not exact, toy: only forward" in gradient.explain(verbose=True)
        tensors = {"x": torch.randn(PROBLEM.x_shape), "w": torch.randn(PROBLEM.w_shape)}
        y = torch.full(PROBLEM.y_shape, float("nan"))
        backend.prepare(preferences.plan(backend, PROBLEM))({**tensors, "y": y})
    finally:
        cpu_planner._plan.cache_clear()
    error = (y.double() - reference.fprop(PROBLEM, tensors["x"], tensors["w"], None)).abs()
    assert largest(error, scales(PROBLEM, tensors)["y"]) <= 1e-6
