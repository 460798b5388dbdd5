"""Plans for the A100 as sm_80 machine code, against float64 PyTorch: a sample of the nightly set."""

from __future__ import annotations

import random

import pytest

import emulate
from emulate import check
from gpu_emulator import elf, launch
from machine_suites import SUITES, Shape
from nightly import nightly
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, KernelSpec, all_kernels, plan_cuda
from polyconv.problem import Pass

A100 = DEVICES["a100"]
SAMPLED = 8
_NAMED = [(f"{suite}: {name}", shape) for suite, cases in SUITES.items() for name, shape in cases.items()]


@pytest.mark.parametrize("kind", tuple(Pass), ids=str)
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, id=name) for name, shape in random.Random(80).sample(_NAMED, SAMPLED)]
)
def test_planned_for_the_a100(shape: Shape, kind: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "arch", A100.arch)
    x, w, bias, dy = shape.tensors()
    problem, x = shape.lowered(kind, x, w, dy)
    for report in check(problem, x, w, bias, dy, plan_cuda(problem, A100)):
        assert report.chip.arch == A100.arch


@nightly
@pytest.mark.parametrize("spec", all_kernels(A100.arch), ids=lambda spec: spec.symbol)
def test_every_instruction_is_understood(spec: KernelSpec) -> None:
    code = elf.load(KernelCache().get(spec, A100.arch)).kernel(spec.symbol).code
    assert launch._program(code, A100.arch).unsupported() == []
