"""Launch limits of a driver, argument passing, selected blocks, traces, the tool chain."""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gpu_emulator
from gpu_emulator import elf, launch, toolchain
from gpu_emulator.__main__ import main as command_line

Compiler = Callable[..., bytes]

FILL = """extern "C" __global__ void fill(float* o, long long n, float v, int base) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) o[i] = v + base; }"""
DYNAMIC = """extern "C" __global__ void dynamic(float* o, int n) { extern __shared__ float s[];
  s[n] = 3; o[0] = s[n]; }"""


def test_scalar_arguments(nvrtc: Compiler) -> None:
    out = np.zeros(40, np.float32)
    gpu_emulator.run(
        nvrtc(FILL), "fill", 2, 32, [out, gpu_emulator.i64(40), gpu_emulator.f32(0.5), gpu_emulator.i32(-2)]
    )
    assert (out == -1.5).all()
    gpu_emulator.run(nvrtc(FILL), "fill", 2, 32, [out, np.int64(40), np.float32(2), ctypes.c_int32(7)])
    assert (out == 9).all()


def test_raw_parameter_block(nvrtc: Compiler) -> None:
    out = np.zeros(32, np.float32)
    block = struct.pack("<QqfI", out.ctypes.data, 32, 1.25, 1)
    gpu_emulator.run_raw(nvrtc(FILL), "fill", (1, 1, 1), (32, 1, 1), block, [(out.ctypes.data, out.nbytes)])
    assert (out == 2.25).all()
    gpu_emulator.run(nvrtc(FILL), "fill", 1, 32, block, extra_buffers=[out])
    with pytest.raises(gpu_emulator.LaunchError, match="24 bytes"):
        gpu_emulator.run_raw(nvrtc(FILL), "fill", 1, 32, block[:-1], [])


def test_wrong_arguments_are_named(nvrtc: Compiler) -> None:
    out, cubin = np.zeros(32, np.float32), nvrtc(FILL)
    with pytest.raises(gpu_emulator.LaunchError, match="takes 4 parameters, 3"):
        gpu_emulator.run(cubin, "fill", 1, 32, [out, gpu_emulator.i64(1), gpu_emulator.f32(1)])
    with pytest.raises(gpu_emulator.LaunchError, match="parameter 1 of fill takes 8 bytes, 4"):
        gpu_emulator.run(cubin, "fill", 1, 32, [out, gpu_emulator.i32(1), gpu_emulator.f32(1), gpu_emulator.i32(1)])
    with pytest.raises(gpu_emulator.LaunchError, match=r"parameter 3.*wrap"):
        gpu_emulator.run(cubin, "fill", 1, 32, [out, gpu_emulator.i64(1), gpu_emulator.f32(1), 5])
    with pytest.raises(OverflowError):
        gpu_emulator.i32(2**31)
    with pytest.raises(gpu_emulator.CubinError, match=r"no kernel 'nothing'.*fill"):
        gpu_emulator.run(cubin, "nothing", 1, 32, [])


def test_limits(nvrtc: Compiler) -> None:
    out, cubin = np.zeros(32, np.float32), nvrtc(FILL)
    args = [out, gpu_emulator.i64(1), gpu_emulator.f32(1), gpu_emulator.i32(1)]
    for grid, block, words in [
        (1, 1025, "block.x"),
        (1, (64, 17), "1088 threads"),
        (1, (1, 1, 65), "block.z"),
        ((1, 65536), 32, "grid.y"),
        (0, 32, "grid.x"),
    ]:
        with pytest.raises(gpu_emulator.LaunchError, match=words):
            gpu_emulator.run(cubin, "fill", grid, block, args)


