"""The table of plan costs: grouped launches, their traffic, and which simulated figures may be shown."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polyconv.cuda.planner import DEVICES, KernelSpec, Launch, Plan, plan_cuda
from polyconv.cuda.planner.plan import Work
from polyconv.cuda.planner.volumes import planned
from polyconv.lowering.volume_sum import NAME, volume_sum
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem
from polyconv.selection import Preference

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "table.py"
PROBLEM = Problem.make(Pass.FPROP, (4, 8, 32, 32), (16, 8, 3, 3))


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_table", PATH)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_table"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernelbench() -> ModuleType:
    sys.path.insert(0, str(PATH.parent))
    try:
        return importlib.import_module("kernelbench")
    finally:
        sys.path.remove(str(PATH.parent))


def spec(symbol: str) -> KernelSpec:
    return KernelSpec(stem=symbol, symbol=symbol, body="", params="P", params_bytes=16, threads=128)


def launch(symbol: str, grid: int, slab: int, tiles: int) -> Launch:
    return Launch(
        spec(symbol), (grid, 1, 1), (128, 1, 1), 0, bytes([slab]) * 16, (), Work(grid, tiles, tiles, 8 * tiles)
    )


def plan(*launches: Launch) -> Plan:
    return Plan(PROBLEM, "v100", "test", launches, 3000, 1e-5, 1.0, ())


def test_slabs_are_counted_once_and_the_shorter_last_one_apart(table: ModuleType) -> None:
    launches = [launch("prepare", 4, 0, 4)]
    for slab in range(5):
        launches += [launch("transform", 100, slab, 100), launch("multiply", 80, slab, 640 if slab < 4 else 320)]
    found = table.kinds(plan(*launches))
    assert [(k.launch.kernel.symbol, k.times) for k in found] == [
        ("prepare", 1),
        ("transform", 5),
        ("multiply", 4),
        ("multiply", 1),
    ]


def test_simulated_figures_belong_to_their_code(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = table.LaunchRow("k", "cafe", (9, 1, 1), (128, 1, 1), 3, 40, 0, 8, 1.0, "DRAM", 0.2, 900.0, {"DRAM": 1.0})
    small = replace(row, kernel="small", times=1, counted_ms=0.05)
    whole = table.PassRow("W", "kb1", "fprop", "test", 0.0, 1e-5, 2.0, (row, small), None)
    result = {"kernel": "k", "code": "cafe", "grid": [9, 1, 1], "ms": 1.5}
    monkeypatch.setattr(table, "SIMULATED", tmp_path / "simulated.json")
    for code, each, total in (("cafe", 1.5, 3 * 1.5 + 0.05), ("beef", None, None)):
        (tmp_path / "simulated.json").write_text(json.dumps({"results": [{**result, "code": code}]}))
        table.simulated.cache_clear()
        assert table.simulated_ms(row) == each
        assert table.simulated_pass_ms(whole) == total
        assert ("4.55" in table.summary([whole])) == (total is not None)
    table.simulated.cache_clear()
    tiles = tuple(table.Tile(name, name, (5, 1, 1), 2.5) for name in ("one", "two"))
    other = table.CutlassRow(tiles, 0.5)
    assert table.simulated_cutlass_ms(other) is None
    found = table.Table([whole, replace(whole, cutlass=other)], [whole])
    table.save(tmp_path / "table.json", found)
    assert table.load(tmp_path / "table.json") == found


def test_the_repository_s_figures_can_be_read(table: ModuleType) -> None:
    table.simulated.cache_clear()
    assert all(ms > 0 for ms in table.simulated().values())
    content = json.loads(table.SIMULATED.read_text(encoding="utf-8"))
    assert {"about", "simulator", "method", "uncertainty", "calibration", "results"} <= content.keys()


# ---- published plans are current


def counted(table: ModuleType) -> Any:
    return table.load(PATH.with_name("table.json"))


def test_the_published_table_is_of_todays_plans(table: ModuleType) -> None:
    """After a change of plans: python benchmarks/gpu/table.py, then python docs/figures/draw.py."""
    found = counted(table)
    wanted = {(one.id, str(kind)) for one in find("headline,all12") for kind in Pass}
    assert {(row.id, row.kind) for row in found.package} == wanted
    assert {row.workload for row in found.exported} == {"W1", "W2", "W3"}
    for families, rows in ((table.FAMILIES, found.package), (table.ANYWHERE, found.exported)):
        for row in rows:
            (workload,) = find(row.id)
            plan = table.planned_within(families, workload.problem(Pass(row.kind)))
            planned_now = [(kind.launch.kernel.symbol, kind.launch.grid, kind.times) for kind in table.kinds(plan)]
            assert [(launch.kernel, launch.grid, launch.times) for launch in row.launches] == planned_now, row.id
            assert (row.algorithm, row.workspace_mb) == (plan.algorithm, plan.workspace_bytes / 1e6)


def test_the_published_figures_are_those_of_the_table(table: ModuleType) -> None:
    """The page next to it, and sentences that quote it."""
    found = counted(table)
    page = PATH.with_name("README.md").read_text(encoding="utf-8")
    for name, text in table.tables(found).items():
        assert text in page, f"python benchmarks/gpu/table.py --render: the table {name} is another one"
    w1 = {row.kind: row for row in found.package if row.workload == "W1"}
    forward, dx, dw = (f"{w1[kind].counted_ms:.1f}" for kind in Pass)
    direct = f"{w1['fprop'].direct_ms:.1f}"
    (in_file,) = (f"{row.counted_ms:.1f}" for row in found.exported if (row.workload, row.kind) == ("W1", "fprop"))
    simulated = re.search(r"^\| W1 fprop \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert simulated
    quoted = {
        "docs/performance.md": [
            f"is {forward} ms forward, {dx} for the input gradient and {dw} for the weight gradient",
            f"direct multiplication in FP32 needs {direct} ms",
        ],
        "docs/recipes/kernelbench.md": [
            f"| {forward} ms forward at least by the package, on the tensor cores; direct multiplication {direct} ms",
            f"| {in_file} ms forward at least by the file",
            f"| {simulated[2]} ms forward by the package, {simulated[1]} by the file | simulated |",
        ],
    }
    for path, sentences in quoted.items():
        text = (PATH.parents[2] / path).read_text(encoding="utf-8")
        for sentence in sentences:
            assert sentence in text, f"{path} does not say: {sentence}"


def test_the_published_kernelbench_table_is_of_todays_plans(kernelbench: ModuleType) -> None:
    """After a change of plans: python benchmarks/gpu/kernelbench.py --anew --workload NAME for the workloads named."""
    rows = kernelbench.load(kernelbench.FILE)
    stale = []
    for row in rows.values():
        (workload,) = find(row.id)
        plan = kernelbench.planned_now(workload, Pass(row.kind))
        launches = sum(times * len(part.launches) for part, times in kernelbench.parts(plan))
        if (row.plan, row.launches) != (plan.name, launches):
            stale.append(f"{row.id} {row.kind}: {row.plan}, {row.launches} launches; now {plan.name}, {launches}")
    assert not stale, stale
    assert kernelbench.page(list(rows.values())) in kernelbench.PAGE.read_text(encoding="utf-8")


# ---- KernelBench's


@pytest.mark.parametrize("kind", list(Pass))
def test_a_volume_is_its_2d_problems_each_as_often_as_it_runs(kernelbench: ModuleType, kind: Pass) -> None:
    problem = Problem.make(kind, (2, 8, 6, 12, 12), (16, 8, 3, 3, 3), padding=(1,) * 6)
    plan = planned(problem, DEVICES["v100"], prefer=Preference(NAME))
    calls = volume_sum(problem).calls
    parts = kernelbench.parts(plan)
    assert sum(times for _, times in parts) == len(calls)
    multiplied = sum(times * part.problem.multiplications for part, times in parts)
    assert multiplied == problem.multiplications * (6 + 2 * 5) // (6 * 3)  # a tap at the end overlaps one slice fewer
    apart = [] if kind is Pass.FPROP else [one for one in calls if one.adds]
    shape = {Pass.DGRAD: (5, 8, 12, 12), Pass.WGRAD: (16, 8, 3, 3)}.get(kind, ())
    assert kernelbench.moved_beside(plan) == 12 * len(apart) * prod(shape)
    alone = plan_cuda(PROBLEM, DEVICES["v100"])
    assert kernelbench.parts(alone) == [(alone, 1)]
    assert kernelbench.moved_beside(alone) == 0


def test_the_page_compares_with_the_larger_limit(kernelbench: ModuleType, tmp_path: Path) -> None:
    row = kernelbench.Row("kb54", "fprop", "a plan", 3, 2.0, 0.5, "DRAM", 3.0, 1.0)
    other = replace(row, kind="wgrad", direct_ms=0.5)
    kernelbench.save(tmp_path / "rows.json", {each.key: each for each in (row, other)})
    assert list(kernelbench.load(tmp_path / "rows.json").values()) == [row, other]
    text = kernelbench.page([row, other])
    assert "Conv3d 16×3×64×64×64 to 64, kernel 3×3×3" in text
    assert "| 3.00 | 1.00 | 1.50 |" in text
    assert "| 0.50 | 1.00 | 0.50 |" in text
    assert "| fprop | 1 | 1.50 | 1.50 | 1.50 |" in kernelbench.means([row, other])


def test_the_repository_s_kernelbench_figures_can_be_read(kernelbench: ModuleType) -> None:
    rows = kernelbench.load(kernelbench.FILE)
    assert len({name for name, _ in rows}) <= 35
    assert all(row.counted_ms >= row.beside_ms for row in rows.values())
