"""The matrices computed at C++ compile time equal the exact algebra, up to a scale per point."""

from __future__ import annotations

import json
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from polyconv.algebra.cook_toom import cook_toom

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"
ALGORITHMS = [(2, 3), (4, 3), (6, 3), (4, 5), (3, 4), (5, 4), (2, 5), (3, 2)]

PROGRAM = """
#include <cstdio>
#include "common/cook_toom.h"

template <int r, int c>
void Print(const polyconv::Matrix<r, c>& m) {
  std::printf("[");
  for (int i = 0; i < r; i++) {
    std::printf(i ? ",[" : "[");
    for (int j = 0; j < c; j++) std::printf(j ? ",%.17g" : "%.17g", m.at[i][j]);
    std::printf("]");
  }
  std::printf("]");
}

template <int m, int r>
void PrintAlgorithm(const char* after) {
  using Alg = polyconv::CookToom<m, r>;
  std::printf("[");
  Print(Alg::kMatrices.output); std::printf(",");
  Print(Alg::kMatrices.weight); std::printf(",");
  Print(Alg::kMatrices.input);
  std::printf("]%s\\n", after);
}

int main() {
  std::printf("[");
  CALLS
  std::printf("]");
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("cook_toom")
    last = ALGORITHMS[-1]
    calls = "\n".join(f'PrintAlgorithm<{m}, {r}>("{"" if (m, r) == last else ","}");' for m, r in ALGORITHMS)
    (folder / "print.cc").write_text(PROGRAM.replace("CALLS", calls))
    program = folder / "print"
    subprocess.run(["g++", "-std=c++20", f"-I{CSRC}", folder / "print.cc", "-o", program], check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(ALGORITHMS, json.loads(text), strict=True))


@pytest.mark.parametrize(("m", "r"), ALGORITHMS)
def test_same_algorithm(compiled: dict[tuple[int, int], Any], m: int, r: int) -> None:
    """A^T and B^T are exact (dyadic entries); G is rounded to double once."""
    at, g, bt = compiled[m, r]
    exact = cook_toom(m, r)
    for point in range(m + r - 1):
        # A row scaled by k on one side is scaled by 1/k on the other: here B^T takes the factor from G.
        column = next(j for j in range(m + r - 1) if exact.bt[point][j])
        factor = Fraction(bt[point][column]) / exact.bt[point][column]
        assert [Fraction(entry) for entry in bt[point]] == [factor * entry for entry in exact.bt[point]]
        row = next(i for i in range(m) if exact.at[i][point])
        back = Fraction(at[row][point]) / exact.at[row][point]
        assert [Fraction(at[i][point]) for i in range(m)] == [back * exact.at[i][point] for i in range(m)]
        for j in range(r):
            assert g[point][j] == pytest.approx(float(exact.g[point][j] / (factor * back)), rel=1e-15)
