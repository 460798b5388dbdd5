"""Planted faults are found; their repaired versions pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import gpu_emulator

Compiler = Callable[[str], bytes]


def kernel(body: str, size: int = 256, kind: str = "float") -> str:
    return f"""extern "C" __global__ void k({kind}* out, const {kind}* in, int n) {{
      __shared__ {kind} s[{size}];
      int t = threadIdx.x, lane = t % 32;
      (void)lane;
      {body} }}"""


def run(nvrtc: Compiler, source: str, threads: int = 256, n: int = 1, **options: bool) -> np.ndarray:
    x = np.arange(threads, dtype=np.float32)
    out = np.full(threads, np.nan, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, threads, [out, x, gpu_emulator.i32(n)], **options)
    return out


REVERSE = "s[t] = in[t]; {sync} out[t] = s[{n} - 1 - t];"


def test_missing_block_barrier(nvrtc: Compiler) -> None:
    # The first warp reads memory that was never written.
    with pytest.raises(gpu_emulator.UninitialisedShared) as caught:
        run(nvrtc, kernel(REVERSE.format(sync="", n=256)))
    assert "LDS" in caught.value.sass
    # With an earlier value in place, the race itself is reported.
    with pytest.raises(gpu_emulator.SharedRace) as race:
        run(nvrtc, kernel("s[t] = 0; __syncthreads(); " + REVERSE.format(sync="", n=256)))
    assert race.value.thread is not None
    assert race.value.other_thread is not None
    assert race.value.other_thread // 32 != race.value.thread // 32
    np.testing.assert_array_equal(
        run(nvrtc, kernel(REVERSE.format(sync="__syncthreads();", n=256))), np.arange(256, dtype=np.float32)[::-1]
    )


def test_missing_warp_barrier(nvrtc: Compiler) -> None:
    """Lockstep does not order accesses: Volta schedules threads independently."""
    with pytest.raises(gpu_emulator.SharedRace) as caught:
        run(nvrtc, kernel("volatile float* v = s; v[t] = in[t]; out[t] = v[t ^ 1];"), threads=32)
    assert caught.value.block == (0, 0, 0)
    assert caught.value.other_thread == (caught.value.thread or 0) ^ 1


def test_warp_barrier_orders_a_warp(nvrtc: Compiler) -> None:
    out = run(nvrtc, kernel("s[t] = in[t]; __syncwarp(); out[t] = s[t ^ 1];"))
    np.testing.assert_array_equal(out, np.arange(256, dtype=np.float32).reshape(-1, 2)[:, ::-1].ravel())


def test_warp_barrier_does_not_order_the_block(nvrtc: Compiler) -> None:
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, kernel("s[t] = 0; __syncthreads(); s[t] = in[t]; __syncwarp(); out[t] = s[t ^ 32];"))


def test_partial_warp_barrier(nvrtc: Compiler) -> None:
    """A barrier of half a warp orders that half only."""
    half = """s[t] = in[t]; if (lane < 16) {{ __syncwarp(0xffffu); out[t] = s[{other}]; }}
      else {{ __syncwarp(0xffff0000u); out[t] = s[{other}] + in[0]; }}"""
    out = run(nvrtc, kernel(half.format(other="(t & 16) | (15 - (t & 15))")), threads=32)
    np.testing.assert_array_equal(out[:16], np.arange(16, dtype=np.float32)[::-1])
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, kernel(half.format(other="t ^ 16")), threads=32)


def test_write_after_read(nvrtc: Compiler) -> None:
    body = "s[t] = in[t]; __syncthreads(); float v = s[255 - t]; {sync} s[t] = v; __syncthreads(); out[t] = s[t];"
    with pytest.raises(gpu_emulator.SharedRace, match="no barrier orders them"):
        run(nvrtc, kernel(body.format(sync="")))
    run(nvrtc, kernel(body.format(sync="__syncthreads();")))


def test_race_only_in_a_later_iteration(nvrtc: Compiler) -> None:
    """A single-buffered loop without its second barrier."""
    body = """float sum = 0;
      for (int i = 0; i < n; i++) {{ s[t] = in[t] + i; __syncthreads(); sum += s[(t + 37) % 256]; {sync} }}
      out[t] = sum;"""
    run(nvrtc, kernel(body.format(sync="")), n=1)
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, kernel(body.format(sync="")), n=2)
    run(nvrtc, kernel(body.format(sync="__syncthreads();")), n=3)


def test_two_writers_in_one_instruction(nvrtc: Compiler) -> None:
    body = "s[t / 2] = {value}; __syncthreads(); out[t] = s[t / 2];"
    with pytest.raises(gpu_emulator.SharedRace, match="different values"):
        run(nvrtc, kernel(body.format(value="in[t]")), threads=32)
    run(nvrtc, kernel(body.format(value="in[t / 2]")), threads=32)


def test_own_data_needs_no_barrier(nvrtc: Compiler) -> None:
    run(nvrtc, kernel("volatile float* v = s; v[t] = in[t]; v[t] = v[t] + 1; out[t] = v[t];"))


def test_shared_reads_do_not_race(nvrtc: Compiler) -> None:
    run(nvrtc, kernel("if (t < 32) s[t] = in[t]; __syncthreads(); out[t] = s[lane] + s[31 - lane];"))


def test_neighbouring_bytes_do_not_race(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(unsigned char* out, const unsigned char* in) {
      __shared__ unsigned char s[256]; int t = threadIdx.x;
      s[t] = in[t]; __syncthreads(); out[t] = s[255 - t]; }"""
    x, out = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    gpu_emulator.run(nvrtc(source), "k", 1, 256, [out, x])
    np.testing.assert_array_equal(out, x[::-1])


