"""``polyconv plan``: plan of a convolution for this CPU or for any known GPU, with reasons."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..cuda.planner import DEVICES, Plan
from ..cuda.planner.volumes import CudaVolumePlan, planned
from ..measure import workloads
from ..problem import AXES, Pass, Problem
from ..selection import Candidate, by_cost
from ..util.console import print_json, progress
from . import _options
from ._options import add_convolution_arguments, convolution, given, option, problem_of

if TYPE_CHECKING:
    from ..cpu.planner import CpuPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_workloads_argument(parser, "workloads or groups of them, separated by commas: W1,kb63,models")
    _options.add_pass_argument(parser)
    _options.add_device_argument(parser, ["cpu", *sorted(DEVICES)], "v100", "plan for this GPU, or for this processor")
    _options.add_json_argument(parser, "a list of plans, with every candidate,")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every candidate that cannot run, too")
    add_convolution_arguments(parser, input="the input to plan for")
    _options.add_examples(
        parser,
        "polyconv plan W1 --pass fprop --device v100",
        "polyconv plan models --device cpu --json",
        "polyconv plan --in-channels 64 --out-channels 64 --kernel-size 3 --padding 1 --input 32 64 56 56 --device t4",
    )


def run(args: argparse.Namespace) -> int:
    asked = _asked(args)
    plans = []
    with progress() as shown:
        shown.expect(len(asked))
        for one in asked:
            plans.append((one, _plan(one.problem, args.device)))
            shown.step(f"planned {one.name} {one.kind}")
    if args.json:
        print_json([_as_json(one, plan) for one, plan in plans])
    else:
        print("\n".join(f"{one.name}: {_in_words(plan, verbose=args.verbose)}" for one, plan in plans))
    return 0


class _Asked(NamedTuple):
    """One pass to plan, of a workload or of a convolution given by its arguments (``id`` is empty)."""

    name: str
    id: str
    kind: Pass
    """Pass of the workload; for a transposed convolution, the problem's pass differs."""
    problem: Problem


def _asked(args: argparse.Namespace) -> list[_Asked]:
    found = given(args)
    if args.workloads is None:
        values = convolution(args)
        name = f"Conv{len(values['input']) - 2}d"
        return [_Asked(name, "", kind, problem_of(values, kind)) for kind in args.passes]
    if found:
        raise _options.UsageError(f"{args.workloads} has its arguments already; leave out {option(found[0])}")
    listed = workloads.find(args.workloads)
    return [
        _Asked(f"{one.name}, {kind} of a {one.module}" if one.transposed else one.name, one.id, kind, one.problem(kind))
        for one in listed
        for kind in args.passes
    ]


def _in_words(plan: Plan | CudaVolumePlan | CpuPlan, *, verbose: bool) -> str:
    if isinstance(plan, Plan):
        return "\n".join([*plan.summary(), *_candidates(plan, verbose=verbose)])
    return plan.explain(verbose=verbose)


def _candidates(plan: Plan, *, verbose: bool) -> list[str]:
    """Table of candidates with cost, error and reason, cheapest first; then those that cannot run, by reason."""
    able = by_cost(plan.candidates)
    inexact = [c for c in plan.candidates if c.cost is None and c.error is not None]
    width = max(len(c.name) for c in [*able, *inexact])
    lines = [f"  {'candidate':{width}}  {'cost us':>9}  {'error':>7}  why"]
    for c in [*able, *inexact]:
        cost = "" if c.cost is None else f"{c.cost:9.0f}"
        lines.append(
            f"  {c.name:{width}}  {cost:>9}  {c.error or 0.0:7.1e}  {c.rejected or 'runs: the least modelled cost'}"
        )
    refused: dict[str, list[str]] = {}
    for c in plan.candidates:
        if c.error is None:
            refused.setdefault(c.rejected or "", []).append(c.name)
    for reason, names in refused.items():
        listed = ", ".join(names) if verbose else f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
        lines.append(f"  cannot run: {listed}: {reason}")
    return lines


def _plan(problem: Problem, device: str) -> Plan | CudaVolumePlan | CpuPlan:
    current = settings.current()
    problem = replace(problem, tolerance=current.tolerance).as_2d()
    if device == "cpu":
        from ..autotune import preferences  # lazy: imports torch
        from ..cpu.backend import CpuBackend

        return preferences.plan(CpuBackend(), problem)  # follows this machine's tuning files
    return planned(problem, DEVICES[device], current.workspace_bytes)


def _as_json(asked: _Asked, plan: Plan | CudaVolumePlan | CpuPlan) -> dict[str, Any]:
    common = {"workload": asked.name, "id": asked.id, "pass": str(asked.kind)}
    if isinstance(plan, CudaVolumePlan):
        return {**common, **_volume_json(plan)}
    return {**common, **(_cuda_json(plan) if isinstance(plan, Plan) else _cpu_json(plan))}


def _volume_json(plan: CudaVolumePlan) -> dict[str, Any]:
    return {
        "device": plan.device,
        "algorithm": plan.name,
        "cost_us": plan.cost_us,
        "expected_error": plan.predicted_error,
        "across": AXES[3][plan.parts.axis],
        "how": plan.parts.in_words().rstrip(":"),
        "candidates": _candidates_json(plan.candidates),
        "problems": [
            {"problem": str(problem), "times": plan.times(problem), **_cuda_json(own)}
            for problem, own in plan.plans.items()
        ],
    }


def _cpu_json(plan: CpuPlan) -> dict[str, Any]:
    first, *others = sorted(plan.candidates, key=lambda c: c.rejected is not None)
    return {
        "device": str(plan.device),
        "algorithm": plan.name,
        "cycles": first.cost,
        "predicted_error": plan.predicted_error,
        "reason": plan.reason,
        "candidates": [
            {"name": c.name, "cycles": c.cost, "predicted_error": c.error, "rejected": c.rejected}
            for c in (first, *others)
        ],
    }


def _cuda_json(plan: Plan) -> dict[str, Any]:
    return {
        "device": plan.device,
        "algorithm": plan.algorithm,
        "cost_us": plan.cost_us,
        "workspace_bytes": plan.workspace_bytes,
        "expected_error": plan.expected_error,
        "launches": [
            {"kernel": one.kernel.symbol, "grid": one.grid, "block": one.block, "dynamic_shared": one.dynamic_shared}
            for one in plan.launches
        ],
        "candidates": _candidates_json(plan.candidates),
    }


def _candidates_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [{"name": c.name, "cost_us": c.cost, "rejected": c.rejected, "error": c.error} for c in candidates]
