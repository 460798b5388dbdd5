"""Counts: bank conflicts, sectors, distinct bytes, and a GEMM whose counts are all known."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import gpu_emulator
from gpu_emulator.report import pipe_of

Compiler = Callable[[str], bytes]


def shared_report(nvrtc: Compiler, index: str, kind: str = "float", size: int = 4096) -> gpu_emulator.Report:
    """One store and one load of `kind` per thread of a warp, at the given index."""
    source = f"""extern "C" __global__ void k({kind}* o, const {kind}* x, int n) {{
      __shared__ {kind} s[{size}]; int t = threadIdx.x; int i = {index};
      s[i] = x[t]; __syncthreads(); o[t] = s[i]; }}"""
    out, x = np.zeros(32 * 4, np.float32), np.ones(32 * 4, np.float32)
    return gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, x, gpu_emulator.i32(1)])


@pytest.mark.parametrize(
    ("index", "wavefronts"),
    [
        ("t", 1),
        ("t * 2", 2),
        ("t * 32", 32),
        ("t * 33", 1),
        ("t * 4", 4),
        ("(t * 7) % 32", 1),
        ("t % 8 * 32 + t / 8", 8),
    ],
)
def test_bank_conflicts_of_words(nvrtc: Compiler, index: str, wavefronts: int) -> None:
    report = shared_report(nvrtc, index)
    assert report.shared.requests == 2
    assert report.shared.wavefronts == 2 * wavefronts
    assert report.shared.ideal_wavefronts == 2
    assert report.shared.conflicts == 2 * (wavefronts - 1)
    worst = report.worst_conflicts()
    assert len(worst) == (2 if wavefronts > 1 else 0)
    assert all(w.opcode in ("LDS", "STS") for w in worst)


@pytest.mark.parametrize(
    ("kind", "index", "wavefronts", "ideal"),
    [
        ("float2", "t", 2, 2),
        ("float2", "t * 16", 32, 2),
        ("float2", "t * 17", 2, 2),
        ("float4", "t", 4, 4),
        ("float4", "t * 2", 8, 4),
        ("float4", "t * 9", 4, 4),
        ("float4", "t * 8", 32, 4),
    ],
)
def test_bank_conflicts_of_vectors(nvrtc: Compiler, kind: str, index: str, wavefronts: int, ideal: int) -> None:
    report = shared_report(nvrtc, index, kind, 600 if kind == "float2" else 300)
    assert report.shared.wavefronts == 2 * wavefronts
    assert report.shared.ideal_wavefronts == 2 * ideal


def test_broadcast_is_one_wavefront(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float* o, const float* x) {
      __shared__ float s[64]; int t = threadIdx.x; s[t] = x[t]; __syncthreads(); o[t] = s[t / 8] + s[5]; }"""
    report = gpu_emulator.run(nvrtc(source), "k", 1, 32, [np.zeros(32, np.float32), np.ones(32, np.float32)])
    assert report.shared.conflicts == 0


def global_report(
    nvrtc: Compiler, expression: str, x: np.ndarray, kind: str = "float", threads: int = 32
) -> gpu_emulator.Report:
    source = f"""extern "C" __global__ void k({kind}* o, const {kind}* x) {{
      int t = threadIdx.x; o[t] = x[{expression}]; }}"""
    return gpu_emulator.run(nvrtc(source), "k", 1, threads, [np.zeros(threads * 4, np.float32), x])


@pytest.mark.parametrize(
    ("expression", "sectors", "ideal", "lines"),
    [
        ("t", 4, 4, 1),
        ("t + 1", 5, 4, 2),
        ("t * 2", 8, 4, 2),
        ("t * 8", 32, 4, 8),
        ("t * 32", 32, 4, 32),
        ("5", 1, 1, 1),
    ],
)
def test_sectors(nvrtc: Compiler, expression: str, sectors: int, ideal: int, lines: int) -> None:
    x = np.zeros(1100, np.float32)
    report = global_report(nvrtc, expression, x)
    assert (report.loads.requests, report.loads.sectors) == (1, sectors)
    assert (report.loads.ideal_sectors, report.loads.lines) == (ideal, lines)
    assert report.loads.coalescing == ideal / sectors
    assert report.dram_read_bytes == 32 * sectors
    assert (report.stores.sectors, report.stores.ideal_sectors) == (4, 4)
    assert report.dram_write_bytes == 128


def test_vector_loads_are_whole_lines(nvrtc: Compiler) -> None:
    report = global_report(nvrtc, "t", np.zeros(128, np.float32), "float4")
    assert (report.loads.sectors, report.loads.lines, report.loads.coalescing) == (16, 4, 1.0)


def test_an_allocation_counts_as_aligned(nvrtc: Compiler) -> None:
    """numpy aligns arrays to 16 bytes, CUDA to 256: counts use CUDA's alignment, also for views into an array."""
    memory = np.zeros(4096, np.float32)
    for offset in (0, 8, 32):
        assert global_report(nvrtc, "t", memory[offset:]).loads.sectors == 4
    assert global_report(nvrtc, "t", memory[1:]).loads.sectors == 5


