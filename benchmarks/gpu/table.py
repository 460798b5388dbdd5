"""What polyconv's plans cost a V100: counted, simulated where that was done, and beside CUTLASS. Needs no GPU.

    python benchmarks/gpu/table.py                                     # all workloads and passes: table.json, README.md
    python benchmarks/gpu/table.py --workload W1 --passes fprop --out /tmp/x   # some of them, into another directory
    python benchmarks/gpu/table.py --render                            # README.md from table.json and simulated.json

The package's plans, and those of the three headline workloads that an exported file has, which are of fewer families.
Each distinct launch of a plan (same kernel, grid and shared memory) is counted once and multiplied: a plan that works
in slabs repeats the same few launches many times. Simulated figures are read from ``simulated.json``; one is shown only
if it was made with the machine code that is planned now. CUTLASS needs ``benchmarks/cutlass/requirements.txt``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from polyconv import settings
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner import KernelSpec, Launch, Plan
from polyconv.cuda.planner.occupancy import blocks_per_sm
from polyconv.cuda.planner.plan import Dim3
from polyconv.cuda.planner.planner import FAMILIES, plan_within
from polyconv.measure import workloads
from polyconv.problem import Pass, Problem
from polyconv.tools.export.host_code import ANYWHERE
from polyconv.tools.inspect import emulator
from polyconv.tools.inspect.emulated_cost import V100, Counted, CountingError, count_plan

HERE = Path(__file__).resolve().parent
SIMULATED = HERE / "simulated.json"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
ABOUT = (
    "Counted by executing a sample of each distinct launch of the planned kernels (sm_70) in tools/gpu_emulator: "
    f"lower bounds for {V100.sms} SMs, {V100.clock_mhz} MHz, {V100.dram_gbs:.0f} GB/s. Nothing here was measured."
)
FP32 = "fp32 (fma pipe)"
NEGLIGIBLE = 0.03
"""Share of a pass's counted time that may lack a simulated figure; such launches enter its sum as counted."""


# ---- launches of a kind ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Launches of a plan that do the same on other data, and their representative."""

    launch: Launch
    times: int


def kinds(plan: Plan) -> list[Kind]:
    """The distinct launches, in order of first execution."""
    alike: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in plan.launches:
        alike.setdefault((launch.kernel, launch.grid, launch.dynamic_shared, launch.work), []).append(launch)
    return [Kind(group[0], len(group)) for group in alike.values()]


# ---- counting ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchRow:
    """Launches of a kind. Times are of one of them."""

    kernel: str
    code: str
    """Hash of the machine code, so that a simulated figure is not shown for another kernel."""
    grid: Dim3
    block: Dim3
    times: int
    registers: int
    shared_bytes: int
    blocks_per_sm: int | None
    counted_ms: float
    binding: str
    fp32_pipe: float
    """Share of the counted time in which the FP32 pipe is busy."""
    dram_mb: float
    resources_ms: Mapping[str, float]


@dataclass(frozen=True)
class Tile:
    """CUTLASS's kernel with one of its tiles."""

    name: str
    code: str
    grid: Dim3
    counted_ms: float


@dataclass(frozen=True)
class CutlassRow:
    """Times of CUTLASS's best tile; the best counted and the best simulated tile may differ."""

    tiles: tuple[Tile, ...]
    layout_ms: float
    """Time to convert x to NHWC and y back at full bandwidth, for NCHW tensors."""


@dataclass(frozen=True)
class PassRow:
    """One pass of one workload."""

    workload: str
    id: str
    kind: str
    algorithm: str
    workspace_mb: float
    expected_error: float
    direct_ms: float
    """Time of a direct convolution's multiplications if only the FP32 pipe took time."""
    launches: tuple[LaunchRow, ...]
    cutlass: CutlassRow | None

    @property
    def counted_ms(self) -> float:
        return sum(row.times * row.counted_ms for row in self.launches)


