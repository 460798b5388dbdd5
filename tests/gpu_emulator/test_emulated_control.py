"""Divergence, calls, warp-wide exchange, reducing barriers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import gpu_emulator

Compiler = Callable[[str], bytes]


def run(nvrtc: Compiler, source: str, a: np.ndarray, outputs: int, threads: int | None = None) -> np.ndarray:
    out = np.zeros(outputs, np.int32)
    gpu_emulator.run(nvrtc(source), "k", 1, threads or len(a), [out, a])
    return out


def test_switch_jumps_through_a_table(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int i = threadIdx.x, v = a[i];
      switch (v) {
        case 0: v = i * 3; break; case 1: v = i ^ 77; break; case 2: v = o[i] + 5; break;
        case 3: v = a[v]; break; case 4: v = __popc(i); break; case 5: v -= i; break;
        case 6: v = a[i] * a[0]; break; case 7: v = 9999 / (i + 1); break; case 8: v = i << 3; break;
        default: v = -1; }
      o[i] = v; }"""
    a = (np.arange(64) * 7 % 11).astype(np.int32)
    i = np.arange(64)
    cases = [i * 3, i ^ 77, i * 0 + 5, i * 0 + a[3], [int(x).bit_count() for x in i], 5 - i, 6 * a[0] + i * 0]
    cases += [9999 // (i + 1), i << 3, i * 0 - 1, i * 0 - 1]
    np.testing.assert_array_equal(run(nvrtc, source, a, 64), np.choose(a, [np.asarray(c) for c in cases]))


def test_loops_of_different_length_reconverge(nvrtc: Compiler) -> None:
    """After a divergent loop with early exits, the warp must have reconverged for the shuffle."""
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int t = threadIdx.x, steps = 0, v = a[t];
      while (v != 1) { v = v & 1 ? 3 * v + 1 : v / 2; if (++steps > 60) break; }
      if (steps & 1) steps = steps * 5 / (t + 1); else if (t % 3 == 0) steps += a[t] / 3;
      o[t] = steps + 1000 * (__shfl_down_sync(~0u, steps, 1) & 63); }"""
    a = np.arange(1, 33, dtype=np.int32)

    def steps_of(t: int) -> int:
        v, steps = int(a[t]), 0
        while v != 1:
            v = 3 * v + 1 if v & 1 else v // 2
            steps += 1
            if steps > 60:
                break
        if steps & 1:
            return steps * 5 // (t + 1)
        return steps + int(a[t]) // 3 if t % 3 == 0 else steps

    steps = np.array([steps_of(t) for t in range(32)])
    down = np.append(steps[1:], steps[31])
    np.testing.assert_array_equal(run(nvrtc, source, a, 32), steps + 1000 * (down & 63))


def test_calls_recursion_and_function_pointers(nvrtc: Compiler) -> None:
    source = """typedef int (*F)(int, int);
      __device__ __noinline__ int add(int a, int b) { return a + b; }
      __device__ __noinline__ int mul(int a, int b) { return a * b; }
      __device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
      __device__ F table[2] = {add, mul};
      extern "C" __global__ void k(int* o, const int* a) {
        int t = threadIdx.x; o[t] = table[a[t] & 1](a[t], t) + (t & 1 ? fib(t & 7) : 0); }"""
    a = np.arange(5, 37, dtype=np.int32)
    t = np.arange(32)
    fib = np.array([0, 1, 1, 2, 3, 5, 8, 13])
    expected = np.where(a & 1, a * t, a + t) + np.where(t & 1, fib[t & 7], 0)
    np.testing.assert_array_equal(run(nvrtc, source, a, 32), expected)


def test_shuffles(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int t = threadIdx.x, v = a[t] * 10; unsigned m = ~0u;
      o[t] = __shfl_sync(m, v, a[t]); o[32 + t] = __shfl_up_sync(m, v, 3); o[64 + t] = __shfl_down_sync(m, v, 5, 16);
      o[96 + t] = __shfl_xor_sync(m, v, 9); o[128 + t] = __shfl_sync(m, v, 2, 8);
      o[160 + t] = __shfl_up_sync(m, v, 1, 4); }"""
    a = np.random.default_rng(0).permutation(32).astype(np.int32)
    v, t = a * 10, np.arange(32)
    got = run(nvrtc, source, a, 192).reshape(6, 32)
    np.testing.assert_array_equal(got[0], v[a])
    np.testing.assert_array_equal(got[1], np.where(t >= 3, np.roll(v, 3), v))
    np.testing.assert_array_equal(got[2], np.where(t % 16 + 5 < 16, np.roll(v, -5), v))
    np.testing.assert_array_equal(got[3], v[t ^ 9])
    np.testing.assert_array_equal(got[4], v[t // 8 * 8 + 2])
    np.testing.assert_array_equal(got[5], np.where(t % 4 >= 1, np.roll(v, 1), v))


def test_votes_and_matches(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int t = threadIdx.x, v = a[t], all;
      o[t] = __any_sync(~0u, v > 8) + 2 * __all_sync(~0u, v >= 0) + 4 * __all_sync(~0u, v > 0);
      o[32 + t] = __ballot_sync(~0u, v > 3); o[64 + t] = __match_any_sync(~0u, v);
      o[96 + t] = __match_all_sync(~0u, v / 100, &all) + all; o[128 + t] = __activemask();
      if (v & 1) o[160 + t] = __ballot_sync(__activemask(), v > 5); }"""
    a = (np.arange(32) * 5 % 10).astype(np.int32)
    got = run(nvrtc, source, a, 192).view(np.uint32).reshape(6, 32)
    bits = lambda mask: int(sum(1 << i for i in np.flatnonzero(mask)))  # noqa: E731
    assert set(got[0]) == {1 * (a > 8).any() + 2}
    assert set(got[1]) == {bits(a > 3)}
    assert got[2].tolist() == [bits(a == v) for v in a]
    assert set(got[3]) == {0}  # all ones, plus the predicate
    assert set(got[4]) == {0xFFFFFFFF}
    assert got[5].tolist() == [bits((a > 5) & (a % 2 == 1)) if v & 1 else 0 for v in a]


def test_reducing_barriers(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int t = threadIdx.x, n = blockDim.x, v = a[t];
      o[t] = __syncthreads_or(v == 7); o[n + t] = __syncthreads_and(v < 200); o[2 * n + t] = __syncthreads_count(v & 1);
      o[3 * n + t] = __syncthreads_or(v == 777) + 2 * __syncthreads_and(v < 100); }"""
    a = np.arange(160, dtype=np.int32)
    got = run(nvrtc, source, a, 640).reshape(4, 160)
    assert [set(row) for row in got] == [{1}, {1}, {80}, {0}]


def test_partial_last_warp(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o, const int* a) {
      __shared__ int s[64]; int t = threadIdx.x; s[t] = a[t]; __syncthreads(); o[t] = s[blockDim.x - 1 - t]; }"""
    a = np.arange(45, dtype=np.int32)
    np.testing.assert_array_equal(run(nvrtc, source, a, 45), a[::-1])


def test_block_and_grid_indices(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(int* o) {
      int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      int n = blockDim.x * blockDim.y * blockDim.z;
      o[b * n + t] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * b; }"""
    out = np.zeros(2 * 3 * 4 * 5 * 6 * 7, np.int32)
    gpu_emulator.run(nvrtc(source), "k", (2, 3, 4), (5, 6, 7), [out], check_global=True)
    z, y, x = np.meshgrid(np.arange(7), np.arange(6), np.arange(5), indexing="ij")
    expected = 1000 * np.arange(24)[:, None] + (x + 10 * y + 100 * z).ravel()
    np.testing.assert_array_equal(out.reshape(24, -1), expected)


def test_trap(nvrtc: Compiler) -> None:
    source = (
        'extern "C" __global__ void k(int* o, const int* a) { if (a[threadIdx.x] == 9) __trap(); o[threadIdx.x] = 1; }'
    )
    with pytest.raises(gpu_emulator.Trap) as caught:
        run(nvrtc, source, np.arange(32, dtype=np.int32), 32)
    assert caught.value.thread == 9


def test_spinning_lanes_let_the_holder_proceed(nvrtc: Compiler) -> None:
    """A lock taken lane by lane within a warp: forward progress needs independent threads."""
    source = """extern "C" __global__ void k(int* o, const int* a) {
      int* lock = o; volatile int* sum = o + 1; bool done = false;
      while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
          *sum = *sum + a[threadIdx.x]; __threadfence(); atomicExch(lock, 0); done = true; } } }"""
    a = np.arange(64, dtype=np.int32)
    out = run(nvrtc, source, a, 2)
    assert out.tolist() == [0, a.sum()]


def test_endless_loop_hits_the_limit(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(volatile int* o) { while (o[0] == 0) {} }'
    with pytest.raises(gpu_emulator.InstructionLimit):
        gpu_emulator.run(nvrtc(source), "k", 1, 32, [np.zeros(1, np.int32)], max_instructions=3_000_000)


def test_warps_that_wait_for_each_other_through_memory(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(volatile int* o) {
      if (threadIdx.x < 32) { while (o[0] == 0) {} o[1 + threadIdx.x] = o[0]; }
      else if (threadIdx.x == 32) o[0] = 5; }"""
    out = np.zeros(33, np.int32)
    gpu_emulator.run(nvrtc(source), "k", 1, 64, [out])
    assert set(out) == {5}


def test_clock_moves_on(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(long long* o) { long long a = clock64(); o[0] = a;
      __threadfence(); o[1] = clock64(); __nanosleep(10); }"""
    out = np.zeros(2, np.int64)
    gpu_emulator.run(nvrtc(source), "k", 1, 1, [out])
    assert out[1] > out[0] >= 0
