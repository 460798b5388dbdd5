"""cp.async (LDGSTS and its groups) and ldmatrix (LDSM) of sm_80: results, counts, and missing waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator

Array = npt.NDArray[Any]
Compiler = Callable[..., bytes]

PRELUDE = """
#define COPY(to, from) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \\
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define FILL(to, from, bytes) asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" \\
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group " #n ";" ::: "memory")
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory")
"""
# Each thread copies sixteen bytes to either buffer, in two groups, then reads a word that another thread copied.
TWO_GROUPS = (
    PRELUDE
    + """
extern "C" __global__ void k(unsigned* o, const unsigned* g) {
  __shared__ __align__(16) unsigned s[2][4 * 64];
  const unsigned t = threadIdx.x, neighbour = t ^ 1, far = (t + 32) % 64;
  COPY(&s[0][4 * t], g + 4 * t);
  COMMIT;
  COPY(&s[1][4 * t], g + 256 + 4 * t);
  COMMIT;
  BODY
}"""
)
MEMORY = np.arange(512, dtype=np.uint32)


def run(nvrtc: Compiler, body: str, threads: int = 64) -> tuple[Array, gpu_emulator.Report]:
    out = np.zeros(threads, np.uint32)
    cubin = nvrtc(TWO_GROUPS.replace("BODY", body), "sm_80")
    return out, gpu_emulator.run(cubin, "k", 1, threads, [out, MEMORY])


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ("WAIT(1); o[t] = s[0][4 * t];", 0),
        ("WAIT(0); o[t] = s[1][4 * t];", 256),
        ("WAIT_ALL; o[t] = s[1][4 * t];", 256),
        ("WAIT(1); __syncwarp(); o[t] = s[0][4 * neighbour];", 0),
        ("WAIT(1); __syncthreads(); o[t] = s[0][4 * far];", 0),
    ],
)
def test_waited_for(nvrtc: Compiler, body: str, first: int) -> None:
    out, report = run(nvrtc, body)
    assert sorted(out) == list(range(first, first + 256, 4))
    copies = [i for i in report.instructions if i.opcode == "LDGSTS"]
    assert [(i.requests, i.sectors, i.lines) for i in copies] == [(2, 32, 8)] * 2
    assert [(i.shared_requests, i.shared_wavefronts, i.conflicts) for i in copies] == [(2, 8, 0)] * 2
    assert report.loads.sectors == 64


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("o[t] = s[0][4 * t];", id="no wait"),
        pytest.param("WAIT(1); o[t] = s[1][4 * t];", id="the wait is for the group before"),
        pytest.param("__syncthreads(); o[t] = s[0][4 * far];", id="a barrier is no wait"),
        pytest.param("if (t < 32) WAIT(0); __syncthreads(); o[t] = s[0][4 * far];", id="the other warp has not waited"),
        pytest.param("s[0][4 * t] = 1;", id="a store meets the copy"),
        pytest.param("COPY(&s[0][4 * t], g); WAIT(0);", id="two copies to one place"),
        pytest.param("WAIT(0); COPY(&s[0][4 * t], g); WAIT(0); o[t] = s[0][4 * t];", id="not in a group"),
    ],
)
def test_not_waited_for(nvrtc: Compiler, body: str) -> None:
    with pytest.raises(gpu_emulator.UnfinishedCopy, match=r"an asynchronous copy of thread \d+ may still write"):
        run(nvrtc, body)


@pytest.mark.parametrize("index", ["neighbour", "far"])
def test_a_wait_orders_nothing_between_threads(nvrtc: Compiler, index: str) -> None:
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, f"WAIT(0); if (t >= 32) o[t] = s[0][4 * {index}];")


def test_a_copy_may_not_overtake_a_read(nvrtc: Compiler) -> None:
    """The next round's copy overwrites data that another warp may still be reading."""
    body = "WAIT(0); __syncthreads(); o[t] = s[0][4 * far]; COPY(&s[0][4 * t], g); WAIT_ALL;"
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, body)


