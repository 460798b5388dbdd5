"""mma.sync of sm_80 (HMMA.1684, 1688, 16816) against a model of the A100's tensor cores in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator
from polyconv.numerics.tensor_core import AMPERE
from tensor_core_sums import multiply_add, random_values

Array = npt.NDArray[Any]
Compiler = Callable[..., bytes]

SOURCE = """
extern "C" __global__ void multiply(float* d, const unsigned* a, const unsigned* b, const float* c) {
  const unsigned lane = threadIdx.x;
  float s[4];
  unsigned x[4] = {}, y[2] = {};
  for (int i = 0; i < 4; i++) s[i] = c[4 * lane + i];
  for (int i = 0; i < A_REGISTERS; i++) x[i] = a[A_REGISTERS * lane + i];
  for (int i = 0; i < B_REGISTERS; i++) y[i] = b[B_REGISTERS * lane + i];
  asm volatile("mma.sync.aligned.SHAPE.row.col.f32.TYPE.TYPE.f32 {%0,%1,%2,%3},{A_LIST},{B_LIST},{%0,%1,%2,%3};"
               : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int i = 0; i < 4; i++) d[4 * lane + i] = s[i];
}"""


@dataclass(frozen=True)
class Form:
    """One instruction. `pieces`: how many times four lanes, with one register each, cover the depth."""

    mnemonic: str
    kind: str
    pieces: int
    block: int
    cycles: int

    @property
    def per_register(self) -> int:
        return 1 if self.kind == "tf32" else 2

    @property
    def depth(self) -> int:
        return 4 * self.per_register * self.pieces

    @property
    def source(self) -> str:
        out = SOURCE.replace("SHAPE", f"m16n8k{self.depth}").replace("TYPE", self.kind)
        out = out.replace("A_REGISTERS", str(2 * self.pieces)).replace("B_REGISTERS", str(self.pieces))
        out = out.replace("A_LIST", ",".join(f"%{4 + i}" for i in range(2 * self.pieces)))
        return out.replace("B_LIST", ",".join(f"%{8 + i}" for i in range(self.pieces)))

    def representable(self, values: Array) -> Array:
        """The nearest factors below, as float32."""
        if self.kind == "f16":
            return values.astype(np.float16).astype(np.float32)
        cut = 0xFFFF0000 if self.kind == "bf16" else 0xFFFFE000
        return (values.astype(np.float32).view(np.uint32) & np.uint32(cut)).view(np.float32)

    def words(self, values: Array) -> Array:
        """Rows of factors packed into 32-bit registers."""
        if self.kind == "f16":
            return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
        bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
        return bits if self.kind == "tf32" else np.ascontiguousarray(bits >> 16).astype(np.uint16).view(np.uint32)

    def multiply(self, nvrtc: Compiler, a: Array, b: Array, c: Array) -> Array:
        """a [16][depth] times b [8][depth], plus c [16][8], by the machine code."""
        lane = np.arange(32)
        row, place = lane // 4, lane % 4
        wa, wb = self.words(a), self.words(b)
        registers = [(row + 8 * (r % 2), r // 2 * 4 + place) for r in range(2 * self.pieces)]
        xs = np.stack([wa[at] for at in registers], 1)
        ys = np.stack([wb[row, r * 4 + place] for r in range(self.pieces)], 1)
        i = np.arange(4)
        places = (row[:, None] + i // 2 * 8, 2 * place[:, None] + i % 2)
        lanes = np.zeros((32, 4), np.float32)
        arguments = [lanes, np.ascontiguousarray(xs), np.ascontiguousarray(ys), np.ascontiguousarray(c[places])]
        report = gpu_emulator.run(nvrtc(self.source, "sm_80"), "multiply", 1, 32, arguments)
        assert report.opcodes[self.mnemonic] == report.pipes["tensor"] == 1
        assert report.speed_of_light(sms=1).row("tensor pipe").cycles == self.cycles / 4
        out = np.zeros_like(c)
        out[places] = lanes
        return out

    def model(self, a: Array, b: Array, c: Array) -> Array:
        return multiply_add(replace(AMPERE, block=self.block), a, b, c)


FORMS = [
    Form("HMMA.1688.F32", "f16", pieces=1, block=8, cycles=4),
    Form("HMMA.16816.F32", "f16", pieces=2, block=8, cycles=8),
    Form("HMMA.1688.F32.BF16", "bf16", pieces=1, block=8, cycles=4),
    Form("HMMA.16816.F32.BF16", "bf16", pieces=2, block=8, cycles=8),
    Form("HMMA.1684.F32.TF32", "tf32", pieces=1, block=4, cycles=4),
    Form("HMMA.1688.F32.TF32", "tf32", pieces=2, block=4, cycles=8),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mnemonic)


def random_operands(form: Form, seed: int, orders: int) -> tuple[Array, Array, Array]:
    a, b, c = random_values(seed, orders, (16, form.depth), (8, form.depth), (16, 8))
    return form.representable(a), form.representable(b), c.astype(np.float32)


@every_form
def test_layout(nvrtc: Compiler, form: Form) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, form.depth), (8, form.depth), (16, 8)))
    assert np.array_equal(form.multiply(nvrtc, a, b, c), a @ b.T + c)


@every_form
@pytest.mark.parametrize("orders", [0, 4, 12])
def test_rounding(nvrtc: Compiler, form: Form, orders: int) -> None:
    a, b, c = random_operands(form, orders, orders)
    assert np.array_equal(form.multiply(nvrtc, a, b, c), form.model(a, b, c))


@pytest.mark.parametrize("form", [form for form in FORMS if form.kind != "f16"], ids=lambda form: form.mnemonic)
def test_small_sums_are_subnormal(nvrtc: Compiler, form: Form) -> None:
    a, b, c = random_operands(form, 1, 4)
    tiny = np.float32(2.0**-70)
    a, b, c = form.representable(a * tiny), form.representable(b * tiny), c * tiny * tiny
    got = form.multiply(nvrtc, a, b, c)
    assert np.array_equal(got, form.model(a, b, c))
    assert (np.abs(got) < 2.0**-126).any()


def test_tf32_ignores_the_lower_bits(nvrtc: Compiler) -> None:
    form = FORMS[-1]
    a, b, c = random_operands(form, 2, 2)
    noise = np.random.default_rng(2).integers(0, 2**13, a.shape, np.uint32)
    assert np.array_equal(
        form.multiply(nvrtc, (a.view(np.uint32) | noise).view(np.float32), b, c), form.multiply(nvrtc, a, b, c)
    )


def test_conversions_to_factors(nvrtc: Compiler) -> None:
    """Floats to pairs of float16 or bfloat16, to nearest or toward zero, and float16 back."""
    source = """extern "C" __global__ void k(unsigned* o, float* back, const float* a, const float* b) {
      const unsigned t = threadIdx.x;
      unsigned r[3];
      unsigned short one[2];
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r[0]) : "f"(a[t]), "f"(b[t]));
      asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r[1]) : "f"(a[t]), "f"(b[t]));
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[2]) : "f"(a[t]), "f"(b[t]));
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(one[0]) : "f"(b[t]));
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(one[1]) : "f"(b[t]));
      asm("cvt.f32.f16 %0, %1;" : "=f"(back[t]) : "h"(one[0]));
      for (int i = 0; i < 5; i++) o[5 * t + i] = i < 3 ? r[i] : one[i - 3]; }"""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(32).astype(np.float32) * np.float32(2) ** rng.integers(-18, 15, 32) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    out, back = np.zeros((32, 5), np.uint32), np.zeros(32, np.float32)
    report = gpu_emulator.run(nvrtc(source, "sm_80"), "k", 1, 32, [out, back, a, b])
    assert {"F2FP.PACK_AB", "F2FP.PACK_AB.RZ", "F2FP.BF16.PACK_AB"} <= report.opcodes.keys()

    def half(x: Array) -> Array:
        return x.astype(np.float16).view(np.uint16).astype(np.uint32)

    def half_toward_zero(x: Array) -> Array:
        near = x.astype(np.float16)
        beyond = np.abs(near.astype(np.float32)) > np.abs(x)
        return near.view(np.uint16).astype(np.uint32) - beyond

    def bfloat(x: Array) -> Array:
        bits = x.view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    pairs = [convert(a) << 16 | convert(b) for convert in (half, half_toward_zero, bfloat)]
    assert np.array_equal(out.T, [*pairs, half(b), bfloat(b)])
    assert np.array_equal(back, b.astype(np.float16).astype(np.float32))