class Counter:
    """Counts plans on one emulator; a kernel is compiled once."""

    def __init__(self, gpu: Any, cache: KernelCache) -> None:
        self._gpu = gpu
        self._cache = cache

    def cubin(self, spec: KernelSpec) -> bytes:
        return self._cache.get(spec, V100.arch)

    def plan(self, plan: Plan) -> tuple[LaunchRow, ...]:
        cubins = {spec: self.cubin(spec) for spec in dict.fromkeys(plan.kernels)}
        counted = dict(zip(map(id, plan.launches), count_plan(self._gpu, plan, cubins, V100), strict=True))
        return tuple(self._row(kind, counted[id(kind.launch)]) for kind in kinds(plan))

    def _row(self, kind: Kind, counted: Counted) -> LaunchRow:
        launch, cubin = kind.launch, self.cubin(kind.launch.kernel)
        info = kernel_info(cubin, launch.kernel.symbol)
        threads, shared = math.prod(launch.block), info.static_shared + launch.dynamic_shared
        return LaunchRow(
            kernel=launch.kernel.symbol,
            code=fingerprint(cubin),
            grid=launch.grid,
            block=launch.block,
            times=kind.times,
            registers=info.registers,
            shared_bytes=shared,
            blocks_per_sm=blocks_per_sm(V100.arch, info.registers, threads, shared),
            counted_ms=counted.bound_ms,
            binding=counted.binding,
            fp32_pipe=counted.cycles[FP32] / counted.bound_cycles if counted.bound_cycles else 0.0,
            dram_mb=counted.ms("DRAM") * V100.dram_gbs,
            resources_ms={name: counted.ms(name) for name in counted.cycles},
        )


def fingerprint(cubin: bytes) -> str:
    """Hash of a kernel's machine code."""
    return hashlib.sha256(cubin).hexdigest()[:16]


def direct_ms(problem: Problem) -> float:
    """Time of a direct convolution's multiplications if only the FP32 pipe took time."""
    return problem.multiplications / (V100.fp32_per_clock * V100.sms * V100.clock_mhz * 1e3)


def planned_within(families: tuple[ModuleType, ...], problem: Problem) -> Plan:
    """The counted plan: that of these families for a V100."""
    return plan_within(families, problem, V100, settings.current().workspace_bytes)


def count_pass(
    counter: Counter,
    workload: workloads.Workload,
    kind: Pass,
    cutlass: Cutlass | None,
    families: tuple[ModuleType, ...] = FAMILIES,
) -> PassRow | None:
    """None, with a message, if a kernel of the plan faults: the others are still counted."""
    problem = workload.problem(kind)
    plan = planned_within(families, problem)
    try:
        launches = counter.plan(plan)
    except CountingError as error:
        print(f"{workload.name} {kind}: {error}", file=sys.stderr, flush=True)
        return None
    row = PassRow(
        workload=workload.name,
        id=workload.id,
        kind=str(kind),
        algorithm=plan.algorithm,
        workspace_mb=plan.workspace_bytes / 1e6,
        expected_error=plan.expected_error,
        direct_ms=direct_ms(problem),
        launches=launches,
        cutlass=cutlass.count(problem) if cutlass else None,
    )
    print(f"{workload.name} {kind}: {row.counted_ms:.3f} ms counted, {plan.algorithm}", file=sys.stderr, flush=True)
    return row


# ---- CUTLASS -----------------------------------------------------------------------------------------------


