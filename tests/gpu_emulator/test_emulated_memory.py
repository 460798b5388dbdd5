"""Addresses: bounds, alignment, widths, atomics, constants, stack, several launches, very large buffers."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable

import numpy as np
import pytest

import gpu_emulator

Compiler = Callable[[str], bytes]

COPY = """extern "C" __global__ void copy(float* o, const float* x, int n, int shift) {
  int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) o[i] = x[i + shift]; }"""


def test_out_of_bounds_load(nvrtc: Compiler) -> None:
    x, out = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    with pytest.raises(gpu_emulator.OutOfBounds) as caught:
        gpu_emulator.run(nvrtc(COPY), "copy", 4, 32, [out, x, gpu_emulator.i32(100), gpu_emulator.i32(1)])
    fault = caught.value
    assert (fault.block, fault.thread) == ((3, 0, 0), 3)
    assert fault.address == x.ctypes.data + 400
    assert "0 bytes past the end" in fault.message
    assert "LDG" in fault.sass
    assert f"0x{fault.pc:04x}" in str(fault)


def test_out_of_bounds_store(nvrtc: Compiler) -> None:
    x, out = np.arange(128, dtype=np.float32), np.zeros(120, np.float32)
    with pytest.raises(gpu_emulator.OutOfBounds) as caught:
        gpu_emulator.run(nvrtc(COPY), "copy", 1, 128, [out, x, gpu_emulator.i32(128), gpu_emulator.i32(0)])
    assert "STG" in caught.value.sass
    assert caught.value.thread == 120


def test_out_of_bounds_before_the_start(nvrtc: Compiler) -> None:
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    with pytest.raises(gpu_emulator.OutOfBounds, match="bytes"):
        gpu_emulator.run(nvrtc(COPY), "copy", 1, 32, [out, x, gpu_emulator.i32(32), gpu_emulator.i32(-100000)])


def test_vector_access_must_fit_as_a_whole(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float4* o, const float4* x) { o[threadIdx.x] = x[threadIdx.x]; }'
    x, out = np.zeros(34, np.float32)[:30], np.zeros(32, np.float32)
    with pytest.raises(gpu_emulator.OutOfBounds) as caught:
        gpu_emulator.run(nvrtc(source), "k", 1, 8, [out, x])
    assert caught.value.thread == 7


def test_misaligned_load(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float4* o, const float* x, int s) {
      o[threadIdx.x] = *(const float4*)(x + 4 * threadIdx.x + s); }"""
    x, out = np.arange(256, dtype=np.float32), np.zeros(128, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, x, gpu_emulator.i32(4)])
    np.testing.assert_array_equal(out, x[4:132])
    with pytest.raises(gpu_emulator.Misaligned) as caught:
        gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, x, gpu_emulator.i32(1)])
    assert caught.value.address == x.ctypes.data + 4


