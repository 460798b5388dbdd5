"""Traces for a simulator: parsed as Accel-Sim does, and compared with the kernel's execution."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import gpu_emulator

Compiler = Callable[[str], bytes]

VECTORS = """extern "C" __global__ void vectors(float4* o, const float4* x, int n) {
  extern __shared__ float4 s[];
  int t = threadIdx.x;
  for (int i = t; i < n; i += blockDim.x) s[i] = x[i];
  __syncthreads();
  for (int i = t; i < n; i += blockDim.x) o[blockIdx.x * n + i] = s[n - 1 - i]; }"""
PERSISTENT = """extern "C" __global__ void persistent(float* o, const float* x, int tiles) {
  __shared__ float s[96];
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    s[threadIdx.x] = x[tile * 96 + threadIdx.x];
    __syncthreads();
    float v = s[95 - threadIdx.x];
    if (threadIdx.x < 40) v = v * v + 1;
    __syncthreads();
    o[tile * 96 + threadIdx.x] = v;
  } }"""
FREE = """extern "C" __global__ void free_running(float* o, int n) {
  if (threadIdx.x >= 50) return;
  float v = o[threadIdx.x];
  for (int i = 0; i < n; i++) v = v * v + 1;
  o[threadIdx.x] = v; }"""
FAR = """extern "C" __global__ void far(float* o, const float* x, long long step) {
  o[threadIdx.x] = x[threadIdx.x * step]; }"""


@dataclass
class Access:
    width: int
    addresses: dict[int, int]


@dataclass
class Line:
    mask: int
    written: list[int]
    opcode: str
    read: list[int]
    access: Access | None


@dataclass
class Trace:
    header: dict[str, str]
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    warps: list[list[list[Line]]] = field(default_factory=list)
    """By block, by warp."""


def lanes(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


def read_line(text: str) -> Line:
    """One instruction by the rules of Accel-Sim's parser, without a remainder."""
    words = text.split()[::-1]
    int(words.pop(), 16)
    mask = int(words.pop(), 16)
    written = [int(words.pop()[1:]) for _ in range(int(words.pop()))]
    opcode = words.pop()
    read = [int(words.pop()[1:]) for _ in range(int(words.pop()))]
    width = int(words.pop())
    access = None
    if width:
        mode, first, *others = int(words.pop()), int(words.pop(), 16), *lanes(mask)[1:]
        where = {lanes(mask)[0]: first}
        if mode == 1:
            stride = int(words.pop())
            assert -(2**31) <= stride < 2**31
            assert lanes(mask) == list(range(lanes(mask)[0], lanes(mask)[-1] + 1))
            for count, lane in enumerate(others, 1):
                where[lane] = first + count * stride
        else:
            assert mode == 2
            at = first
            for lane in others:
                at += int(words.pop())
                where[lane] = at
            assert words.pop() == "0"  # the parser expects one more than the number of differences
        access = Access(width, where)
    assert words == ["0"], text  # the immediate
    return Line(mask, written, opcode, read, access)


def read_trace(path: Path) -> Trace:
    head, _, body = path.read_text().partition("#traces format")
    trace = Trace(dict(re.findall(r"^-(.*?) = (.*)$", head, re.MULTILINE)))
    for block in body.split("#BEGIN_TB")[1:]:
        text, end, rest = block.partition("#END_TB")
        assert end
        assert not rest.strip()
        match = re.search(r"thread block = (\d+),(\d+),(\d+)", text)
        assert match
        trace.blocks.append(tuple(map(int, match.groups())))
        warps = []
        for number, warp in enumerate(text.split("warp = ")[1:]):
            index, count, *lines = filter(None, warp.splitlines())
            assert int(index) == number
            assert int(count.removeprefix("insts = ")) == len(lines)
            warps.append([read_line(line) for line in lines])
        trace.warps.append(warps)
    return trace


def count(warp: list[Line], prefix: str) -> int:
    return sum(line.opcode.startswith(prefix) for line in warp)


def check_exits(trace: Trace, threads: int) -> None:
    """Every thread of every block exits exactly once: the simulator waits for it."""
    for block in trace.warps:
        left = 0
        for warp in block:
            gone = 0
            for line in warp:
                assert not line.mask & gone
                gone |= line.mask if line.opcode == "EXIT" else 0
            left += gone.bit_count()
        assert left == threads


def test_vectors_and_large_shared_memory(nvrtc: Compiler, tmp_path: Path) -> None:
    n, shared = 80 * 64, 80 * 1024
    x, out = np.arange(4 * n, dtype=np.float32), np.zeros(4 * n, np.float32)
    report = gpu_emulator.Device().run(
        nvrtc(VECTORS),
        "vectors",
        1,
        128,
        [out, x, gpu_emulator.i32(n)],
        shared=shared,
        max_dynamic_shared=shared,
        trace=tmp_path,
    )
    trace = read_trace(tmp_path / "kernel-1.traceg")
    assert int(trace.header["shmem"]) == shared
    assert int(trace.header["nregs"]) == report.registers
    assert trace.header["grid dim"] == "(1,1,1)"
    assert trace.header["block dim"] == "(128,1,1)"
    check_exits(trace, 128)
    lines = [line for warp in trace.warps[0] for line in warp]
    assert len(lines) == report.issue_slots
    for opcode, is_load in (("LDG", True), ("LDS", True), ("STG", False), ("STS", False)):
        vectors = [line for line in lines if line.opcode.startswith(opcode) and ".128" in line.opcode]
        touched: set[int] = set()
        for line in vectors:
            assert line.access
            assert line.access.width == 16
            data = line.written if is_load else line.read[-4:]
            assert data == list(range(data[0], data[0] + 4))
            assert line.written == [] or is_load
            touched |= set(line.access.addresses.values())
        base = {"LDG": x.ctypes.data, "STG": out.ctypes.data}.get(opcode, 0)
        assert touched == set(range(base, base + 16 * n, 16)), opcode