def test_shuffle_and_vote_order_a_warp(nvrtc: Compiler) -> None:
    # The index depends on the exchange, or the compiler would move the load before it.
    body = "volatile float* v = s; v[t] = in[t]; {sync} out[t] = v[k];"
    out = run(nvrtc, kernel(body.format(sync="int k = __shfl_xor_sync(~0u, (int)v[t], 1);")), threads=32)
    np.testing.assert_array_equal(out, np.arange(32, dtype=np.float32).reshape(-1, 2)[:, ::-1].ravel())
    run(nvrtc, kernel(body.format(sync="int k = t ^ (__ballot_sync(~0u, v[t] > 5) & 1 ? 2 : 1);")), threads=32)
    with pytest.raises(gpu_emulator.SharedRace):  # __activemask() synchronises nothing
        run(nvrtc, kernel(body.format(sync="int k = t ^ (__activemask() & 1);")), threads=32)


def test_uninitialised_read_is_named(nvrtc: Compiler) -> None:
    with pytest.raises(gpu_emulator.UninitialisedShared) as caught:
        run(nvrtc, kernel("if (t != 100) s[t] = in[t]; __syncthreads(); out[t] = s[t];"))
    assert caught.value.address == 400
    assert caught.value.thread == 100


def test_checks_can_be_switched_off(nvrtc: Compiler) -> None:
    run(nvrtc, kernel("volatile float* v = s; v[t] = in[t]; out[t] = v[t ^ 1];"), threads=32, check=False)


@pytest.mark.parametrize("ordered", [True, False])
def test_named_barriers(nvrtc: Compiler, ordered: bool) -> None:
    """Producers arrive, consumers wait: bar.arrive releases, bar.sync acquires."""
    arrive = 'asm volatile("bar.arrive 1, 128;" ::: "memory");'
    wait = 'asm volatile("bar.sync 1, 128;" ::: "memory");' if ordered else ""
    body = f"""if (t < 64) {{ s[t] = in[t]; __threadfence_block(); {arrive} }}
      else {{ {wait} out[t] = s[127 - t]; }}"""
    if ordered:
        out = run(nvrtc, kernel(body), threads=128)
        np.testing.assert_array_equal(out[64:], np.arange(64, dtype=np.float32)[::-1])
    else:
        with pytest.raises((gpu_emulator.SharedRace, gpu_emulator.UninitialisedShared)):
            run(nvrtc, kernel(body), threads=128)


