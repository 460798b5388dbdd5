"""Cost of the plans for KernelBench's 35 convolutions on a V100, counted as in ``table.py``. Needs no GPU.

    python benchmarks/gpu/kernelbench.py           # what kernelbench.json lacks, and the page
    python benchmarks/gpu/kernelbench.py --workload kb54 --passes fprop --anew   # some of them, once more
    python benchmarks/gpu/kernelbench.py --render  # the page from kernelbench.json

A 3-D convolution counts the plans of its 2-D problems, each as often as it runs, and PyTorch's copies and additions. A
pass is written to the file as soon as it is counted, so a run can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, prod
from pathlib import Path

from table import ABOUT, HERE, Counter, LaunchRow, as_ms, direct_ms, markdown, write_tables

from polyconv import settings
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import Plan
from polyconv.cuda.planner.volumes import CudaVolumePlan, planned
from polyconv.measure import workloads
from polyconv.measure.workloads import Workload
from polyconv.problem import Pass, Problem
from polyconv.tools.inspect import emulator
from polyconv.tools.inspect.emulated_cost import V100, CountingError

FILE, PAGE = HERE / "kernelbench.json", HERE / "kernelbench.md"
ALL = "kernelbench,volumes"


@dataclass(frozen=True)
class Row:
    """One pass of one problem. Times are in milliseconds."""

    id: str
    kind: str
    plan: str
    launches: int
    counted_ms: float
    """Sum of the bounds of all launches and of PyTorch's extra traffic."""
    beside_ms: float
    """Part of it: PyTorch's copies and additions, at full bandwidth."""
    bound_by: str
    """The binding resource of the launches that take most of the time."""
    direct_ms: float
    """Time of a direct convolution's multiplications if only the FP32 pipe took time."""
    moved_ms: float
    """Time to read both operands and write the result once at full bandwidth."""

    @property
    def key(self) -> tuple[str, str]:
        return self.id, self.kind


def count_pass(counter: Counter, workload: Workload, kind: Pass) -> Row:
    """One pass, as the plans that run it with their multiplicities."""
    plan = planned_now(workload, kind)
    problem = plan.problem
    counted = [(row, times * row.times) for part, times in parts(plan) for row in counter.plan(part)]
    beside_ms = _transfer_ms(moved_beside(plan))
    return Row(
        id=workload.id,
        kind=str(kind),
        plan=plan.name,
        launches=sum(times for _, times in counted),
        counted_ms=sum(times * row.counted_ms for row, times in counted) + beside_ms,
        beside_ms=beside_ms,
        bound_by=binding(counted),
        direct_ms=direct_ms(problem),
        moved_ms=_transfer_ms(must_move(problem)),
    )


def planned_now(workload: Workload, kind: Pass) -> Plan | CudaVolumePlan:
    """The counted plan: that for a V100."""
    return planned(workload.problem(kind).as_2d(), V100, settings.current().workspace_bytes)


def parts(plan: Plan | CudaVolumePlan) -> list[tuple[Plan, int]]:
    """The plans of 2-D problems with their multiplicities: one plan, once, except for three axes."""
    if isinstance(plan, Plan):
        return [(plan, 1)]
    return [(part, plan.times(problem)) for problem, part in plan.plans.items()]


def moved_beside(plan: Plan | CudaVolumePlan) -> int:
    """Bytes moved by PyTorch, not by a polyconv kernel."""
    return 0 if isinstance(plan, Plan) else plan.parts.extra_traffic[0]


def must_move(problem: Problem) -> int:
    """Bytes of both operands and of the result."""
    return problem.element_bytes * sum(map(prod, (problem.x_shape, problem.w_shape, problem.y_shape)))


def binding(counted: Sequence[tuple[LaunchRow, int]]) -> str:
    """The resource whose launches take most of the time."""
    bound: dict[str, float] = {}
    for row, times in counted:
        bound[row.binding] = bound.get(row.binding, 0.0) + times * row.counted_ms
    return max(bound, key=lambda name: bound[name])


