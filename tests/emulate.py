"""Executes a plan as machine code on CPU tensors, with every check of the emulator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

import gpu_emulator
from polyconv.activation import Activation
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, KernelSpec, Launch, Plan, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.numerics import reference
from polyconv.numerics.error_model import TYPICAL, Magnitudes
from polyconv.numerics.prediction import reduction_of
from polyconv.numerics.scale import largest, scales
from polyconv.problem import DEFAULT_TOLERANCE, Pass, Problem

V100, A100 = DEVICES["v100"], DEVICES["a100"]
NAN = float("nan")
arch = V100.arch
"""Architecture of the executed machine code, for plans of any GPU; changed by the fixture ``every_arch``. Kernels that
it lacks run as code of the GPU that has them."""


def cubin(spec: KernelSpec) -> bytes:
    return _compiled(spec, next(one for one in (arch, V100.arch, A100.arch) if spec.runs_on(one)))


@cache
def _compiled(spec: KernelSpec, arch: str) -> bytes:
    return KernelCache().get(spec, arch)


def run_plan(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    *,
    blocks: Iterable[Sequence[int]] | None = None,
    check_global: bool = True,
) -> list[gpu_emulator.Report]:
    """Every launch of the plan, in order, on a NaN workspace. ``blocks``: only these blocks of the last launch."""
    workspace = torch.full((plan.workspace_bytes // 4 + 1,), NAN)
    buffers = {**tensors, "workspace": workspace}
    return [
        execute(launch, buffers, blocks=blocks if launch is plan.launches[-1] else None, check_global=check_global)
        for launch in plan.launches
    ]


def execute(
    launch: Launch,
    buffers: Mapping[str, Tensor],
    *,
    blocks: Iterable[Sequence[int]] | None = None,
    check_global: bool = True,
) -> gpu_emulator.Report:
    """One launch, restricted to the buffers that it points into."""
    used = {slot.buffer for slot in launch.pointers} & buffers.keys()
    return gpu_emulator.run(
        cubin(launch.kernel),
        launch.kernel.symbol,
        launch.grid,
        launch.block,
        launch.bind({name: tensor.data_ptr() for name, tensor in buffers.items()}),
        shared=launch.dynamic_shared,
        max_dynamic_shared=launch.dynamic_shared,
        extra_buffers=[buffers[name] for name in sorted(used)],
        blocks=blocks,
        check_global=check_global,
    )


def fingerprint(tensor: Tensor) -> str:
    """The whole storage of a tensor."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return hashlib.sha256(memory.numpy().data).hexdigest()


def plan_of(problem: Problem, way: CudaCandidate, *, sms: int = V100.sms, workspace: int = 2**26) -> Plan:
    """The plan of a given variant, regardless of cost."""
    refusal = way.refusal(problem)
    assert refusal is None, f"{way.name} refuses {problem}: {refusal}"
    schedule = way.schedule(problem, sms, workspace)
    error = way.error(problem, sms, workspace)
    return Plan(problem, V100.name, way.name, schedule.launches, schedule.workspace_bytes, error, 0.0, ())


def excess(one: Tensor, other: Tensor | None, expected: Tensor, reduction: int) -> float:
    """Factor of the error model for this data, relative to even data; at least 1."""
    found = Magnitudes(
        x_rms=_rms(one),
        x_max=float(one.abs().max()),
        w_rms=1.0 if other is None else _rms(other),
        w_max=1.0 if other is None else float(other.abs().max()),
        y_max=float(expected.abs().max()),
    )
    return max(1.0, found.excess(reduction, reduction) / TYPICAL.excess(reduction, reduction))


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def check(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    plan: Plan | None = None,
    residual: Tensor | None = None,
) -> list[gpu_emulator.Report]:
    """One pass against float64 PyTorch: every element within the tolerance and the plan's predicted error."""
    plan = plan or plan_cuda(problem, V100)
    inputs = {"x": x, "w": w, "y": dy}
    if bias is not None:
        inputs["bias"] = bias
    outputs: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    if problem.kind is Pass.FPROP:
        del inputs["y"]
        outputs["y"] = torch.empty_strided(problem.y_shape, problem.y_strides, dtype=x.dtype).fill_(NAN)
        expected["y"] = reference.with_epilogue(problem, x, w, bias, residual, problem.activation)
        if residual is not None:
            inputs["residual"] = residual
        operands = x, w
    elif problem.kind is Pass.DGRAD:
        del inputs["x"]
        outputs["x"] = torch.empty_strided(problem.x_shape, problem.x_strides, dtype=x.dtype).fill_(NAN)
        expected["x"] = reference.dgrad(problem, dy, w, problem.x_shape)
        operands = dy, w
    else:
        del inputs["w"]
        outputs["dw"] = torch.empty_strided(problem.w_shape, problem.w_strides, dtype=x.dtype).fill_(NAN)
        dw, db = reference.wgrad(problem, x, dy, problem.w_shape)
        expected["dw"] = dw
        operands = dy, x
        if problem.bias:
            outputs["db"] = torch.full((problem.out_channels,), NAN, dtype=x.dtype)
            expected["db"] = db
    before = {name: fingerprint(tensor) for name, tensor in inputs.items()}
    reports = run_plan(plan, {**inputs, **outputs})
    assert before == {name: fingerprint(tensor) for name, tensor in inputs.items()}, "an input was changed"
    for name, got in outputs.items():
        want = expected[name]
        error = (got.double() - want).abs()
        assert not torch.isnan(error).any(), f"{name} has elements that were not written: {problem}"
        near = DEFAULT_TOLERANCE if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
        beyond = error - near * (1 + want.abs())
        in_scales = problem.tolerance > DEFAULT_TOLERANCE  # then the error in units of the scale decides alone
        assert in_scales or (beyond <= 0).all(), f"{name} is off by {error.max():.2e}: {problem}\n{plan.explain()}"
        one, other = operands
        found = largest(error, scales(problem, inputs)[name])
        found /= excess(one, None if name == "db" else other, want, reduction_of(problem))
        words = (
            f"{name} is off by {found:.2e}, the plan expected {plan.expected_error:.2e}: {problem}\n{plan.explain()}"
        )
        assert found <= plan.expected_error, words
    return reports


def error_in_scales(
    way: CudaCandidate, x: Tensor, w: Tensor, padding: tuple[int, int, int, int]
) -> tuple[float, float]:
    """Largest error of a forward pass in units of the map's scale, and the predicted one."""
    problem = Problem.make("fprop", tuple(x.shape), tuple(w.shape), padding=padding)
    y = torch.full(problem.y_shape, torch.nan)
    plan = plan_of(problem, way)
    run_plan(plan, {"x": x, "w": w, "y": y})
    expected = reference.with_epilogue(problem, x, w, None, None, Activation.NONE)
    return largest((y.double() - expected).abs(), scales(problem, {"x": x, "w": w})["y"]), plan.expected_error