def test_chosen_blocks_are_the_grid_of_the_trace(nvrtc: Compiler, tmp_path: Path) -> None:
    x, out = np.ones(960, np.float32), np.zeros(960, np.float32)
    chosen = [(4, 0, 0), (7, 0, 0), (2, 0, 0)]
    device = gpu_emulator.Device()
    device.run(nvrtc(PERSISTENT), "persistent", 10, 96, [out, x, gpu_emulator.i32(10)], blocks=chosen, trace=tmp_path)
    trace = read_trace(tmp_path / "kernel-1.traceg")
    assert trace.header["grid dim"] == "(3,1,1)"
    assert trace.blocks == chosen
    check_exits(trace, 96)


def test_long_blocks_are_cut_at_a_common_barrier(nvrtc: Compiler, tmp_path: Path) -> None:
    tiles, limit = 200, 300
    x, out = np.ones(tiles * 96, np.float32), np.zeros(tiles * 96, np.float32)
    args = [out, x, gpu_emulator.i32(tiles)]
    device = gpu_emulator.Device()
    report = device.run(nvrtc(PERSISTENT), "persistent", 4, 96, args, trace=tmp_path, trace_limit=limit)
    assert (out.reshape(tiles, 96)[:, :40] == 2).all()  # the kernel itself ran to completion
    trace = read_trace(tmp_path / "kernel-1.traceg")
    assert len(trace.blocks) == 4
    check_exits(trace, 96)
    for block in trace.warps:
        assert len({count(warp, "BAR") for warp in block}) == 1
        for warp in block:
            assert 0.7 * limit < len(warp) <= limit + 1
            assert warp[-1].opcode == "EXIT"
            assert warp[-2].opcode.startswith("BAR.SYNC")
    assert sum(len(warp) for block in trace.warps for warp in block) < report.issue_slots / 2


def test_blocks_without_barriers_are_cut_where_the_limit_is(nvrtc: Compiler, tmp_path: Path) -> None:
    out = np.zeros(64, np.float32)
    gpu_emulator.Device().run(
        nvrtc(FREE), "free_running", 1, 64, [out, gpu_emulator.i32(5000)], trace=tmp_path, trace_limit=300
    )
    trace = read_trace(tmp_path / "kernel-1.traceg")
    check_exits(trace, 64)
    assert [len(warp) for warp in trace.warps[0]] == [301, 301]
    assert trace.warps[0][1][-1].mask == 2**18 - 1  # the others had exited before


def test_a_short_block_is_not_cut(nvrtc: Compiler, tmp_path: Path) -> None:
    out = np.zeros(64, np.float32)
    device = gpu_emulator.Device()
    whole = device.run(
        nvrtc(FREE), "free_running", 1, 64, [out, gpu_emulator.i32(5)], trace=tmp_path, trace_limit=10**6
    )
    trace = read_trace(tmp_path / "kernel-1.traceg")
    assert sum(len(warp) for warp in trace.warps[0]) == whole.issue_slots
    check_exits(trace, 64)


def test_far_lanes_need_more_than_a_stride(nvrtc: Compiler, tmp_path: Path) -> None:
    x, out = gpu_emulator.sparse((32, 2**30)), np.zeros(32, np.float32)
    gpu_emulator.Device().run(nvrtc(FAR), "far", 1, 32, [out, x, gpu_emulator.i64(2**30)], trace=tmp_path)
    (warp,) = read_trace(tmp_path / "kernel-1.traceg").warps[0]
    (load,) = (line for line in warp if line.opcode.startswith("LDG"))
    assert load.access
    assert load.access.addresses == {lane: x.ctypes.data + lane * 2**32 for lane in range(32)}


def test_launches_in_sequence(nvrtc: Compiler, tmp_path: Path) -> None:
    x, middle, out = (np.ones(960, np.float32) for _ in range(3))
    device, cubin = gpu_emulator.Device(), nvrtc(PERSISTENT)
    for source, target in ((x, middle), (middle, out), (x, middle)):
        device.run(cubin, "persistent", 5, 96, [target, source, gpu_emulator.i32(10)], trace=tmp_path)

    def copy(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
        return f"MemcpyHtoD,0x{array.ctypes.data:016x},{array.nbytes}"

    listing = (tmp_path / "kernelslist.g").read_text().splitlines()
    assert listing == [
        copy(middle),
        copy(x),
        "kernel-1.traceg",
        copy(out),
        "kernel-2.traceg",
        "kernel-3.traceg",
    ]
    for number in (1, 2, 3):
        assert read_trace(tmp_path / f"kernel-{number}.traceg").header["kernel id"] == str(number)
    for path in tmp_path.iterdir():
        path.unlink()
    device.run(cubin, "persistent", 5, 96, [out, x, gpu_emulator.i32(10)], trace=tmp_path)
    assert (tmp_path / "kernelslist.g").read_text().splitlines()[-1] == "kernel-1.traceg"