def _transfer_ms(moved: float) -> float:
    return moved / (V100.dram_gbs * 1e6)


# ---- output


def save(path: Path, rows: Mapping[tuple[str, str], Row]) -> None:
    content = {"about": ABOUT, "passes": [asdict(row) for row in rows.values()]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> dict[tuple[str, str], Row]:
    if not path.is_file():
        return {}
    rows = (Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["passes"])
    return {row.key: row for row in rows}


def page(rows: Sequence[Row]) -> str:
    """One line per pass."""
    lines = []
    for row in rows:
        (workload,) = workloads.find(row.id)
        cells = [row.id, f"{workload.module} {in_words(workload)}", row.kind, row.plan, str(row.launches)]
        cells += [as_ms(row.counted_ms), row.bound_by, as_ms(row.direct_ms), as_ms(row.moved_ms)]
        lines.append([*cells, f"{_limit(row) / row.counted_ms:.2f}"])
    headers = ["", "module", "pass", "plan", "launches", "counted ms", "bound by"]
    headers += ["direct limit ms", "bytes ms", "limit / counted"]
    return markdown(headers, [4, 5, 7, 8, 9], lines)


def in_words(workload: Workload) -> str:
    """Its input and the arguments that differ from PyTorch's defaults."""
    options = {"stride": workload.stride, "padding": workload.padding, "dilation": workload.dilation}
    usual = {"stride": 1, "padding": 0, "dilation": 1}
    words = [f"{_by(workload.input)} to {workload.out_channels}", f"kernel {_by(workload.kernel)}"]
    words += [f"{name} {_by(value)}" for name, value in options.items() if set(value) != {usual[name]}]
    return ", ".join([*words, *([f"groups {workload.groups}"] if workload.groups > 1 else [])])


def _by(extents: Sequence[int]) -> str:
    return "×".join(map(str, extents))


def means(rows: Sequence[Row]) -> str:
    """Geometric means of limit / counted, per pass."""
    lines = []
    for kind in Pass:
        ratios = [_limit(row) / row.counted_ms for row in rows if row.kind == kind]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            lines.append([str(kind), str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"])
    return markdown(["pass", "problems", "limit / counted", "lowest", "highest"], [1, 2, 3, 4], lines)


def _limit(row: Row) -> float:
    """Lower limit of any direct convolution's time."""
    return max(row.direct_ms, row.moved_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default=ALL, help=f"names and groups (default: {ALL})")
    parser.add_argument("--passes", default="fprop,dgrad,wgrad", help="default: all three")
    parser.add_argument("--anew", action="store_true", help="count what the file has, too")
    parser.add_argument("--render", action="store_true", help="count nothing: write the page of what was counted")
    args = parser.parse_args()
    rows = load(FILE)
    failed = 0
    if not args.render:
        gpu = emulator()
        if gpu is None:
            sys.exit("counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator")
        counter = Counter(gpu, KernelCache())
        for workload in workloads.find(args.workload):
            for kind in map(Pass, args.passes.split(",")):
                if (workload.id, str(kind)) in rows and not args.anew:
                    continue
                try:
                    row = count_pass(counter, workload, kind)
                except CountingError as error:
                    failed += 1
                    print(f"{workload.id} {kind}: {error}", file=sys.stderr, flush=True)
                    continue
                rows[row.key] = row
                save(FILE, dict(sorted(rows.items())))
                print(f"{row.id} {kind}: {row.counted_ms:.3f} ms counted, {row.plan}", file=sys.stderr, flush=True)
    listed = [rows[key] for key in sorted(rows)]
    write_tables(PAGE, {"means": means(listed), "passes": page(listed)})
    if failed:
        sys.exit(f"{failed} passes could not be counted")


if __name__ == "__main__":
    main()
