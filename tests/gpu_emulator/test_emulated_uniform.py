"""Uniform registers and predicates, votes and warp reductions of sm_80."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator

Array = npt.NDArray[Any]
Compiler = Callable[..., bytes]


def run(nvrtc: Compiler, body: str, n: int, grid: int = 3) -> tuple[Array, Array, gpu_emulator.Report]:
    source = f"""extern "C" __global__ void k(int* o, const int* a, int n, int* total) {{
      const int t = threadIdx.x, b = blockIdx.x; int r = 0; {body} o[32 * b + t] = r; }}"""
    values = np.random.default_rng(0).integers(-99, 100, 64, np.int32)
    out, total = np.zeros(32 * grid, np.int32), np.zeros(4, np.int32)
    report = gpu_emulator.run(nvrtc(source, "sm_80"), "k", grid, 32, [out, values, gpu_emulator.i32(n), total])
    assert report.pipes["uniform"]
    return out.reshape(grid, 32), values, report


@pytest.mark.parametrize("n", [0, 1, 5, 12])
def test_uniform_loops(nvrtc: Compiler, n: int) -> None:
    got, values, _ = run(nvrtc, "for (int i = 0; i < n; i++) r += a[i] * (b * n - i) + (b / n << i % 3);", n)
    want = [sum(int(values[i]) * (b * n - i) + (b // n << i % 3) for i in range(n)) for b in range(3)]
    assert np.array_equal(got, np.repeat(want, 32).reshape(3, 32))


def test_uniform_branches(nvrtc: Compiler) -> None:
    body = (
        "int f = (b & 1) ? n << 3 : b * 7 - n; if (b > 1) f = ~f; if (t & 1) r = a[t] + f; else r = a[t + f % 3] - f;"
    )
    got, values, _ = run(nvrtc, body, 6)
    for block, f in enumerate((-6, 48, ~(14 - 6))):
        t = np.arange(32)
        remainder = int(np.fmod(f, 3))
        assert np.array_equal(got[block], np.where(t & 1, values[t] + f, values[np.maximum(t + remainder, 0)] - f))


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        ("__reduce_add_sync", lambda x: x.sum()),
        ("__reduce_min_sync", lambda x: x.min()),
        ("__reduce_max_sync", lambda x: x.max()),
        ("__reduce_and_sync", np.bitwise_and.reduce),
        ("__reduce_or_sync", np.bitwise_or.reduce),
        ("__reduce_xor_sync", np.bitwise_xor.reduce),
    ],
)
def test_reductions(nvrtc: Compiler, function: str, reference: Callable[[Array], Any]) -> None:
    got, values, _ = run(nvrtc, f"r = {function}(~0u, a[t + b]);", 0)
    assert [int(row[0]) for row in got] == [int(reference(values[b : b + 32])) for b in range(3)]
    assert (got == got[:, :1]).all()


def test_a_vote_of_part_of_a_warp(nvrtc: Compiler) -> None:
    """Lanes that add to one counter elect a leader among the active lanes of the branch."""
    source = """extern "C" __global__ void k(int* o, const int* a) { if (a[threadIdx.x] > 7) atomicAdd(o, 1); }"""
    values, total = np.arange(32, dtype=np.int32) % 12, np.zeros(1, np.int32)
    report = gpu_emulator.run(nvrtc(source, "sm_80"), "k", 1, 32, [total, values])
    assert "VOTEU.ANY" in report.opcodes
    assert total[0] == (values > 7).sum()


def test_constants_that_are_moved_as_halves(nvrtc: Compiler) -> None:
    """HFMA2.MMA with immediates loads constants without the busy pipes."""
    constants = [0x3F800000, 0x00000001, 0x80000001, 0x40490FDB, 0xFFFF0000, 0x12345678]
    body = "".join(f"if (a[t + {i}] > {i}) r ^= a[t] & {c:#x}; " for i, c in enumerate(constants))
    got, values, _ = run(nvrtc, body + "r += n * b;", 3)
    want = np.zeros(32, np.int64)
    for i, c in enumerate(constants):
        chosen = values[i : i + 32].astype(np.int64) > i
        want ^= np.where(chosen, values[:32].astype(np.int64) & c, 0)
    assert np.array_equal(
        got, np.stack([(want + 3 * b) & 0xFFFFFFFF for b in range(3)]).astype(np.uint32).view(np.int32)
    )


def test_limits_are_the_chips(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* o) { extern __shared__ float s[]; s[0] = 1; o[0] = s[0]; }'
    out = np.zeros(1, np.float32)
    for arch, most in (("sm_70", 96 * 1024), ("sm_80", 163 * 1024)):
        cubin = nvrtc(source, arch)
        report = gpu_emulator.run(cubin, "k", 1, 1, [out], shared=most, max_dynamic_shared=most)
        assert report.chip is gpu_emulator.CHIPS[arch]
        with pytest.raises(gpu_emulator.LaunchError, match=f"the {report.chip.name} has {most}"):
            gpu_emulator.run(cubin, "k", 1, 1, [out], shared=most + 4, max_dynamic_shared=most + 4)


def test_times_are_the_chips(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* o) { o[blockIdx.x * 32 + threadIdx.x] = 1; }'
    out = np.zeros(32 * 200, np.float32)
    old, new = (
        gpu_emulator.run(nvrtc(source, arch), "k", 200, 32, [out]).speed_of_light() for arch in ("sm_70", "sm_80")
    )
    assert old.row("DRAM").ms / new.row("DRAM").ms == pytest.approx(1555 / 900)
    assert gpu_emulator.A100.blocks_per_sm(32, 128, 40 * 1024) == 4
    assert gpu_emulator.V100.blocks_per_sm(32, 128, 40 * 1024) == 2
