"""Arithmetic instructions against numpy, over random and edge values.

Each table line is a C expression of the inputs and its numpy equivalent; a table becomes one kernel.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator

Array = npt.NDArray[Any]
Table = list[tuple[str, str, Callable[..., Any]]]
Compiler = Callable[[str], bytes]

U32 = np.array(
    [0, 1, 2, 3, 7, 31, 32, 33, 127, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFF0000, 0xFFFFFFFF], np.uint32
)
U64 = np.array(
    [0, 1, 5, 0xFFFFFFFF, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**15 + 7], np.uint64
)
F32 = np.array(
    [
        *(
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            2.5,
            -2.5,
            3.75,
            1e-3,
            1e10,
            -1e10,
            2.0**31,
            2.0**32,
            1e30,
            1e-38,
            1e-44,
            3e38,
        ),
        *(np.inf, -np.inf, np.nan),
    ],
    np.float32,
)
THREADS = 128


def crossed(values: Array, random: Array) -> tuple[Array, Array]:
    """All pairs of edge values, then random pairs, padded to whole warps."""
    a = np.concatenate([np.repeat(values, len(values)), random])
    b = np.concatenate([np.tile(values, len(values)), np.roll(random, 17)])
    fill = -len(a) % 32
    return np.concatenate([a, a[:fill]]), np.concatenate([b, b[:fill]])


def run_table(
    nvrtc: Compiler, declarations: str, inputs: dict[str, Array], table: Table, helper: str = ""
) -> list[Array]:
    """Runs every expression over the inputs; returns one array per line."""
    n = len(next(iter(inputs.values())))
    ctype = {
        "u4": "unsigned",
        "i4": "int",
        "u8": "unsigned long long",
        "i8": "long long",
        "f4": "float",
        "f8": "double",
    }
    ctype |= {"u2": "unsigned short", "i2": "short", "u1": "unsigned char", "i1": "signed char"}
    outputs = [np.zeros(n, kind) for kind, _, _ in table]
    params = [f"const {ctype[v.dtype.str[1:]]}* in_{k}" for k, v in inputs.items()]
    params += [f"{ctype[kind]}* o{i}" for i, (kind, _, _) in enumerate(table)]
    loads = "".join(f"{ctype[v.dtype.str[1:]]} {k} = in_{k}[i];\n" for k, v in inputs.items())
    stores = "".join(f"o{i}[i] = {expression};\n" for i, (_, expression, _) in enumerate(table))
    source = f"""{helper}
    extern "C" __global__ void table({", ".join(params)}, int n) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      {loads}{declarations}
      {stores} }}"""
    gpu_emulator.run(
        nvrtc(source), "table", -(-n // THREADS), THREADS, [*inputs.values(), *outputs, gpu_emulator.i32(n)]
    )
    return outputs


def check(
    nvrtc: Compiler, inputs: dict[str, Array], table: Table, declarations: str = "", helper: str = "", ulps: int = 0
) -> None:
    outputs = run_table(nvrtc, declarations, inputs, table, helper)
    for (kind, expression, reference), got in zip(table, outputs, strict=True):
        with np.errstate(all="ignore"):
            want = np.asarray(reference(*inputs.values())).astype(kind)
        if kind.startswith("f"):
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            if ulps:
                with np.errstate(all="ignore"):
                    same |= np.abs(got - want) <= ulps * np.spacing(np.abs(want))
        else:
            same = got == want
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            values = {k: v[at] for k, v in inputs.items()}
            pytest.fail(f"{expression} at {values}: {got[at]!r}, expected {want[at]!r} ({(~same).sum()} differ)")


def signed(x: Array) -> Array:
    return x.view(np.int64 if x.dtype == np.uint64 else np.int32)


def trunc_div(a: Array, b: Array) -> Array:
    q = np.abs(a.astype(object)) // np.abs(b.astype(object))
    return np.where((a < 0) != (b < 0), -q, q)


def wrap(values: Any, bits: int) -> Array:
    return np.array([int(v) & ((1 << bits) - 1) for v in values], f"u{bits // 8}")


@pytest.fixture
def words(rng: np.random.Generator) -> dict[str, Array]:
    a, b = crossed(U32, rng.integers(0, 2**32, 300, np.uint32))
    return {"a": a, "b": b, "c": np.roll(b, 5)}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_integer_32(nvrtc: Compiler, words: dict[str, Array]) -> None:
    table: Table = [
        ("u4", "a + b - c", lambda a, b, c: a + b - c),
        ("u4", "a * b + c", lambda a, b, c: a * b + c),
        ("u4", "a & b | c", lambda a, b, c: a & b | c),
        ("u4", "(a ^ b) & ~c", lambda a, b, c: (a ^ b) & ~c),
        ("u4", "(a & b) ^ (c | ~a)", lambda a, b, c: (a & b) ^ (c | ~a)),
        ("u4", "a << (b & 31)", lambda a, b, c: a << (b & 31)),
        ("u4", "a >> (b & 31)", lambda a, b, c: a >> (b & 31)),
        ("i4", "(int)a >> (b & 31)", lambda a, b, c: signed(a) >> (b & 31).astype(np.int32)),
        ("i4", "min((int)a, (int)b)", lambda a, b, c: np.minimum(signed(a), signed(b))),
        ("u4", "max(a, b)", lambda a, b, c: np.maximum(a, b)),
        ("u4", "__umulhi(a, b)", lambda a, b, c: (a.astype(np.uint64) * b) >> 32),
        ("i4", "__mulhi((int)a, (int)b)", lambda a, b, c: (signed(a).astype(np.int64) * signed(b)) >> 32),
        ("u4", "(int)a < (int)b ? c : 7u", lambda a, b, c: np.where(signed(a) < signed(b), c, 7)),
        ("u4", "(a < b) + 2 * (a == c) + 4 * (b >= c)", lambda a, b, c: (a < b) + 2 * (a == c) + 4 * (b >= c)),
        ("u4", "abs((int)a)", lambda a, b, c: np.where(signed(a) < 0, 0 - a, a)),
        ("u4", "__sad((int)a, (int)b, c)", lambda a, b, c: np.where(signed(a) < signed(b), b - a, a - b) + c),
        ("u4", "a * 4 + b", lambda a, b, c: a * 4 + b),
    ]
    check(nvrtc, words, table)


def test_bits(nvrtc: Compiler, words: dict[str, Array]) -> None:
    def bit_length(x: Array) -> Array:
        return np.array([int(v).bit_length() for v in x], np.int64)

    def permute(a: Array, b: Array, s: Array) -> Array:
        joined = a.astype(object) | b.astype(object) << 32
        out = np.zeros(len(a), np.uint32)
        for i in range(4):
            pick = (s >> (4 * i)) & 7
            out |= np.array([int(j) >> int(8 * p) & 255 for j, p in zip(joined, pick, strict=True)], np.uint32) << (
                8 * i
            )
        return out

    def field(a: Array, at: Array, count: Array) -> Array:
        """bfe.s32: bits beyond the top repeat the sign, as a Python integer's shift does."""
        out = []
        for x, p, n in zip(signed(a), at & 255, count & 255, strict=True):
            value = (int(x) >> int(p)) & ((1 << int(n)) - 1)
            out.append(value - (1 << int(n)) if n and value >> (int(n) - 1) & 1 else value)
        return wrap(out, 32)

    helper = """
    __device__ int bfind(int a) { int r; asm("bfind.s32 %0, %1;" : "=r"(r) : "r"(a)); return r; }
    __device__ unsigned shiftamt(unsigned a) {
      unsigned r; asm("bfind.shiftamt.u32 %0, %1;" : "=r"(r) : "r"(a)); return r; }
    __device__ int bfe(int a, unsigned p, unsigned n) {
      int r; asm("bfe.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(p), "r"(n)); return r; }
    __device__ unsigned bfi(unsigned a, unsigned b, unsigned p, unsigned n) {
      unsigned r; asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(p), "r"(n)); return r; }
    """
    table: Table = [
        ("u4", "__popc(a)", lambda a, b, c: [int(v).bit_count() for v in a]),
        ("u4", "__clz(a)", lambda a, b, c: 32 - bit_length(a)),
        ("u4", "__ffs(a)", lambda a, b, c: bit_length(a & (0 - a))),
        ("u4", "__brev(a)", lambda a, b, c: [int(f"{v:032b}"[::-1], 2) for v in a]),
        ("u4", "__byte_perm(a, b, c & 0x7777)", lambda a, b, c: permute(a, b, c & 0x7777)),
        ("i4", "bfind((int)a)", lambda a, b, c: bit_length(np.where(signed(a) < 0, ~a, a)) - 1),
        (
            "u4",
            "shiftamt(a)",
            lambda a, b, c: np.where(a == 0, -1, 32 - bit_length(a)).astype(np.int32).view(np.uint32),
        ),
        ("u4", "bfe((int)a, b, c)", lambda a, b, c: field(a, b, c)),
        (
            "u4",
            "__funnelshift_l(a, b, c)",
            lambda a, b, c: ((a.astype(np.uint64) | b.astype(np.uint64) << 32) << (c & 31)) >> 32,
        ),
        (
            "u4",
            "__funnelshift_r(a, b, c)",
            lambda a, b, c: (a.astype(np.uint64) | b.astype(np.uint64) << 32) >> (c & 31),
        ),
        (
            "u4",
            "__funnelshift_rc(a, b, c)",
            lambda a, b, c: (a.astype(np.uint64) | b.astype(np.uint64) << 32) >> np.minimum(c, 32),
        ),
        (
            "u4",
            "bfi(a, b, c & 15, 9)",
            lambda a, b, c: (b & ~(np.uint32(511) << (c & 15))) | ((a & 511) << (c & 15)),
        ),
    ]
    check(nvrtc, words, table, helper=helper)


