"""Opcodes that compilers rarely emit: one instruction of a compiled kernel is replaced.

The kernel computes ``o[t] = a[t] + b[t]``; its single addition becomes the instruction under test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator
from gpu_emulator import elf, launch, toolchain

Compiler = Callable[[str], bytes]
Array = npt.NDArray[Any]

SOURCE = """extern "C" __global__ void k(unsigned* o, const unsigned* a, const unsigned* b) {
  o[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x]; }"""

EDGES = np.array(
    [0, 1, 2, 5, 31, 32, 40, 127, 128, 200, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFF80, 0xFFFFFFFF], "u4"
)


def i32(x: Array) -> Array:
    return x.view(np.int32)


def f32(x: Array) -> Array:
    return x.view(np.float32)


def clip_to(x: Array, low: int, high: int) -> Array:
    return np.clip(i32(x).astype(np.int64), low, high).astype(np.int32).view(np.uint32)


# {d}, {a}, {b}: registers of the replaced addition.
CASES: list[tuple[str, Callable[[Array, Array], Any]]] = [
    ("IMNMX {d}, {a}, {b}, PT", lambda a, b: np.minimum(i32(a), i32(b)).view("u4")),
    ("IMNMX {d}, {a}, {b}, !PT", lambda a, b: np.maximum(i32(a), i32(b)).view("u4")),
    ("IMNMX.U32 {d}, {a}, {b}, PT", np.minimum),
    ("IADD3 {d}, -{a}, {b}, 0x7", lambda a, b: b - a + 7),
    ("IADD3 {d}, {a}, ~{b}, RZ", lambda a, b: a + ~b),
    ("IMAD {d}, -{a}, {b}, -0x3", lambda a, b: 0 - a * b - 3),
    ("IMAD.HI.U32 {d}, {a}, {b}, RZ", lambda a, b: (a.astype("u8") * b) >> 32),
    ("IMAD.HI {d}, {a}, {b}, RZ", lambda a, b: (i32(a).astype("i8") * i32(b) >> 32).astype("i4").view("u4")),
    ("LEA {d}, {a}, {b}, 0x3", lambda a, b: (a << 3) + b),
    ("LEA {d}, -{a}, {b}, 0x3", lambda a, b: b - (a << 3)),
    ("LEA.HI {d}, {a}, {b}, RZ, 0x5", lambda a, b: (a >> 27) + b),
    ("LEA.HI.SX32 {d}, {a}, {b}, 0x1c", lambda a, b: (i32(a) >> 4).view("u4") + b),
    ("LOP3.LUT {d}, {a}, {b}, 0xff00ff, 0xca, !PT", lambda a, b: (a & b) | (~a & 0xFF00FF)),
    ("LOP3.LUT {d}, {a}, ~{b}, RZ, 0x30, !PT", lambda a, b: a & b),
    ("SHF.L.U32 {d}, {a}, {b}, RZ", lambda a, b: np.where(b < 32, a << (b & 31), 0)),
    ("SHF.R.S32.HI {d}, RZ, {b}, {a}", lambda a, b: (i32(a) >> np.minimum(b, 31).astype("i4")).view("u4")),
    ("SHF.R.W.U32.HI {d}, RZ, {b}, {a}", lambda a, b: a >> (b & 31)),
    ("SGXT {d}, {a}, 0x8", lambda a, b: a.astype("i1").astype("i4").view("u4")),
    ("SGXT.U32 {d}, {a}, 0x8", lambda a, b: a & 0xFF),
    ("BMSK {d}, 0x4, 0x8", lambda a, b: 0 * a + 0xFF0),
    ("IDP.2A.LO.U16.U8 {d}, {a}, {b}, 0x5", lambda a, b: dp2a(a, b, 0)),
    ("IDP.2A.HI.U16.U8 {d}, {a}, {b}, 0x5", lambda a, b: dp2a(a, b, 16)),
    ("VABSDIFF.U32 {d}, {a}, {b}, 0x1", lambda a, b: np.where(a < b, b - a, a - b) + 1),
    ("PRMT {d}, {a}, 0x8765, {b}", lambda a, b: (a & 0x80) * 0 + prmt(a, b)),
    ("I2I.S8.S32.SAT {d}, {a}", lambda a, b: clip_to(a, -128, 127)),
    ("I2I.U16.S32.SAT {d}, {a}", lambda a, b: clip_to(a, 0, 65535)),
    (
        "FSET.BF.LT.AND {d}, {a}, {b}, PT",
        lambda a, b: np.where(f32(a) < f32(b), np.float32(1), np.float32(0)).view("u4"),
    ),
    ("FSEL {d}, -{a}, |{b}|, PT", lambda a, b: a ^ 0x80000000),
    ("FSEL {d}, -{a}, |{b}|, !PT", lambda a, b: b & 0x7FFFFFFF),
    ("FMNMX.NAN {d}, {a}, {b}, PT", lambda a, b: least(a, b)),
    ("FMNMX.NAN {d}, {a}, {b}, !PT", lambda a, b: least(b, a, a, b)),
    ("FLO.U32.SH {d}, {a}", lambda a, b: np.array([32 - int(v).bit_length() if v else 0xFFFFFFFF for v in a], "u4")),
    ("P2R {d}, PR, {a}, 0x7f", lambda a, b: a & ~np.uint32(0x7F)),
    ("P2R.B1 {d}, PR, {a}, 0x7f", lambda a, b: a & ~np.uint32(0x7F00)),
    ("SEL {d}, {a}, -{b}, !PT", lambda a, b: 0 - b),
    ("MOV {d}, ~{a}", lambda a, b: ~a),
    ("S2R {d}, SR_LTMASK", lambda a, b: (np.uint32(1) << np.arange(32, dtype="u4")) - 1),
    ("S2R {d}, SR_GEMASK", lambda a, b: ~((np.uint32(1) << np.arange(32, dtype="u4")) - 1)),
    ("EXIT PT", lambda a, b: 0 * a),  # no thread reaches the store
    ("@!PT EXIT PT", lambda a, b: unwritten(a)),
    ("EXIT !PT", lambda a, b: unwritten(a)),
]


def unwritten(a: Array) -> Array:
    """The content of a register that no instruction wrote: the addition was its only writer."""
    return 0 * a + 0x7FFFDEAD


def least(a: Array, b: Array, if_less: Array | None = None, if_not: Array | None = None) -> Array:
    """The smaller of two floats, -0 before +0, or what is given for each outcome; NaN if one is NaN."""
    x, y = f32(a), f32(b)
    less = (x < y) | ((x == y) & np.signbit(x))
    found = np.where(less, a if if_less is None else if_less, b if if_not is None else if_not)
    return np.where(np.isnan(x) | np.isnan(y), np.uint32(0x7FFFFFFF), found)


def prmt(a: Array, b: Array) -> Array:
    """Bytes 5, 6, 7 of b:a, and the sign of byte 0 extended over the top."""
    sign = np.where(a & 0x80, np.uint32(0xFF000000), np.uint32(0))
    return (b >> 8 & 0xFFFFFF) | sign


def dp2a(a: Array, b: Array, first: int) -> Array:
    """Two halves of a times two bytes of b, plus five."""
    return (a & 0xFFFF) * (b >> first & 0xFF) + (a >> 16) * (b >> first + 8 & 0xFF) + 5


def run_replaced(nvrtc: Compiler, monkeypatch: pytest.MonkeyPatch, replacement: str, a: Array, b: Array) -> Array:
    cubin = nvrtc(SOURCE)
    text = toolchain.disassemble(elf.load(cubin).kernel("k").code, "sm_70")
    first = re.search(r"LDG\.E\.\S+ (R\d+), \[R\d+\]", text)
    addition = re.search(r"(?:IADD3 (R\d+), (R\d+), (R\d+), RZ|IMAD\.IADD (R\d+), (R\d+), 0x1, (R\d+)) ;\n.*STG", text)
    assert first
    assert addition
    d, x, y = (g.removesuffix(".reuse") for g in addition.groups() if g)
    source = re.findall(r"LDG\.E\.\S+ (R\d+), \[(R\d+)\]", text)
    # the register loaded from the first array: its address uses parameter 0x168
    address = re.search(r"IMAD\.WIDE(?:\.U32)? (R\d+), R\d+(?:\.reuse)?, R\d+(?:\.reuse)?, c\[0x0\]\[0x168\]", text)
    assert address
    from_a = next(reg for reg, at in source if at == address.group(1))
    x, y = (x, y) if x == from_a else (y, x)
    start, end = addition.start(), text.index(";", addition.start())
    changed = text[:start] + replacement.format(d=d, a=x, b=y) + " " + text[end:]
    launch._program.cache_clear()
    monkeypatch.setattr(toolchain, "disassemble", lambda code, arch: changed)
    out = np.zeros(32, np.uint32)
    try:
        gpu_emulator.run(cubin, "k", 1, 32, [out, a, b])
    finally:
        launch._program.cache_clear()
    return out


@pytest.mark.parametrize(("replacement", "reference"), CASES, ids=[c[0] for c in CASES])
def test_replaced(
    nvrtc: Compiler, monkeypatch: pytest.MonkeyPatch, replacement: str, reference: Callable[[Array, Array], Any]
) -> None:
    rng = np.random.default_rng(5)
    a = np.concatenate([EDGES, rng.integers(0, 2**32, 16, np.uint32)])
    for b in (np.roll(a, 1), np.roll(a, 7), rng.permutation(a)):
        got = run_replaced(nvrtc, monkeypatch, replacement, a, np.ascontiguousarray(b))
        monkeypatch.undo()
        with np.errstate(all="ignore"):
            want = np.asarray(reference(a, b)).astype(np.uint32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "replacement", ["HADD2 {d}, {a}, {b}", "IADD3.WEIRD {d}, {a}, {b}, RZ", "FFMA.LU {d}, {a}, {b}, RZ"]
)
def test_unknown_text_is_refused(nvrtc: Compiler, monkeypatch: pytest.MonkeyPatch, replacement: str) -> None:
    values = np.arange(32, dtype=np.uint32)
    with pytest.raises(gpu_emulator.Unsupported) as caught:
        run_replaced(nvrtc, monkeypatch, replacement, values, values)
    assert replacement.split(" ")[0] in str(caught.value)
