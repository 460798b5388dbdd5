"""``polyconv plan``: what would run for a named workload on a GPU, and why. Neither compiles nor needs the GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from .. import settings
from ..bench import workloads
from ..plan import DEVICES, Plan, PlanError, plan_cuda
from ._options import add_pass_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", metavar="WORKLOAD", help="workloads or groups of them, separated by commas: W1, kb80"
    )
    add_pass_argument(parser)
    parser.add_argument("--device", choices=sorted(DEVICES), default="v100", help="plan for it (default: v100)")
    parser.add_argument("--json", action="store_true", help="print a list of plans, with every candidate, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="every candidate that was not chosen, and why")


def run(args: argparse.Namespace) -> int:
    device, limit = DEVICES[args.device], settings.current().workspace_bytes
    try:
        found = workloads.find(args.workload)
        plans = [(w, plan_cuda(w.problem(kind), device, limit)) for w in found for kind in args.passes]
    except workloads.WorkloadError as error:
        print(f"polyconv plan: {error}", file=sys.stderr)
        return 2
    except PlanError as error:
        print(f"polyconv plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([_as_json(workload, plan) for workload, plan in plans], indent=2))
    else:
        print("\n".join(f"{workload.name}: {plan.explain(verbose=args.verbose)}" for workload, plan in plans))
    return 0


def _as_json(workload: workloads.Workload, plan: Plan) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "id": workload.id,
        "pass": str(plan.problem.kind),
        "device": plan.device,
        "algorithm": plan.algorithm,
        "cost_us": plan.cost_us,
        "workspace_bytes": plan.workspace_bytes,
        "expected_error": plan.expected_error,
        "launches": [
            {"kernel": one.kernel.symbol, "grid": one.grid, "block": one.block, "dynamic_shared": one.dynamic_shared}
            for one in plan.launches
        ],
        "candidates": [asdict(candidate) for candidate in plan.candidates],
    }