def test_division_32(nvrtc: Compiler, words: dict[str, Array]) -> None:
    a, b = words["a"], np.where(words["b"] == 0, 3, words["b"]).astype(np.uint32)
    keep = ~((a == 0x80000000) & (b == 0xFFFFFFFF))
    fill = keep.sum() // 32 * 32
    a, b = a[keep][:fill].copy(), b[keep][:fill].copy()
    table: Table = [
        ("u4", "a / b", lambda a, b: a // b),
        ("u4", "a % b", lambda a, b: a % b),
        ("i4", "(int)a / (int)b", lambda a, b: trunc_div(signed(a), signed(b))),
        ("i4", "(int)a % (int)b", lambda a, b: signed(a) - trunc_div(signed(a), signed(b)) * signed(b).astype(object)),
        ("u4", "a / 7", lambda a, b: a // 7),
        ("i4", "(int)a % 12", lambda a, b: np.fmod(signed(a), 12)),
    ]
    check(nvrtc, {"a": a, "b": b}, table)


def test_integer_64(nvrtc: Compiler, rng: np.random.Generator) -> None:
    a, b = crossed(U64, rng.integers(0, 2**64, 200, np.uint64))
    table: Table = [
        ("u8", "a + b", lambda a, b: a + b),
        ("u8", "a - b", lambda a, b: a - b),
        ("u8", "a * b", lambda a, b: a * b),
        ("u8", "a << (b & 63)", lambda a, b: a << (b & 63)),
        ("u8", "a >> (b & 63)", lambda a, b: a >> (b & 63)),
        ("i8", "(long long)a >> (b & 63)", lambda a, b: signed(a) >> signed(b & 63)),
        ("u4", "(a < b) + 2 * (a <= b) + 4 * (a == b)", lambda a, b: (a < b) + 2 * (a <= b) + 4 * (a == b)),
        (
            "u4",
            "((long long)a < (long long)b) + 2 * ((long long)a >= (long long)b) + 4 * (a != b)",
            lambda a, b: (signed(a) < signed(b)) + 2 * (signed(a) >= signed(b)) + 4 * (a != b),
        ),
        ("u8", "__umul64hi(a, b)", lambda a, b: wrap([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], 64)),
        (
            "u8",
            "__mul64hi(a, b)",
            lambda a, b: wrap([int(x) * int(y) >> 64 for x, y in zip(signed(a), signed(b), strict=True)], 64),
        ),
        ("u8", "(long long)(int)a * (int)b", lambda a, b: a.astype(np.int32).astype(np.int64) * b.astype(np.int32)),
        (
            "u8",
            "(long long)(int)a * (int)(b >> 3) - b",
            lambda a, b: (a.astype(np.int32).astype(np.int64) * (b >> 3).astype(np.int32)).view(np.uint64) - b,
        ),
        ("u8", "(a & 0xffffffffull) * (unsigned)b + a", lambda a, b: (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) + a),
        (
            "u4",
            "__clzll(a) + __popcll(b)",
            lambda a, b: [64 - int(x).bit_length() + int(y).bit_count() for x, y in zip(a, b, strict=True)],
        ),
        ("i8", "max((long long)a, (long long)b)", lambda a, b: np.maximum(signed(a), signed(b))),
    ]
    check(nvrtc, {"a": a, "b": b}, table)


def test_division_64(nvrtc: Compiler, rng: np.random.Generator) -> None:
    small = rng.integers(1, 2**20, 100).astype(np.uint64)
    a, b = crossed(U64, np.concatenate([rng.integers(0, 2**64, 100, np.uint64), small]))
    b = np.where(b == 0, 9, b).astype(np.uint64)
    keep = ~((a == 1 << 63) & (b == (1 << 64) - 1))
    fill = int(keep.sum()) // 32 * 32
    table: Table = [
        ("u8", "a / b", lambda a, b: a // b),
        ("u8", "a % b", lambda a, b: a % b),
        ("i8", "(long long)a / (long long)b", lambda a, b: trunc_div(signed(a), signed(b))),
        (
            "i8",
            "(long long)a % (long long)b",
            lambda a, b: signed(a) - trunc_div(signed(a), signed(b)) * signed(b).astype(object),
        ),
        ("u8", "a / 1000003ull", lambda a, b: a // 1000003),
    ]
    check(nvrtc, {"a": a[keep][:fill].copy(), "b": b[keep][:fill].copy()}, table)


_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def fma(a: Array, b: Array, c: Array) -> Array:
    return np.array([_fmaf(*values) for values in zip(a, b, c, strict=True)], np.float32)


def directed(a: Array, b: Array, towards: float, operation: Callable[..., Any]) -> Array:
    """The exact result (which a double holds) rounded to float in one direction."""
    exact = operation(a.astype(np.float64), b.astype(np.float64))
    near = exact.astype(np.float32)
    off = near > exact if towards < 0 else near < exact
    return np.where(off, np.nextafter(near, np.float32(towards)), near)


def test_float(nvrtc: Compiler, rng: np.random.Generator) -> None:
    a, b = crossed(F32, rng.standard_normal(300).astype(np.float32))
    c = np.roll(b, 3)
    moderate = rng.standard_normal(len(a)).astype(np.float32)
    table: Table = [
        ("f4", "a + b", lambda a, b, c, m: a + b),
        ("f4", "a - b * 1.0f", lambda a, b, c, m: a - b),
        ("f4", "__fmul_rn(a, b)", lambda a, b, c, m: a * b),
        ("f4", "fmaf(m, m, a)", lambda a, b, c, m: fma(m, m, a)),
        ("f4", "fmaf(-a, b, -c)", lambda a, b, c, m: fma(-a, b, -c)),
        ("f4", "fminf(a, b)", lambda a, b, c, m: np.fmin(a, b)),
        ("f4", "fmaxf(a, b)", lambda a, b, c, m: np.fmax(a, b)),
        ("f4", "fabsf(a) - fabsf(b)", lambda a, b, c, m: np.abs(a) - np.abs(b)),
        ("f4", "a < b ? c : -c", lambda a, b, c, m: np.where(a < b, c, -c)),
        ("u4", "(a < b) + 2 * (a <= b) + 4 * (a == b)", lambda a, b, c, m: (a < b) + 2 * (a <= b) + 4 * (a == b)),
        ("u4", "!(a < b) + 2 * !(a >= b) + 4 * (a != b)", lambda a, b, c, m: ~(a < b) + 2 * ~(a >= b) + 4 * (a != b)),
        ("u4", "isnan(a) + 2 * isinf(b)", lambda a, b, c, m: np.isnan(a) + 2 * np.isinf(b)),
        ("f4", "floorf(a)", lambda a, b, c, m: np.floor(a)),
        ("f4", "ceilf(a)", lambda a, b, c, m: np.ceil(a)),
        ("f4", "truncf(a)", lambda a, b, c, m: np.trunc(a)),
        ("f4", "rintf(a)", lambda a, b, c, m: np.rint(a)),
        ("f4", "__saturatef(a)", lambda a, b, c, m: np.where(np.isnan(a), 0, np.clip(a, 0, 1))),
        ("f4", "__fadd_rd(m, 0.1f)", lambda a, b, c, m: directed(m, np.float32(0.1), -np.inf, np.add)),
        ("f4", "__fadd_ru(m, 0.1f)", lambda a, b, c, m: directed(m, np.float32(0.1), np.inf, np.add)),
        ("f4", "__fmul_ru(m, 0.1f)", lambda a, b, c, m: directed(m, np.float32(0.1), np.inf, np.multiply)),
        ("f4", "copysignf(a, b)", lambda a, b, c, m: np.copysign(a, b)),
    ]
    check(nvrtc, {"a": a, "b": b, "c": c, "m": moderate}, table)


def test_float_division_and_functions(nvrtc: Compiler, rng: np.random.Generator) -> None:
    a, b = crossed(F32, rng.standard_normal(300).astype(np.float32))
    exact: Table = [
        ("f4", "a / b", lambda a, b: a / b),
        ("f4", "sqrtf(a)", lambda a, b: np.sqrt(a)),
        ("f4", "__frcp_rn(a)", lambda a, b: np.float32(1) / a),
    ]
    check(nvrtc, {"a": a, "b": b}, exact)
    tame = rng.uniform(-8, 8, 256).astype(np.float32)
    close: Table = [
        ("f4", "expf(a)", lambda a: np.exp(a.astype(np.float64))),
        ("f4", "logf(fabsf(a))", lambda a: np.log(np.abs(a.astype(np.float64)))),
        ("f4", "tanhf(a)", lambda a: np.tanh(a.astype(np.float64))),
        ("f4", "sinf(a)", lambda a: np.sin(a.astype(np.float64))),
        ("f4", "rsqrtf(fabsf(a))", lambda a: 1 / np.sqrt(np.abs(a.astype(np.float64)))),
        ("f4", "exp2f(a)", lambda a: np.exp2(a.astype(np.float64))),
    ]
    check(nvrtc, {"a": tame}, close, ulps=3)


def test_flush_to_zero(nvrtc: Compiler) -> None:
    tiny = np.array([1e-40, -1e-40, 1e-38, 2e-38, 1.0, -1.5e-38, 0.0, 1e-45] * 4, np.float32)
    helper = """
    #define FTZ(name) __device__ float name(float a, float b) { \\
      float r; asm(#name ".ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
    FTZ(add) FTZ(mul)
    """

    def flush(x: Array) -> Array:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)

    table: Table = [
        ("f4", "add(a, a)", lambda a: flush(flush(a) + flush(a))),
        ("f4", "mul(a, 0.5f)", lambda a: flush(flush(a) * np.float32(0.5))),
    ]
    check(nvrtc, {"a": tiny}, table, helper=helper)


def saturate(x: Array, kind: str) -> Array:
    limits = np.iinfo(kind)
    low, high = int(limits.min), int(limits.max)
    out = [0 if v != v else low if v <= low else high if v >= high else int(v) for v in x.astype(np.float64)]
    return np.array(out, object)


def test_conversions(nvrtc: Compiler, rng: np.random.Generator) -> None:
    f = np.concatenate([F32, rng.uniform(-300, 300, 43).astype(np.float32)])
    u = rng.integers(0, 2**32, 64, np.uint32)
    w = np.concatenate([U64, rng.integers(0, 2**64, 54, np.uint64)])
    safe = np.where(np.isnan(f), 1, f).astype(np.float32)
    table: Table = [
        ("i4", "(int)f", lambda f, u, w, s: saturate(np.trunc(f), "i4")),
        ("u4", "(unsigned)f", lambda f, u, w, s: saturate(np.trunc(f), "u4")),
        ("i4", "__float2int_rn(f)", lambda f, u, w, s: saturate(np.rint(f), "i4")),
        ("i4", "__float2int_rd(f)", lambda f, u, w, s: saturate(np.floor(f), "i4")),
        ("i4", "__float2int_ru(f)", lambda f, u, w, s: saturate(np.ceil(f), "i4")),
        ("i8", "(long long)s", lambda f, u, w, s: saturate(np.trunc(s), "i8")),
        ("u8", "(unsigned long long)s", lambda f, u, w, s: saturate(np.trunc(s), "u8")),
        ("f4", "(float)(int)u", lambda f, u, w, s: signed(u).astype(np.float32)),
        ("f4", "(float)u", lambda f, u, w, s: u.astype(np.float32)),
        ("f4", "(float)w", lambda f, u, w, s: w.astype(np.float32)),
        ("f4", "(float)(long long)w", lambda f, u, w, s: signed(w).astype(np.float32)),
        ("f8", "(double)(long long)w", lambda f, u, w, s: signed(w).astype(np.float64)),
        ("f8", "(double)u", lambda f, u, w, s: u.astype(np.float64)),
        ("f8", "(double)f", lambda f, u, w, s: f.astype(np.float64)),
        ("f4", "(float)(signed char)u", lambda f, u, w, s: u.astype(np.int8).astype(np.float32)),
        ("f4", "(float)(unsigned short)u", lambda f, u, w, s: u.astype(np.uint16).astype(np.float32)),
        ("i2", "(short)u", lambda f, u, w, s: u.astype(np.int16)),
        ("i4", "(signed char)(u >> 8)", lambda f, u, w, s: (u >> 8).astype(np.int8)),
    ]
    check(nvrtc, {"f": f, "u": u, "w": w, "s": safe}, table)


def test_double(nvrtc: Compiler, rng: np.random.Generator) -> None:
    edges = np.array([0.0, -0.0, 1.0, -1.0, 0.1, 1e300, 1e-300, 1e-310, np.inf, -np.inf, np.nan, 3.5, -2.5], np.float64)
    a, b = crossed(edges, rng.standard_normal(87))
    table: Table = [
        ("f8", "a + b", lambda a, b: a + b),
        ("f8", "__dmul_rn(a, b)", lambda a, b: a * b),
        ("f8", "a - __dmul_rn(b, 3.0)", lambda a, b: a - b * 3.0),
        ("f8", "a / b", lambda a, b: a / b),
        ("f8", "sqrt(fabs(a))", lambda a, b: np.sqrt(np.abs(a))),
        ("f8", "fmin(a, b)", lambda a, b: np.fmin(a, b)),
        ("f8", "fmax(a, b)", lambda a, b: np.fmax(a, b)),
        ("f8", "floor(a)", lambda a, b: np.floor(a)),
        ("u4", "(a < b) + 2 * (a == b) + 4 * !(a >= b)", lambda a, b: (a < b) + 2 * (a == b) + 4 * ~(a >= b)),
        ("f4", "(float)a", lambda a, b: a.astype(np.float32)),
        ("f8", "a > b ? a : -b", lambda a, b: np.where(a > b, a, -b)),
    ]
    check(nvrtc, {"a": a, "b": b}, table)
    tame = {"a": rng.uniform(-5, 5, 64)}
    check(nvrtc, tame, [("f8", "exp(a)", np.exp), ("f8", "log(fabs(a))", lambda a: np.log(np.abs(a)))], ulps=3)


def test_fused_multiply_add_rounds_once(nvrtc: Compiler) -> None:
    a = np.full(32, 1 + 2.0**-12, np.float32)
    check(nvrtc, {"a": a}, [("f4", "fmaf(a, a, -1.0f)", lambda a: (a.astype(np.float64) ** 2 - 1).astype(np.float32))])


def test_half_conversion(nvrtc: Compiler) -> None:
    helper = """__device__ unsigned short half_bits(float a) {
      unsigned short r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }"""
    a = np.linspace(-70000, 70000, 64).astype(np.float32)
    check(nvrtc, {"a": a}, [("u2", "half_bits(a)", lambda a: a.astype(np.float16).view(np.uint16))], helper=helper)


def test_half_to_float(nvrtc: Compiler) -> None:
    """For both halves of a register and all float16 values, subnormal and infinite ones included."""
    helper = """__device__ float widened(unsigned short a) {
      float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a)); return r; }"""
    a = np.arange(2**16, dtype=np.uint32)
    a |= a[::-1] << 16
    table: Table = [
        ("f4", "widened(a & 0xffff)", lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32)),
        ("f4", "widened(a >> 16)", lambda a: (a >> 16).astype(np.uint16).view(np.float16).astype(np.float32)),
    ]
    check(nvrtc, {"a": a}, table, helper=helper)


def test_a_half_among_the_parameters(nvrtc: Compiler) -> None:
    """A constant read from the constant bank, as one of two halves."""
    source = """extern "C" __global__ void k(float* out, unsigned short a, unsigned short b) {
      asm("cvt.f32.f16 %0, %1;" : "=f"(out[0]) : "h"(a));
      asm("cvt.f32.f16 %0, %1;" : "=f"(out[1]) : "h"(b)); }"""
    out, halves = np.zeros(2, np.float32), np.array([1.5, -0.25], np.float16)
    gpu_emulator.run(nvrtc(source), "k", 1, 1, [out, *halves.view(np.uint16)])
    assert out.tolist() == halves.tolist()


def test_predicates_spill_to_registers(nvrtc: Compiler, rng: np.random.Generator) -> None:
    """Many live booleans make the compiler move predicates through a register (P2R, R2P)."""
    a = rng.integers(0, 2**20, 64, np.uint32)
    tests = "".join(f"bool p{i} = (a * {2 * i + 3}u) % 7 > {i % 5};\n" for i in range(12))
    uses = " + ".join(f"(p{i} ? {1 << i} : 0)" for i in range(12))

    def reference(a: Array) -> Array:
        return np.asarray(sum(((a * np.uint32(2 * i + 3)) % 7 > i % 5) * (1 << i) for i in range(12)))

    check(nvrtc, {"a": a}, [("u4", uses, reference)], declarations=tests + "__syncwarp();")


def test_float_constants_are_parsed_exactly(nvrtc: Compiler) -> None:
    a = np.ones(32, np.float32)
    values = [0.1, 1e-42, 3.4028235e38, 1.1754944e-38, 1 / 3, -7.25e-5]
    table: Table = [("f4", f"a * {v!r}f", lambda a, v=v: a * np.float32(v)) for v in values]
    check(nvrtc, {"a": a}, table)