def test_launch_bounds(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ __launch_bounds__(64) void k(float* o) { o[threadIdx.x] = 1; }'
    with pytest.raises(gpu_emulator.LaunchError, match="at most 64"):
        gpu_emulator.run(nvrtc(source), "k", 1, 128, [np.zeros(128, np.float32)])


def test_shared_memory_opt_in(nvrtc: Compiler) -> None:
    cubin, out = nvrtc(DYNAMIC), np.zeros(1, np.float32)
    args = [out, gpu_emulator.i32(12000)]
    gpu_emulator.run(cubin, "dynamic", 1, 1, args, shared=48 * 1024)
    with pytest.raises(gpu_emulator.LaunchError, match="opt-in"):
        gpu_emulator.run(cubin, "dynamic", 1, 1, args, shared=48 * 1024 + 4)
    with pytest.raises(gpu_emulator.LaunchError, match="opt-in"):
        gpu_emulator.run(cubin, "dynamic", 1, 1, args, shared=64 * 1024, max_dynamic_shared=60 * 1024)
    gpu_emulator.run(cubin, "dynamic", 1, 1, args, shared=96 * 1024, max_dynamic_shared=96 * 1024)
    with pytest.raises(gpu_emulator.LaunchError, match="the V100 has"):
        gpu_emulator.run(cubin, "dynamic", 1, 1, args, shared=96 * 1024 + 4, max_dynamic_shared=2**20)


def test_chosen_blocks(nvrtc: Compiler) -> None:
    out = np.zeros(320, np.float32)
    args = [out, gpu_emulator.i64(320), gpu_emulator.f32(1), gpu_emulator.i32(0)]
    report = gpu_emulator.run(nvrtc(FILL), "fill", 10, 32, args, blocks=[(3, 0, 0), (7, 0, 0)])
    assert report.blocks_run == 2
    assert np.flatnonzero(out.reshape(10, 32).any(1)).tolist() == [3, 7]
    assert report.scaled(10).stores.sectors == 40
    with pytest.raises(gpu_emulator.LaunchError, match="not in the grid"):
        gpu_emulator.run(nvrtc(FILL), "fill", 10, 32, args, blocks=[(10, 0, 0)])


def test_resources(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ __launch_bounds__(128) void k(float* o, long long n, int m) {
      __shared__ float s[100]; s[threadIdx.x % 100] = m; __syncthreads(); o[n] = s[m]; }"""
    r = gpu_emulator.resources(nvrtc(source), "k")
    assert (r.static_shared, r.max_threads, r.frame_bytes) == (400, 128, 0)
    assert r.param_sizes == (8, 8, 4)
    assert 8 <= r.registers <= 32
    assert r.blocks_per_sm(128) == 16


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (32, 256, 0, 8),
        (128, 256, 0, 2),
        (127, 256, 16384, 2),
        (164, 128, 0, 3),
        (168, 128, 0, 3),
        (255, 256, 0, 1),
        (32, 32, 0, 32),
        (32, 1024, 0, 2),
        (64, 1024, 0, 1),
        (65, 1024, 0, 0),
        (32, 128, 49152, 2),
        (32, 128, 49153, 1),
        (16, 64, 98304, 1),
        (16, 64, 98305, 0),
    ],
)
def test_occupancy(registers: int, threads: int, shared: int, blocks: int) -> None:
    assert gpu_emulator.V100.blocks_per_sm(registers, threads, shared) == blocks


def test_only_known_cubins(nvrtc: Compiler) -> None:
    with pytest.raises(gpu_emulator.CubinError, match="ELF"):
        gpu_emulator.run(b"not a cubin", "k", 1, 1, [])
    with pytest.raises(gpu_emulator.CubinError, match="compiled for sm_86; only sm_70 and sm_80"):
        gpu_emulator.resources(nvrtc(FILL, "sm_86"), "fill")


def test_unknown_instruction_is_printed(nvrtc: Compiler) -> None:
    """Half-precision arithmetic is not emulated: refused by name, and only when executed."""
    source = """extern "C" __global__ void k(unsigned* o, int n) {
      if (n) asm("fma.rn.f16x2 %0, %1, %1, %1;" : "=r"(o[0]) : "r"(o[1])); else o[2] = 5; }"""
    out = np.zeros(4, np.uint32)
    gpu_emulator.run(nvrtc(source), "k", 1, 1, [out, gpu_emulator.i32(0)])
    assert out[2] == 5
    with pytest.raises(gpu_emulator.Unsupported, match="HFMA2"):
        gpu_emulator.run(nvrtc(source), "k", 1, 1, [out, gpu_emulator.i32(1)])


def test_faults_survive_pickling(nvrtc: Compiler) -> None:
    with pytest.raises(gpu_emulator.OutOfBounds) as caught:
        gpu_emulator.run(
            nvrtc(FILL),
            "fill",
            1,
            32,
            [np.zeros(4, np.float32), gpu_emulator.i64(9), gpu_emulator.f32(0), gpu_emulator.i32(0)],
        )
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert type(again) is gpu_emulator.OutOfBounds


def test_trace(nvrtc: Compiler, tmp_path: Path) -> None:
    source = """extern "C" __global__ void k(float* o, const float* x) {
      __shared__ float s[64]; int t = threadIdx.x; s[t] = x[t * 2]; __syncthreads(); o[t] = s[63 - t] * 2 + 1; }"""
    x, out = np.arange(128, dtype=np.float32), np.zeros(64, np.float32)
    cubin, device = nvrtc(source), gpu_emulator.Device()
    report = device.run(cubin, "k", 1, 64, [out, x], trace=tmp_path)
    device.run(cubin, "k", 1, 64, [out, x], trace=tmp_path)
    listing = (tmp_path / "kernelslist.g").read_text().split()
    assert listing[-2:] == ["kernel-1.traceg", "kernel-2.traceg"]
    assert listing[0] == f"MemcpyHtoD,0x{out.ctypes.data:016x},256"
    text = (tmp_path / "kernel-1.traceg").read_text()
    assert "-accelsim tracer version = 4" in text
    assert "-grid dim = (1,1,1)" in text
    assert "thread block = 0,0,0" in text
    assert text.count("#BEGIN_TB") == text.count("#END_TB") == 1
    counts = [int(line.split("=")[1]) for line in text.splitlines() if line.startswith("insts")]
    assert sum(counts) == report.issue_slots
    load = next(line for line in text.splitlines() if " LDG" in line)
    assert load.split()[1] == "ffffffff"
    assert f"4 1 0x{x.ctypes.data:x} 8 0" in load
    body = text.splitlines()
    first = body.index("warp = 0")
    assert len([line for line in body[first + 2 :] if line and line[0] in "0123456789abcdef"]) >= counts[0]


def test_disassembly_is_cached(nvrtc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = elf.load(nvrtc(FILL)).kernel("fill").code
    tool = toolchain.nvdisasm()
    monkeypatch.setenv("GPU_EMULATOR_NVDISASM", str(tool))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = toolchain.disassemble(code, "sm_70")
    (cached,) = (tmp_path / "polyconv-dev" / "sass").glob("*.sass")
    monkeypatch.setenv("GPU_EMULATOR_NVDISASM", "/bin/false")
    assert toolchain.disassemble(code, "sm_70") == text
    cached.write_text(text[: len(text) // 2])  # a truncated entry is no entry
    with pytest.raises(toolchain.ToolchainError):
        toolchain.disassemble(code, "sm_70")


def test_missing_tool_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_EMULATOR_NVDISASM", str(tmp_path / "absent"))
    with pytest.raises(toolchain.ToolchainError, match="not an executable"):
        toolchain.nvdisasm()
    monkeypatch.delenv("GPU_EMULATOR_NVDISASM")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain, "_WHEEL", "triton==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(toolchain.ToolchainError, match="GPU_EMULATOR_NVDISASM"):
        toolchain.nvdisasm()


def test_command_line(nvrtc: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fill.cubin"
    path.write_bytes(nvrtc(FILL))
    assert command_line(["disasm", str(path), "fill"]) == 0
    assert command_line(["resources", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "STG.E.SYS" in printed
    assert "not supported" not in printed
    assert "fill: Resources(registers=" in printed


def test_everything_is_understood(nvrtc: Compiler) -> None:
    """The emulator knows every instruction of the kernels in this directory."""
    code = elf.load(nvrtc(FILL)).kernel("fill").code
    assert launch._program(code, "sm_70").unsupported() == []
