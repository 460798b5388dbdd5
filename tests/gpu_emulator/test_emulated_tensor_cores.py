"""mma.sync of sm_70 (HMMA.884) against a model of the V100's tensor cores in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gpu_emulator
from polyconv.numerics.tensor_core import VOLTA
from tensor_core_sums import multiply_add, random_values

Array = npt.NDArray[Any]
Compiler = Callable[[str], bytes]

SOURCE = """
extern "C" __global__ void multiply(float* d, const unsigned* a, const unsigned* b, const float* c) {
  const unsigned lane = threadIdx.x;
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = c[8 * lane + i];
  asm volatile(
      "mma.sync.aligned.m8n8k4.%A.%B.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
      : "r"(a[2 * lane]), "r"(a[2 * lane + 1]), "r"(b[2 * lane]), "r"(b[2 * lane + 1]));
  for (int i = 0; i < 8; i++) d[8 * lane + i] = s[i];
}"""

LANES = np.arange(32)
QUAD_PAIR = LANES % 16 // 4
MEMBER = LANES % 4 + LANES // 16 * 4


def spread(operand: Array, by_members: bool) -> Array:
    """Four halves per lane of an operand [quad pair][8 rows of A or columns of B][4], as in the PTX manual."""
    if by_members:
        return operand[QUAD_PAIR, MEMBER]
    rows = MEMBER[:, None] // 4 * 4 + np.arange(4)
    return operand[QUAD_PAIR[:, None], rows, MEMBER[:, None] % 4]


def accumulator_places() -> tuple[Array, Array, Array]:
    """Quad pair, row and column of the eight accumulators of each lane."""
    i, lane = np.arange(8), LANES[:, None]
    rows = (lane & 1) + (i & 2) + lane // 16 * 4
    return np.broadcast_to(QUAD_PAIR[:, None], rows.shape), rows, (i & 4) + (lane & 2) + (i & 1)


def multiply(nvrtc: Compiler, a: Array, b: Array, c: Array, layouts: tuple[str, str] = ("row", "col")) -> Array:
    """[quad pair][8][8] by the machine code."""
    cubin = nvrtc(SOURCE.replace("%A", layouts[0]).replace("%B", layouts[1]))
    places = accumulator_places()
    lanes = np.zeros((32, 8), np.float32)
    operands = (spread(a, layouts[0] == "row"), spread(b, layouts[1] == "col"))
    words = [np.ascontiguousarray(o.astype(np.float16)).view(np.uint32) for o in operands]
    report = gpu_emulator.run(cubin, "multiply", 1, 32, [lanes, *words, np.ascontiguousarray(c[places])])
    assert report.pipes["tensor"] == 4
    assert report.speed_of_light(sms=1).row("tensor pipe").cycles == 4 * 2 / 4
    out = np.zeros_like(c)
    out[places] = lanes
    return out


def model(a: Array, b: Array, c: Array) -> Array:
    return multiply_add(VOLTA, a, b, c)


def random_operands(seed: int, orders: int) -> tuple[Array, Array, Array]:
    a, b, c = random_values(seed, orders, (4, 8, 4), (4, 8, 4), (4, 8, 8))
    return a.astype(np.float16), b.astype(np.float16), c.astype(np.float32)


@pytest.mark.parametrize("layouts", [("row", "col"), ("col", "col"), ("row", "row"), ("col", "row")])
def test_layouts(nvrtc: Compiler, layouts: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-9, 10, shape) for shape in ((4, 8, 4), (4, 8, 4), (4, 8, 8)))
    got = multiply(nvrtc, a, b, c.astype(np.float32), layouts)
    assert np.array_equal(got, np.einsum("qik,qjk->qij", a, b) + c)


@pytest.mark.parametrize("orders", [0, 1, 4, 8, 14])
def test_rounding(nvrtc: Compiler, orders: int) -> None:
    a, b, c = random_operands(orders, orders)
    got = multiply(nvrtc, a, b, c)
    assert np.array_equal(got, model(a, b, c))


def test_addend_decides(nvrtc: Compiler) -> None:
    """Products below the last bit of a large addend are truncated one by one, whatever their sum."""
    a, b = np.full((4, 8, 4), 0.75, np.float16), np.ones((4, 8, 4), np.float16)
    c = np.full((4, 8, 8), 2.0**23, np.float32)
    assert np.array_equal(multiply(nvrtc, a, b, c), c)
    assert np.array_equal(multiply(nvrtc, -a, b, c), c)


def test_zeros_subnormals_and_extremes(nvrtc: Compiler) -> None:
    a, b, c = random_operands(3, 0)
    zero = np.zeros_like(a)
    assert np.array_equal(multiply(nvrtc, zero, b, 0 * c), 0 * c)
    assert np.array_equal(multiply(nvrtc, zero, b, c * np.float32(2.0**-130)), c * np.float32(2.0**-130))
    least, largest = np.full_like(a, 2.0**-24), np.full_like(a, 65504)
    for left, right in ((least, least), (least, largest), (largest, largest)):
        assert np.array_equal(multiply(nvrtc, left, right, 0 * c), model(left, right, 0 * c))


def test_infinities_and_nans(nvrtc: Compiler) -> None:
    a, b, c = random_operands(4, 0)
    a[0, 2, 1], a[1, 3, 0], c[2, 5, 6] = np.inf, np.nan, -np.inf
    got = multiply(nvrtc, a, b, c)
    assert np.array_equal(got[0, 2], np.where(b[0, :, 1] > 0, np.inf, -np.inf))
    assert np.isnan(got[1, 3]).all()
    assert got[2, 5, 6] == -np.inf
    assert np.isfinite(got).sum() == got.size - 8 - 8 - 1


def test_inactive_lanes_stop_it(nvrtc: Compiler) -> None:
    source = (
        SOURCE.replace("%A", "row").replace("%B", "col").replace("float s[8];", "if (lane > 7) return; float s[8];")
    )
    empty = np.zeros(256, np.float32)
    with pytest.raises(gpu_emulator.Fault, match="inactive lanes"):
        gpu_emulator.run(nvrtc(source), "multiply", 1, 32, [empty, empty, empty, empty])