class Cutlass:
    """CUTLASS's FP32 forward convolution without tensor cores, as ``benchmarks/cutlass`` compiles and counts it."""

    def __init__(self, gpu: Any) -> None:
        sys.path.insert(0, str(HERE.parent / "cutlass"))
        compare: Any = importlib.import_module("compare")
        self._gpu, self._compare = gpu, compare
        with ThreadPoolExecutor(2) as pool:
            self._tiles = list(pool.map(compare.Cutlass, compare.TILES))

    def count(self, problem: Problem) -> CutlassRow | None:
        """Every tile; None if CUTLASS's forward convolution does not cover the problem."""
        top, bottom, left, right = problem.padding
        dense = problem.groups == 1 and (top, left) == (bottom, right) and min(problem.padding) >= 0
        if problem.kind is not Pass.FPROP or not dense:
            return None
        (n, c, h, w), (k, _, *taps) = problem.x_shape, problem.w_shape
        tensors = [self._gpu.sparse(shape) for shape in ((n, h, w, c), (k, *taps, c), (n, *problem.out_size, k))]
        found = []
        for tile in self._tiles:
            grid = tile.prepare(self._gpu, problem, *tensors).grid
            counted_ms = self._compare.cutlass_row(self._gpu, tile, problem)[0]
            found.append(Tile(tile.tile.name, fingerprint(tile.kernel), grid, counted_ms))
        return CutlassRow(tuple(found), float(self._compare.conversion_ms(problem)))


# ---- simulated figures -------------------------------------------------------------------------------------


@cache
def simulated() -> dict[tuple[str, str, Dim3], float]:
    """(kernel, code, grid) -> milliseconds of one launch."""
    if not SIMULATED.is_file():
        return {}
    results = json.loads(SIMULATED.read_text(encoding="utf-8"))["results"]
    return {(r["kernel"], r["code"], tuple(r["grid"])): float(r["ms"]) for r in results}


def simulated_ms(row: LaunchRow) -> float | None:
    return simulated().get((row.kernel, row.code, row.grid))


def simulated_cutlass_ms(row: CutlassRow) -> float | None:
    """The least among simulated tiles."""
    known = (simulated().get(("conv2d_fprop", tile.code, tile.grid)) for tile in row.tiles)
    return min((ms for ms in known if ms is not None), default=None)


def simulated_pass_ms(row: PassRow) -> float | None:
    """The sum; launches without a figure enter as counted, if their share is negligible."""
    known = [(launch, simulated_ms(launch)) for launch in row.launches]
    missing = sum(launch.times * launch.counted_ms for launch, ms in known if ms is None)
    if missing > NEGLIGIBLE * row.counted_ms:
        return None
    return sum(launch.times * (launch.counted_ms if ms is None else ms) for launch, ms in known)


# ---- output ------------------------------------------------------------------------------------------------


def markdown(headers: Sequence[str], right: Iterable[int], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if i in set(right) else "---" for i in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headers, rule, *rows])


def as_ms(value: float | None) -> str:
    """Milliseconds as in the tables; empty if there is no figure."""
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def summary(rows: Sequence[PassRow]) -> str:
    """One line per pass."""
    lines = []
    for row in rows:
        cutlass = [""] * 3
        if row.cutlass:
            least = min(tile.counted_ms for tile in row.cutlass.tiles)
            cutlass = [as_ms(least), as_ms(simulated_cutlass_ms(row.cutlass)), as_ms(row.cutlass.layout_ms)]
        cells = [row.workload, row.kind, row.algorithm, str(sum(launch.times for launch in row.launches))]
        cells += [f"{row.workspace_mb:.0f}", as_ms(row.counted_ms), as_ms(simulated_pass_ms(row)), as_ms(row.direct_ms)]
        lines.append([*cells, f"{row.direct_ms / row.counted_ms:.2f}", *cutlass])
    headers = ["", "pass", "plan", "launches", "workspace MB", "counted ms", "simulated ms", "direct limit ms"]
    headers += ["limit / counted", "CUTLASS counted ms", "CUTLASS simulated ms", "its layout ms"]
    return markdown(headers, range(3, 12), lines)


