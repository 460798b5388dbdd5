"""``polyconv inspect`` and ``polyconv plan``: printed rows, and the counting behind them."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

import gpu_emulator
from polyconv import cli
from polyconv.cli import inspect as command
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.planner import DEVICES, CudaDevice, all_kernels, occupancy, plan_cuda
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import PACK
from polyconv.measure.workloads import find
from polyconv.problem import Problem
from polyconv.tools.inspect import emulated_cost, rows
from polyconv.tools.inspect.emulated_cost import count, count_plan, main_kernel, sample
from polyconv.util import console

V100 = DEVICES["v100"]
KEYS = {
    *("kernel", "arch", "workload", "pass", "registers", "spill_bytes", "shared_bytes", "blocks_per_sm"),
    *("binding", "fp32_share", "bound_ms"),
}


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert cli.main(["inspect", *argv, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out))


# ---- The command


def test_a_headline_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """W1's forward chain does not spill, and needs at most a fifth of direct multiplication's minimum."""
    found = inspect(capsys, "W1", "--pass", "fprop")
    main = found[0]
    assert main.keys() >= KEYS
    assert (main["workload"], main["id"], main["pass"], main["arch"]) == ("W1", "kb80", "fprop", "sm_70")
    assert main["main"]
    assert "winograd_fp16x3_gemm" in str(main["kernel"])
    assert main["binding"] == "tensor pipe"
    assert {row["spill_bytes"] for row in found} == {0}
    assert {str(row["kernel"]).split("_toom")[0] for row in found} == {
        "winograd_fp16x3_absmax",
        "winograd_fp16x3_filter",
        "winograd_fp16x3_input",
        "winograd_fp16x3_gemm",
    }
    assert float(str(main["pass_bound_ms"])) < 4.7


def test_architectures_beyond_the_emulator_are_compiled_but_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(capsys, "tiny-batch", "--pass", "fprop", "--arch", "sm_80,sm_90")
    assert {row["arch"] for row in found} == {"sm_80", "sm_90"}
    assert all(row["registers"] and row["blocks_per_sm"] for row in found)
    assert all((row["bound_ms"] is None) == (row["arch"] == "sm_90") for row in found)


def test_without_the_emulator(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "emulator", lambda: None)
    assert cli.main(["inspect", "W1", "--pass", "fprop", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator" in err
    assert {(row["binding"], row["fp32_share"], row["bound_ms"]) for row in json.loads(out)} == {(None, None, None)}


def test_an_emulator_without_its_tools(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tool(*_: object, **__: object) -> None:
        raise gpu_emulator.ToolchainError("nvdisasm for sm_70 is needed")

    monkeypatch.setattr(gpu_emulator, "run", no_tool)
    assert cli.main(["inspect", "W1", "--pass", "fprop", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "no counted figures: nvdisasm for sm_70 is needed" in err
    assert json.loads(out)[0]["registers"] > 0


def test_all_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is the planner's own; compiling all of it is left to the kernels' tests."""
    monkeypatch.setattr(command, "all_kernels", lambda arch: all_kernels(arch)[:2])
    found = inspect(capsys, "--all-kernels")
    assert [row["kernel"] for row in found] == [spec.symbol for spec in all_kernels()[:2]]
    assert all(row["workload"] is None and row["bound_ms"] is None for row in found)


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
    if not with_rich:
        monkeypatch.setattr(console, "rich", lambda module: None)
    assert cli.main(["inspect", "kb87", "--pass", "fprop"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "V100" in lines[0]
    (row,) = (line for line in lines if "implicit_gemm_pointwise" in line)
    assert " * " in row
    assert "fp32 (fma pipe)" in row
    assert [line for line in lines if "together" in line]
    assert ("│" in row) == with_rich


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["W9"], 2, "'W9'; there are W1 (kb80)"),
        (["--arch", "sm_35"], 1, "there are sm_70, sm_75, sm_80"),
        (["--arch", "sm_35", "--all-kernels"], 1, "need compute capability 7.0 (Tesla V100) or newer"),
    ],
)
def test_errors(argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", *argv]) == code
    assert said in capsys.readouterr().err


def test_unknown_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect", "--pass", "forward"])
    assert "'forward' is not a list of fprop, dgrad, wgrad" in capsys.readouterr().err


def test_without_cuda_core(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr("polyconv.cuda.jit.cache.compiler_id", lambda: "none")
    empty = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(command, "KernelCache", lambda: KernelCache(empty))
    assert cli.main(["inspect", "W1", "--pass", "fprop"]) == 1
    assert "install polyconv[cu12] or polyconv[cu13]" in capsys.readouterr().err


def test_progress_is_silent_at_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with console.progress() as shown:
        shown.expect(3)
        shown.step("first")
        clock[0] = 2.5
        shown.step("second")
        clock[0] = 3.0
        shown.step("third")
    assert capsys.readouterr().err == "2/3 second\n"


# ---- plan


def test_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "kb80", "--device", "v100", "--pass", "fprop"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["plan", "kb80", "--device", "v100", "--pass", "fprop", "-v"]) == 0
    full = capsys.readouterr().out
    plan = plan_cuda(find("W1")[0].problem("fprop"), V100)
    assert short.startswith("kb80: fprop 8x32x512x512")
    assert short.count("runs: the least modelled cost") == 1
    for candidate in plan.candidates:
        assert candidate.name in full
        if candidate.error is not None:
            assert f"{candidate.error:.1e}" in next(line for line in short.splitlines() if candidate.name + " " in line)


def test_plan_names_the_next_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "kb80", "--pass", "dgrad", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["pass"] == "dgrad"
    costs = sorted((c["cost_us"], c["name"]) for c in found["candidates"] if c["cost_us"] and c["rejected"])
    text = plan_cuda(find("W1")[0].problem("dgrad"), V100).explain()
    named = [line.split()[1].rstrip(":") for line in text.splitlines() if line.startswith("  not ")]
    assert named[:3] == [name for _, name in costs[:3]]


def test_plan_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "W9"]) == 2
    assert "there are W1" in capsys.readouterr().err