@pytest.mark.parametrize("bytes_left", [0, 3, 4, 8])
def test_zero_fill(nvrtc: Compiler, bytes_left: int) -> None:
    source = """extern "C" __global__ void k(unsigned long long* o, const unsigned long long* g, int n) {
      __shared__ unsigned long long s[32];
      FILL(&s[threadIdx.x], g + threadIdx.x, n); WAIT_ALL; o[threadIdx.x] = s[threadIdx.x]; }"""
    values = np.random.default_rng(0).integers(0, 2**64, 32, np.uint64)
    out = np.zeros(32, np.uint64)
    arguments = [out, values, gpu_emulator.i32(bytes_left)]
    report = gpu_emulator.run(nvrtc(PRELUDE + source, "sm_80"), "k", 1, 32, arguments)
    assert np.array_equal(out, values & np.uint64((1 << 8 * bytes_left) - 1))
    assert report.loads.sectors == (8 if bytes_left else 0)


def test_ignored_sources_are_zeros(nvrtc: Compiler) -> None:
    """Also where the address is outside of every buffer. The machine instruction has the predicate, and no ZFILL."""
    source = """
    extern "C" __global__ void k(unsigned* o, const unsigned* g, int n) {
      __shared__ __align__(16) unsigned s[4 * 32];
      const unsigned* from = threadIdx.x < n ? g + 4 * threadIdx.x : nullptr;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :: "r"((unsigned)__cvta_generic_to_shared(s + 4 * threadIdx.x)), "l"(from),
                      "r"(threadIdx.x < n ? 16 : 0) : "memory");
      WAIT_ALL;
      for (int i = 0; i < 4; i++) o[4 * threadIdx.x + i] = s[4 * threadIdx.x + i];
    }"""
    out, values = np.full(128, 7, np.uint32), np.arange(1, 129, dtype=np.uint32)
    report = gpu_emulator.run(nvrtc(PRELUDE + source, "sm_80"), "k", 1, 32, [out, values, gpu_emulator.i32(10)])
    assert np.array_equal(out, np.where(np.arange(128) < 40, values, 0))
    assert report.loads.sectors == 5


MATRICES = """
extern "C" __global__ void k(unsigned* o, const unsigned* g) {
  __shared__ __align__(16) unsigned s[32 * STRIDE];
  const unsigned t = threadIdx.x;
  for (int i = 0; i < 4; i++) s[STRIDE * t + i] = g[4 * t + i];
  SYNC;
  unsigned r[4] = {}, at = (unsigned)__cvta_generic_to_shared(s + STRIDE * t);
  asm volatile("ldmatrix.sync.aligned.m8n8.COUNT.shared.b16 {LIST}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
  for (int i = 0; i < MATRICES; i++) o[MATRICES * t + i] = r[i];
}"""


def load_matrices(
    nvrtc: Compiler, count: int, transposed: bool, stride: int = 4, sync: str = "__syncwarp()"
) -> tuple[Array, Array, gpu_emulator.Report]:
    """The lanes' results, the expected ones, and the report."""
    rows = np.random.default_rng(count).integers(0, 2**16, (4, 8, 8), np.uint16)
    source = MATRICES.replace("COUNT", f"x{count}" + ".trans" * transposed).replace("MATRICES", str(count))
    source = source.replace("LIST", ",".join(f"%{i}" for i in range(count)))
    source = source.replace("STRIDE", str(stride)).replace("SYNC", sync)
    out = np.zeros((32, count), np.uint32)
    report = gpu_emulator.run(nvrtc(source, "sm_80"), "k", 1, 32, [out, rows.view(np.uint32)])
    matrices = rows.transpose(0, 2, 1) if transposed else rows
    wanted = np.ascontiguousarray(matrices[:count]).view(np.uint32).reshape(count, 32).T
    return out, wanted, report


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(nvrtc: Compiler, count: int, transposed: bool) -> None:
    got, wanted, _ = load_matrices(nvrtc, count, transposed)
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 4), (20, 4), (8, 8), (32, 32)])
def test_bank_conflicts_of_matrices(nvrtc: Compiler, stride: int, wavefronts: int) -> None:
    """A matrix takes one pass if its eight 16-byte rows are in different banks."""
    _, _, report = load_matrices(nvrtc, 4, False, stride)
    (load,) = (i for i in report.instructions if i.opcode == "LDSM")
    assert (load.shared_wavefronts, load.shared_ideal) == (wavefronts, 4)


def test_matrices_are_read_by_the_whole_warp(nvrtc: Compiler) -> None:
    """A lane's row is read by other lanes: without a barrier that is a data race."""
    with pytest.raises(gpu_emulator.SharedRace):
        load_matrices(nvrtc, 4, False, sync="")