def details(rows: Sequence[PassRow]) -> str:
    """One line per kind of launch."""
    lines = []
    for row in rows:
        for launch in row.launches:
            x, y, z = launch.grid
            cells = [row.workload, row.kind, launch.kernel, str(launch.times), f"{x} x {y} x {z}"]
            cells += [str(launch.registers), str(launch.shared_bytes), str(launch.blocks_per_sm or "")]
            cells += [as_ms(launch.counted_ms), launch.binding, f"{100 * launch.fp32_pipe:.0f} %"]
            lines.append([*cells, f"{launch.dram_mb:.1f}", as_ms(simulated_ms(launch))])
    headers = ["", "pass", "kernel", "launches", "grid", "registers", "shared B", "blocks/SM"]
    headers += ["counted ms each", "bound by", "FP32 pipe", "DRAM MB each", "simulated ms each"]
    return markdown(headers, [3, 5, 6, 7, 8, 10, 11, 12], lines)


def tables(found: Table) -> dict[str, str]:
    """Tables of the page, by the names of their marks."""
    return {"summary": summary(found.package), "exported": summary(found.exported), "launches": details(found.package)}


def write_tables(path: Path, tables: Mapping[str, str]) -> None:
    """Insert into a page, each between the marks of its name."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Table:
    """All that was counted."""

    package: Sequence[PassRow]
    exported: Sequence[PassRow]
    """Headline workloads in an exported file, which has the families that run on any GPU."""


def save(path: Path, found: Table) -> None:
    content = {"about": ABOUT, "passes": _as_json(found.package), "exported": _as_json(found.exported)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _as_json(rows: Iterable[PassRow]) -> list[dict[str, Any]]:
    return [{**asdict(row), "counted_ms": row.counted_ms} for row in rows]


def load(path: Path) -> Table:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Table([_row(entry) for entry in content["passes"]], [_row(entry) for entry in content["exported"]])


def _row(entry: dict[str, Any]) -> PassRow:
    del entry["counted_ms"]
    launches = tuple(
        LaunchRow(**{**launch, "grid": tuple(launch["grid"]), "block": tuple(launch["block"])})
        for launch in entry.pop("launches")
    )
    other = entry.pop("cutlass")
    tiles = tuple(Tile(**{**tile, "grid": tuple(tile["grid"])}) for tile in other["tiles"]) if other else ()
    cutlass = CutlassRow(tiles, other["layout_ms"]) if other else None
    return PassRow(**entry, launches=launches, cutlass=cutlass)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default="headline,all12", help="names and groups (default: headline,all12)")
    parser.add_argument("--passes", default="fprop,dgrad,wgrad", help="default: all three")
    parser.add_argument("--jobs", type=int, default=2, help="plans counted at a time (default: 2)")
    parser.add_argument("--no-cutlass", action="store_true", help="leave CUTLASS's column empty")
    parser.add_argument("--render", action="store_true", help="count nothing: write the tables of what was counted")
    parser.add_argument("--out", type=Path, default=HERE, help="directory of table.json and README.md")
    args = parser.parse_args()
    if args.render:
        found = load(args.out / "table.json")
    else:
        gpu = emulator()
        if gpu is None:
            sys.exit("counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator")
        counter = Counter(gpu, KernelCache())
        cutlass = None if args.no_cutlass else Cutlass(gpu)
        asked = [(w, Pass(kind)) for w in workloads.find(args.workload) for kind in args.passes.split(",")]
        headline = [(w, kind) for w, kind in asked if w in workloads.find("headline")]
        with ThreadPoolExecutor(args.jobs) as pool:
            package = list(pool.map(lambda job: count_pass(counter, *job, cutlass), asked))
            exported = list(pool.map(lambda job: count_pass(counter, *job, None, ANYWHERE), headline))
        found = Table([row for row in package if row], [row for row in exported if row])
        args.out.mkdir(parents=True, exist_ok=True)
        save(args.out / "table.json", found)
    print(summary(found.package))
    readme = args.out / "README.md"
    if readme.is_file():
        write_tables(readme, tables(found))
    if not args.render and (lacking := [*package, *exported].count(None)):
        sys.exit(f"{lacking} passes could not be counted")


if __name__ == "__main__":
    main()