# ---- Counting


@pytest.mark.parametrize("grid", [(1, 1, 1), (7, 1, 1), (1000, 3, 1), (40, 2, 4), (3, 1, 500), (100000, 1, 64)])
@pytest.mark.parametrize("most", [1, 2, 8, 200])
def test_a_sample_stands_for_every_block(grid: tuple[int, int, int], most: int) -> None:
    chosen = sample(grid, most)
    assert sum(weight for _, weight in chosen) == pytest.approx(math.prod(grid))
    assert len(chosen) <= max(most, 1)
    assert max(Counter(block for block, _ in chosen).values()) == 1
    assert all(0 <= c < g for block, _ in chosen for c, g in zip(block, grid, strict=True))
    if most > 1:
        assert chosen[-1] == (tuple(g - 1 for g in grid), 1.0)
    if 2 * grid[2] <= most:
        per_layer = Counter[int]()
        for block, weight in chosen:
            per_layer[block[2]] += round(weight * 1e6)
        assert {round(total / 1e6) for total in per_layer.values()} == {grid[0] * grid[1]}
        assert len(per_layer) == grid[2]


def test_blocks_behind_the_others_have_a_sample_of_their_own() -> None:
    chosen = sample((100, 2, 1), 10, 30)
    for blocks, number in ((range(70), 140), (range(70, 100), 60)):
        alike = [weight for (x, _, _), weight in chosen if x in blocks]
        assert len(alike) <= 10
        assert sum(alike) == pytest.approx(number)