def test_shared_out_of_bounds(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float* o, int n) { extern __shared__ float s[];
      s[threadIdx.x + n] = 1; __syncthreads(); o[threadIdx.x] = s[threadIdx.x + n]; }"""
    out = np.zeros(32, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, gpu_emulator.i32(32)], shared=256)
    with pytest.raises(gpu_emulator.OutOfBounds, match="shared"):
        gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, gpu_emulator.i32(33)], shared=256)


def test_narrow_types(nvrtc: Compiler) -> None:
    source = """typedef signed char byte;
    extern "C" __global__ void k(int* o, const byte* a, const unsigned short* b, byte* c, short* d) {
      int t = threadIdx.x; o[t] = a[t] * b[t]; c[t] = (byte)(a[t] + 1); d[t] = (short)(b[t] * 3); }"""
    a, b = np.arange(-16, 16, dtype=np.int8), np.arange(65000, 65032, dtype=np.uint16)
    o, c, d = np.zeros(32, np.int32), np.zeros(32, np.int8), np.zeros(32, np.int16)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [o, a, b, c, d])
    np.testing.assert_array_equal(o, a.astype(np.int32) * b)
    np.testing.assert_array_equal(c, a + 1)
    np.testing.assert_array_equal(d, (b.astype(np.int32) * 3).astype(np.int16))


ATOMICS = """extern "C" __global__ void k(int* o, float* f, unsigned long long* w, double* d, int* r) {
  __shared__ int s[8]; __shared__ float sf; __shared__ unsigned long long sw;
  int t = threadIdx.x;
  if (t < 8) s[t] = 0;
  if (t == 0) { sf = 0; sw = 0; }
  __syncthreads();
  atomicAdd(o, t); atomicMax(o + 1, t); atomicMin(o + 2, -t); atomicOr(o + 3, 1 << (t & 31)); atomicXor(o + 4, t);
  atomicAnd(o + 5, ~(1 << (t & 7))); r[t] = atomicAdd(o + 6, 1); atomicInc((unsigned*)o + 7, 9);
  atomicDec((unsigned*)o + 8, 9); atomicCAS(o + 9, 0, 42); atomicExch(o + 10, 5); atomicSub(o + 11, 2);
  atomicAdd(f, 0.5f); f[1 + t] = atomicAdd(f + 200, 1.0f);
  atomicAdd(w, 1ull << 33); atomicMax(w + 1, (unsigned long long)t << 40);
  atomicCAS(w + 2, 0ull, 1ull << 50); atomicAdd(d, 0.25);
  atomicAdd(s, t); atomicMax(s + 1, t); atomicMin(s + 2, -t); atomicExch(s + 3, 9); atomicCAS(s + 4, 0, 3);
  atomicAdd(&sf, 1.5f); atomicAdd(&sw, 1ull << 35); r[200 + t] = atomicAdd(s + 5, 2);
  __syncthreads();
  if (t < 6) o[16 + t] = s[t];
  if (t == 0) { f[201] = sf; w[3] = sw; } }"""


def test_atomics(nvrtc: Compiler) -> None:
    n = 96
    o, f, w, d = np.zeros(32, np.int32), np.zeros(256, np.float32), np.zeros(8, np.uint64), np.zeros(1)
    o[5] = -1
    r = np.zeros(400, np.int32)
    gpu_emulator.run(nvrtc(ATOMICS), "k", 1, n, [o, f, w, d, r])
    t = np.arange(n)
    xor = int(np.bitwise_xor.reduce(t))
    assert o[:12].tolist() == [t.sum(), n - 1, -(n - 1), -1, xor, ~0xFF, n, n % 10, (10 - n % 10) % 10, 42, 5, -2 * n]
    assert sorted(r[:n]) == list(range(n))
    assert sorted(r[200 : 200 + n]) == list(range(0, 2 * n, 2))
    assert o[16:22].tolist() == [t.sum(), n - 1, -(n - 1), 9, 3, 2 * n]
    assert f[0] == n / 2
    assert sorted(f[1 : n + 1]) == list(range(n))
    assert f[201] == 1.5 * n
    assert w[:4].tolist() == [n << 33, (n - 1) << 40, 1 << 50, n << 35]
    assert d[0] == n / 4


def test_constant_memory_and_indexed_parameters(nvrtc: Compiler) -> None:
    source = """__constant__ float table[8] = {1, 2, 4, 8, 16, 32, 64, 128};
      struct Strides { long long s[8]; int count; };
      extern "C" __global__ void k(long long* o, float* f, Strides p, int which) {
        int t = threadIdx.x; f[t] = table[t % 8]; o[t] = p.s[(t + which) & 7] * p.count; }"""

    class Strides(ctypes.Structure):
        _fields_ = [("s", ctypes.c_int64 * 8), ("count", ctypes.c_int32)]

    strides = Strides((ctypes.c_int64 * 8)(*(10**12 + i for i in range(8))), 3)
    o, f = np.zeros(32, np.int64), np.zeros(32, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [o, f, strides, gpu_emulator.i32(5)])
    t = np.arange(32)
    np.testing.assert_array_equal(o, 3 * (10**12 + (t + 5) % 8))
    np.testing.assert_array_equal(f, 2.0 ** (t % 8))


def test_pointer_inside_a_structure(nvrtc: Compiler) -> None:
    source = """struct View { float* data; long long stride; float scale; };
      extern "C" __global__ void k(View v) { v.data[threadIdx.x * v.stride] *= v.scale; }"""

    class View(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("scale", ctypes.c_float)]

    x = np.ones(96, np.float32)
    view = View(x.ctypes.data, 3, 2.0)
    with pytest.raises(gpu_emulator.OutOfBounds, match="no buffer"):
        gpu_emulator.run(nvrtc(source), "k", 1, 32, [view])
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [view], extra_buffers=[x])
    assert x.tolist() == [2.0, 1.0, 1.0] * 32


def test_stack_and_calls(nvrtc: Compiler) -> None:
    source = """__device__ __noinline__ int mix(int* t, int n) {
        int s = 0; for (int i = 0; i < n; i++) s = s * 31 + t[i]; return s; }
      extern "C" __global__ void k(int* o, const int* a, int n) {
        int t[64]; int i = threadIdx.x;
        for (int j = 0; j < 64; j++) t[j] = a[j];
        for (int j = 0; j < n; j++) t[(a[j] + i) & 63] += j;
        o[i] = mix(t, n) + t[i]; }"""
    rng = np.random.default_rng(3)
    a, out = rng.integers(0, 1000, 64).astype(np.int32), np.zeros(32, np.int32)
    cubin = nvrtc(source)
    assert gpu_emulator.resources(cubin, "k").frame_bytes >= 256
    report = gpu_emulator.run(cubin, "k", 1, 32, [out, a, gpu_emulator.i32(40)])
    assert report.local.requests > 0
    for i in range(32):
        t = a.astype(object).tolist()
        for j in range(40):
            t[(a[j] + i) & 63] += j
        s = 0
        for v in t[:40]:
            s = s * 31 + int(v)
        assert int(out[i]) & 0xFFFFFFFF == (s + int(t[i])) & 0xFFFFFFFF


def test_generic_pointers(nvrtc: Compiler) -> None:
    source = """extern "C" __global__ void k(float* o, const float* x, int n) {
      __shared__ float s[32]; int t = threadIdx.x;
      s[t] = x[t] * 2; __syncthreads();
      const float* p = (t + n) & 1 ? s : x; o[t] = p[31 - t] + (__isShared(p) ? 1000 : 0); }"""
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, x, gpu_emulator.i32(0)])
    expected = np.where(np.arange(32) & 1, 2 * x[::-1] + 1000, x[::-1])
    np.testing.assert_array_equal(out, expected)


def test_global_variables_live_as_long_as_the_device(nvrtc: Compiler) -> None:
    source = """__device__ int counter = 5; __device__ float scratch[32];
      extern "C" __global__ void k(int* o, float* f) {
        int t = threadIdx.x; f[t] = scratch[t]; scratch[t] = t; if (t == 0) o[0] = counter++; }"""
    cubin, device = nvrtc(source), gpu_emulator.Device()
    o, f = np.zeros(1, np.int32), np.full(32, np.nan, np.float32)
    for expected in (5, 6, 7):
        device.run(cubin, "k", 1, 32, [o, f])
        assert o[0] == expected
    np.testing.assert_array_equal(f, np.arange(32))
    assert device.launches == 3
    gpu_emulator.Device().run(cubin, "k", 1, 32, [o, f])
    assert o[0] == 5


def test_several_launches_on_one_memory(nvrtc: Compiler) -> None:
    source = 'extern "C" __global__ void k(float* x, float by) { x[threadIdx.x] = x[threadIdx.x] * by + 1; }'
    x, cubin = np.ones(64, np.float32), nvrtc(source)
    for _ in range(3):
        gpu_emulator.run(cubin, "k", 1, 64, [x, gpu_emulator.f32(2)])
    assert (x == 15).all()


def test_sparse_buffer_of_many_gigabytes(nvrtc: Compiler) -> None:
    """Offsets past 2**32 elements; only touched memory is allocated."""
    source = """extern "C" __global__ void k(float* x, long long stride) {
      long long i = (blockIdx.x * 32ll + threadIdx.x) * stride; x[i] = x[i] + i % 1000; }"""
    x = gpu_emulator.sparse(5 * 2**30, np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stride = 2**27 + 5
    report = gpu_emulator.run(nvrtc(source), "k", 1, 32, [x, gpu_emulator.i64(stride)], check_global=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    at = np.arange(32, dtype=np.int64) * stride
    np.testing.assert_array_equal(x[at], (at % 1000).astype(np.float32))
    assert report.loads.sectors == 32
    with pytest.raises(gpu_emulator.OutOfBounds):
        gpu_emulator.run(nvrtc(source), "k", 2, 32, [x, gpu_emulator.i64(stride)])


def test_strided_views_and_tensors(nvrtc: Compiler) -> None:
    torch = pytest.importorskip("torch")
    source = (
        'extern "C" __global__ void k(float* o, const float* x, int s) { o[threadIdx.x] = x[(int)threadIdx.x * s]; }'
    )
    base = torch.arange(256, dtype=torch.float32)
    out = torch.zeros(32)
    # A tensor argument passes its whole storage: strides are up to the kernel, and a view may read before its start.
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [out, base[255:], gpu_emulator.i32(-8)])
    assert out.tolist() == list(range(255, -1, -8))
    array = np.arange(256, dtype=np.float32)
    reverse = array[::-8]
    result = np.zeros(32, np.float32)
    gpu_emulator.run(nvrtc(source), "k", 1, 32, [result, reverse, gpu_emulator.i32(-8)])
    np.testing.assert_array_equal(result, reverse)
    with pytest.raises(gpu_emulator.OutOfBounds):
        gpu_emulator.run(nvrtc(source), "k", 1, 32, [result, array[:200], gpu_emulator.i32(8)])