def test_distinct_bytes_are_counted_once(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float* o, const float* x, int n) {
      float s = 0; for (int i = 0; i < n; i++) s += x[i]; o[blockIdx.x * blockDim.x + threadIdx.x] = s; }"""
    x, out = np.ones(256, np.float32), np.zeros(512, np.float32)
    report = gpu_emulator.run(nvrtc(source), "k", 4, 128, [out, x, gpu_emulator.i32(256)])
    assert report.dram_read_bytes == 1024
    assert report.dram_write_bytes == 2048
    assert report.l2_read_bytes == 4 * 1024
    assert report.loads.sectors == 256 * 16
    assert report.l2_bytes_without_l1 == 32 * (256 * 16 + 64)


GEMM = """
extern "C" __global__ __launch_bounds__(256) void gemm(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int n, int k) {
  __shared__ float as[16][17], bs[16][16];
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  int row = blockIdx.y * 16 + ty, column = blockIdx.x * 16 + tx;
  float sum = 0;
  for (int at = 0; at < k; at += 16) {
    as[tx][ty] = a[(long long)row * k + at + tx];
    bs[ty][tx] = b[(long long)(at + ty) * n + column];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) sum = fmaf(as[i][ty], bs[i][tx], sum);
    __syncthreads();
  }
  c[(long long)row * n + column] = sum;
}"""


@pytest.fixture(scope="module")
def gemm_report(nvrtc: Compiler) -> gpu_emulator.Report:
    m, n, k = 48, 64, 96
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c = np.full((m, n), np.nan, np.float32)
    report = gpu_emulator.run(
        nvrtc(GEMM),
        "gemm",
        (n // 16, m // 16),
        256,
        [a, b, c, gpu_emulator.i32(n), gpu_emulator.i32(k)],
        check_global=True,
    )
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=0, atol=2e-5)
    return report


def test_gemm_counts(gemm_report: gpu_emulator.Report) -> None:
    m, n, k = 48, 64, 96
    blocks, steps, warps = (m // 16) * (n // 16), k // 16, 8
    assert gemm_report.ffma == m * n * k
    assert gemm_report.opcodes["FFMA"] == m * n * k // 32
    assert gemm_report.blocks_run == blocks
    loads = blocks * steps * warps
    assert gemm_report.loads.requests == 2 * loads
    assert gemm_report.loads.sectors == 2 * loads * 4
    assert gemm_report.stores.sectors == m * n // 8
    assert gemm_report.dram_read_bytes == 4 * (m * k + k * n)
    assert gemm_report.dram_write_bytes == 4 * m * n
    assert gemm_report.opcode_counts()["BAR"] == 2 * loads
    assert sum(gemm_report.opcodes.values()) == gemm_report.issue_slots == sum(gemm_report.pipes.values())


def test_report_scales(gemm_report: gpu_emulator.Report) -> None:
    double = gemm_report.scaled(2 * gemm_report.blocks_run)
    assert double.ffma == 2 * gemm_report.ffma
    assert double.scale == 2.0
    assert double.dram_bytes == 2 * gemm_report.dram_bytes
    fixed = gemm_report.scaled(2 * gemm_report.blocks_run, dram_bytes=100_000)
    assert fixed.dram_bytes == 100_000
    assert "scaled" in str(double)


def test_speed_of_light(gemm_report: gpu_emulator.Report) -> None:
    light = gemm_report.speed_of_light(sms=1, clock_mhz=1000, dram_gbs=1e6)
    fma = light.row("fp32 (fma pipe)")
    assert fma.cycles == gemm_report.pipes["fma"] * 2 / 4
    assert fma.ms == pytest.approx(fma.cycles / 1e6)
    assert light.row("shared memory").cycles == gemm_report.shared.wavefronts
    assert light.bound_cycles == max(r.cycles for r in light.rows)
    # one load of each operand per multiply-add: shared memory is the bound
    assert light.binding.name in ("shared memory", "lsu / L1")
    assert light.fp32_share == pytest.approx(gemm_report.ffma / 32 / 2 / light.bound_cycles)
    half = gemm_report.speed_of_light(sms=1, clock_mhz=1000, dram_gbs=1e6, useful_ffma=gemm_report.ffma // 2)
    assert half.fp32_share == pytest.approx(light.fp32_share / 2)
    slow = gemm_report.speed_of_light(dram_gbs=1e-3)
    assert slow.binding.name == "DRAM"
    assert "bound by DRAM" in str(slow)
    json.dumps(light.to_dict())


def test_report_is_printable(gemm_report: gpu_emulator.Report) -> None:
    assert "thread FFMAs 294,912" in str(gemm_report)
    assert json.loads(json.dumps(gemm_report.to_dict()))["ffma"] == gemm_report.ffma


def test_predicated_off_instructions_take_a_slot(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* o, int n) { if (n) o[threadIdx.x] = 1; }'
    out = np.zeros(32, np.float32)
    off = gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, gpu_emulator.i32(0)])
    assert off.predicated_off >= 1
    assert off.stores.requests == 0
    assert gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, gpu_emulator.i32(1)]).stores.requests == 1


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("FFMA", "fma"),
        ("IMAD", "fma"),
        ("IADD3", "alu"),
        ("LOP3", "alu"),
        ("DFMA", "fp64"),
        ("MUFU", "xu"),
        ("HMMA", "tensor"),
        ("LDG", "lsu"),
        ("BAR", "control"),
    ],
)
def test_pipes(opcode: str, pipe: str) -> None:
    assert pipe_of(opcode) == pipe