@pytest.mark.parametrize(
    "problem",
    [
        Problem.make("fprop", (4, 16, 50, 50), (64, 16, 3, 3), padding=(1, 1, 1, 1), bias=True),
        Problem.make("dgrad", (2, 16, 45, 45), (32, 16, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
        Problem.make("wgrad", (4, 16, 40, 40), (64, 16, 3, 3), padding=(1, 1, 1, 1)),
    ],
    ids=lambda p: str(p.kind),
)
def test_a_sample_counts_what_the_whole_launch_does(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_cuda(problem, V100)
    cubins = {spec: KernelCache().get(spec, "sm_70") for spec in plan.kernels}
    place = plan.kernels.index(main_kernel(plan, V100))
    whole = count_plan(gpu_emulator, plan, cubins, V100)[place]
    monkeypatch.setattr(emulated_cost, "WHOLE", 0)
    blocks = math.prod(plan.launches[place].grid)
    monkeypatch.setattr(emulated_cost, "MOST_BLOCKS", blocks // 2)
    part = count_plan(gpu_emulator, plan, cubins, V100)[place]
    assert whole.blocks_run == blocks
    assert part.blocks_run < blocks
    assert part.issued == pytest.approx(whole.issued, rel=0.03)
    assert part.cycles["fp32 (fma pipe)"] == pytest.approx(whole.cycles["fp32 (fma pipe)"], rel=0.03)
    assert part.ffma_share == pytest.approx(whole.ffma_share, rel=0.03)


def test_a_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_cuda(Problem.make("fprop", (1, 8, 16, 16), (8, 8, 3, 3)), V100)
    cubins = {spec: KernelCache().get(spec, "sm_70") for spec in plan.kernels}
    monkeypatch.setattr(emulated_cost, "buffer_bytes", lambda plan: {"x": 64, "w": 64, "y": 64, "workspace": 64})
    with pytest.raises(emulated_cost.CountingError, match="implicit_gemm_pack_weights could not be counted"):
        count_plan(gpu_emulator, plan, cubins, V100)


def test_the_main_kernel_is_the_one_that_takes_longest_on_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_cuda(Problem.make("fprop", (1, 8, 16, 16), (8, 8, 3, 3)), V100)
    first, *_, last = plan.kernels
    monkeypatch.setattr(emulated_cost, "bound_us", lambda launch, gpu: float((launch.kernel is first) == (gpu is V100)))
    assert [main_kernel(plan, gpu) for gpu in (V100, DEVICES["a100"])] == [first, last]


def test_weights_are_applied() -> None:
    """A made-up kernel whose block (x, 0, 0) takes x + 1 instructions of the FMA pipe."""

    def execute(blocks: list[tuple[int, int, int]]) -> SimpleNamespace:
        work = sum(x + 1 for x, _, _ in blocks)
        row = SimpleNamespace(name="fp32 (fma pipe)", cycles=float(work))
        light = SimpleNamespace(rows=[row])
        return SimpleNamespace(
            issue_slots=100 * work, opcode_counts=lambda: {"FFMA": 50 * work}, speed_of_light=lambda **_: light
        )

    n = 3000
    found = count((n, 1, 1), execute, dram_bytes=9e9)
    assert found.blocks_run < n
    assert found.cycles["fp32 (fma pipe)"] == pytest.approx(n * (n + 1) / 2, rel=0.05)
    assert found.ffma_share == pytest.approx(0.5)
    assert found.ms("DRAM") == pytest.approx(10.0)


def test_a_short_last_slice_stands_for_itself() -> None:
    """Each of 128 channels is summed in four slices, of which the last has a third of the work."""

    def execute(blocks: list[tuple[int, int, int]]) -> SimpleNamespace:
        work = sum(1 if x == 3 else 3 for x, _, _ in blocks)
        light = SimpleNamespace(rows=[SimpleNamespace(name="issue slots", cycles=float(work))])
        slots = 1_000_000 * work
        return SimpleNamespace(issue_slots=slots, opcode_counts=dict, speed_of_light=lambda **_: light)

    found = count((4, 128, 2), execute, dram_bytes=0.0)
    assert found.blocks_run <= 16
    assert found.cycles["issue slots"] == pytest.approx(256 * (3 + 3 + 3 + 1))


@pytest.mark.parametrize("device", emulated_cost.COUNTED.values(), ids=lambda device: device.arch)
def test_counted_and_modelled_times_share_the_figures_of_a_gpu(device: CudaDevice) -> None:
    """An A100's L2 is measured to deliver 5.3 TB/s, three quarters of what its paper says."""
    asked: dict[str, float] = {}

    def execute(blocks: list[tuple[int, int, int]]) -> SimpleNamespace:
        def light(**figures: float) -> SimpleNamespace:
            asked.update(figures)
            return SimpleNamespace(rows=[])

        return SimpleNamespace(issue_slots=1, opcode_counts=dict, speed_of_light=light)

    count((2, 1, 1), execute, dram_bytes=0.0, device=device)
    assert asked["l2_bytes_per_clk"] * asked["clock_mhz"] == pytest.approx(1e3 * device.l2_gbs)


def test_compulsory_traffic() -> None:
    problem = Problem.make("fprop", (2, 8, 40, 40), (16, 8, 1, 1), stride=(4, 4))
    plan = plan_cuda(problem, V100)
    x, y = 4 * 2 * 8 * 40 * 40, 4 * 2 * 16 * 10 * 10
    # Only every fourth row of x is read, besides the packed weights and their table.
    assert x / 4 + y < plan.launches[-1].work.dram_bytes <= x / 4 + y + plan.workspace_bytes


@pytest.mark.parametrize("threads", [32, 96, 128, 256, 512])
def test_occupancy_agrees_with_the_emulator(threads: int) -> None:
    for registers in (16, 32, 61, 64, 96, 120, 128, 168, 255):
        for shared in (0, 1, 4096, 16384, 49152, 98304):
            expected = gpu_emulator.V100.blocks_per_sm(registers, threads, shared)
            assert occupancy.blocks_per_sm("sm_70", registers, threads, shared) == expected
    assert occupancy.blocks_per_sm("sm_999", 32, 128, 0) is None


def test_occupancy_of_newer_gpus() -> None:
    assert occupancy.blocks_per_sm("sm_80", 128, 128, 0) == 4
    assert occupancy.blocks_per_sm("sm_90", 32, 128, 40 * 1024) == 5
    assert occupancy.blocks_per_sm("sm_120", 32, 64, 0) == 24


def test_the_kernel_that_is_inspected_is_the_one_that_runs() -> None:
    (row,) = rows.inspect_kernels([PACK], "sm_70", KernelCache(), console.Progress())
    info = gpu_emulator.resources(compile_kernel(PACK, "sm_70"), PACK.symbol)
    assert (row.registers, row.spill_bytes, row.shared_bytes) == (info.registers, info.frame_bytes, info.static_shared)
    assert row.blocks_per_sm == info.blocks_per_sm(PACK.threads)