def test_arriving_is_not_waiting(nvrtc: Compiler) -> None:
    """A producer that overwrites its data after bar.arrive races with the consumers' reads."""
    body = """volatile float* v = s;
      if (t < 32) { v[t] = in[t]; asm volatile("bar.arrive 1, 64;" ::: "memory"); v[t] = 7; }
      else { asm volatile("bar.sync 1, 64;" ::: "memory"); out[t] = v[63 - t]; }"""
    with pytest.raises(gpu_emulator.SharedRace):
        run(nvrtc, kernel(body), threads=64)


def test_double_buffered_pipeline_with_named_barriers(nvrtc: Compiler) -> None:
    """Warp-specialised, with full/empty barriers per buffer over several rounds: no fault."""
    body = """const int rounds = 6; float sum = 0;
      if (t < 32) {
        for (int i = 0; i < rounds; i++) { int b = i & 1;
          if (i >= 2) asm volatile("bar.sync %0, 96;" :: "r"(3 + b) : "memory");
          s[b * 32 + t] = in[t] + i;
          asm volatile("bar.arrive %0, 96;" :: "r"(1 + b) : "memory"); }
      } else {
        for (int i = 0; i < rounds; i++) { int b = i & 1;
          asm volatile("bar.sync %0, 96;" :: "r"(1 + b) : "memory");
          sum += s[b * 32 + 31 - lane];
          if (i + 2 < rounds) asm volatile("bar.arrive %0, 96;" :: "r"(3 + b) : "memory"); }
        out[t] = sum; }"""
    out = run(nvrtc, kernel(body), threads=96)
    expected = 6 * np.arange(32, dtype=np.float32)[::-1] + 15
    np.testing.assert_array_equal(out[32:], np.concatenate([expected, expected]))


def test_divergent_barrier(nvrtc: Compiler) -> None:
    # The second barrier keeps the other half from exiting, which would count as arriving.
    body = "s[t] = in[t]; if (lane < 16) { __syncthreads(); s[t] += 1; } __syncthreads(); out[t] = s[t ^ 1];"
    with pytest.raises((gpu_emulator.DivergentBarrier, gpu_emulator.Deadlock)) as caught:
        run(nvrtc, kernel(body))
    assert caught.value.kernel == "k"


def test_barriers_in_both_branches_of_a_warp(nvrtc: Compiler) -> None:
    body = "if (lane < 16) { out[t] = 1; __syncthreads(); } else { out[t] = 2; __syncthreads(); out[t] += in[0]; }"
    with pytest.raises(gpu_emulator.DivergentBarrier):
        run(nvrtc, kernel(body))


def test_barrier_that_a_warp_never_reaches(nvrtc: Compiler) -> None:
    body = 'if (t < 64) asm volatile("bar.sync 1, 128;" ::: "memory"); out[t] = in[t];'
    with pytest.raises(gpu_emulator.Deadlock, match="barrier 1"):
        run(nvrtc, kernel(body), threads=128)


def test_exited_warps_count_as_arrived(nvrtc: Compiler) -> None:
    """As on hardware, an exited warp does not hold up __syncthreads()."""
    out = run(nvrtc, kernel("if (t >= 64) return; s[t] = in[t]; __syncthreads(); out[t] = s[63 - t];"), threads=128)
    np.testing.assert_array_equal(out[:64], np.arange(64, dtype=np.float32)[::-1])


def test_global_double_store(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* o, int n) { o[(blockIdx.x * 32 + threadIdx.x) % n] = 1; }'
    out = np.zeros(64, np.float32)
    cubin = nvrtc(source)
    gpu_emulator.run(cubin, "k", 2, 32, [out, gpu_emulator.i32(64)], check_global=True)
    gpu_emulator.run(cubin, "k", 2, 32, [out, gpu_emulator.i32(60)])
    with pytest.raises(gpu_emulator.GlobalRace, match="thread 0 of block 0"):
        gpu_emulator.run(cubin, "k", 2, 32, [out, gpu_emulator.i32(60)], check_global=True)


def test_global_read_of_another_blocks_store(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float* o) {
      o[blockIdx.x] = 1; if (blockIdx.x) o[2] = o[blockIdx.x - 1]; }"""
    with pytest.raises(gpu_emulator.GlobalRace, match="load"):
        gpu_emulator.run(nvrtc(source), "k", 2, 1, [np.zeros(4, np.float32)], check_global=True)
