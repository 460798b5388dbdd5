"""Emitted transforms: programs equal their matrices, operation counts, and the C text compiled and run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyconv.algebra.cook_toom import cook_toom
from polyconv.algebra.emit import compile_matrix, emit_transform
from polyconv.algebra.matrices import Matrix, identity, is_dyadic, matrix, transpose

entries = st.one_of(st.just(Fraction(0)), st.sampled_from([Fraction(n, 4) for n in (-20, -8, -4, -1, 1, 2, 4, 8, 21)]))
CLASSIC = [(2, 3), (4, 3), (6, 3), (4, 5), (2, 5), (4, 4), (3, 3), (2, 2)]


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return matrix(draw(st.lists(entries, min_size=columns, max_size=columns)) for _ in range(rows))


@st.composite
def paired(draw: st.DrawFn) -> Matrix:
    """Pairs of rows, or of columns, that agree up to signs and a factor."""
    rows = []
    for row in draw(matrices()):
        factor = draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3)]))
        signs = draw(st.lists(st.sampled_from([-1, 1]), min_size=len(row), max_size=len(row)))
        rows += [row, tuple(factor * sign * c for sign, c in zip(signs, row, strict=True))]
    return tuple(rows) if draw(st.booleans()) else transpose(tuple(rows))


@given(st.one_of(matrices(), paired()))
def test_a_program_computes_its_matrix(a: Matrix) -> None:
    program = compile_matrix(a)
    assert program.matrix() == a
    assert program.transposed().matrix() == transpose(a)
    assert all(is_dyadic(op.c) for op in program.ops)
    plain = sum(max(len([c for c in row if c]), 1) for row in a)
    assert program.count().total <= plain


@pytest.mark.parametrize(("m", "r"), CLASSIC)
def test_every_transform_of_every_pass_is_exact(m: int, r: int) -> None:
    f = cook_toom(m, r)
    for a in (f.at, f.g, f.bt):
        assert compile_matrix(a).matrix() == a
        assert compile_matrix(transpose(a)).matrix() == transpose(a)
    for a in (f.at, f.bt, transpose(f.at), transpose(f.bt)):
        emit_transform("name", a)  # coefficients are exact in float32, or this would raise


# Operations of B^T, A^T and G. Hand-written code for F(4,5) takes 26 and 16; for F(4,3) 13 and 10.
COUNTS = [((2, 3), 4, 4, 4), ((4, 3), 12, 10, 9), ((6, 3), 22, 20, 12), ((4, 5), 22, 16, 18), ((2, 5), 12, 8, 13)]


@pytest.mark.parametrize(("size", "bt", "at", "g"), COUNTS)
def test_operation_counts(size: tuple[int, int], bt: int, at: int, g: int) -> None:
    f = cook_toom(*size)
    assert [compile_matrix(a).count().total for a in (f.bt, f.at, f.g)] == [bt, at, g]
    assert compile_matrix(f.bt).count().muls == compile_matrix(f.at).count().muls == 0
    assert compile_matrix(f.bt).count().depth <= 4


def test_the_text() -> None:
    assert emit_transform("bt_f2_3", cook_toom(2, 3).bt) == (
        "// 4 from 4 in 4 operations (4 add, 0 mul, 0 fma), depth 1.\n"
        "template <class T>\n"
        "POLYCONV_INLINE void bt_f2_3(const T* x, T* y) {\n"
        "  const T x0 = x[0];\n"
        "  const T x1 = x[1];\n"
        "  const T x2 = x[2];\n"
        "  const T x3 = x[3];\n"
        "  y[0] = x0 - x2;\n"
        "  y[1] = x1 + x2;\n"
        "  y[2] = x2 - x1;\n"
        "  y[3] = x3 - x1;\n"
        "}\n"
    )


def test_coefficients_that_round_must_be_asked_for() -> None:
    g = cook_toom(4, 3).g
    with pytest.raises(ValueError, match="not exact in float"):
        emit_transform("g", g)
    assert "0.16666667f" in emit_transform("g", g, rounded=True)
    assert "0.16666666666666666" in emit_transform("g", g, rounded=True, scalar="double")


def test_zeros_copies_and_repeats() -> None:
    a = matrix([[0, 0], [1, 0], [-1, 0], [1, 2], [1, 2], [2, 4]])
    assert compile_matrix(a).matrix() == a
    assert compile_matrix(a).count().total == 3
    assert "y[0] = T(0.0f);" in emit_transform("zero", a)


ON_A_CPU = """
#define POLYCONV_INLINE inline __attribute__((always_inline))
POLYCONV_INLINE float mul_add(float x, float c, float y) { return x * c + y; }
POLYCONV_INLINE float mul_sub(float x, float c, float y) { return x * c - y; }
POLYCONV_INLINE double mul_add(double x, double c, double y) { return x * c + y; }
POLYCONV_INLINE double mul_sub(double x, double c, double y) { return x * c - y; }
typedef float V __attribute__((vector_size(16)));
POLYCONV_INLINE V mul_add(V x, float c, V y) { return x * c + y; }
POLYCONV_INLINE V mul_sub(V x, float c, V y) { return x * c - y; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_text_compiles_and_computes_the_matrix(tmp_path: Path) -> None:
    """For float, double and a vector of four floats; in place, and accumulating onto old outputs."""
    f = cook_toom(4, 5)
    accumulate = tuple(a + b for a, b in zip(identity(4), f.at, strict=True))
    cases = {"bt": f.bt, "at": f.at, "g": f.g, "b": transpose(f.bt), "pair": f.bt[3:5], "accumulate": accumulate}
    text = ON_A_CPU
    for name, a in cases.items():
        text += emit_transform(name, a, rounded=True) + emit_transform(f"{name}_d", a, scalar="double", rounded=True)
        for type_, suffix, function in (("float", "f", name), ("double", "d", f"{name}_d"), ("V", "v", name)):
            text += f'extern "C" void {name}_{suffix}x({type_}* x) {{ {function}<{type_}>(x, x); }}\n'
    source, library = tmp_path / "transforms.cpp", tmp_path / "transforms.so"
    source.write_text(text)
    flags = ["-O1", "-Wall", "-Werror", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    generator = np.random.default_rng(0)
    for name, a in cases.items():
        exact = np.array(a, dtype=np.float64)
        for suffix, dtype, lanes in (("f", np.float32, 1), ("d", np.float64, 1), ("v", np.float32, 4)):
            x = np.zeros((max(exact.shape), lanes), dtype)
            assert x.ctypes.data % 16 == 0  # for the vector type
            x[: exact.shape[1]] = generator.standard_normal((exact.shape[1], lanes))
            expected = exact @ x[: exact.shape[1]].astype(np.float64)
            scale = np.abs(exact) @ np.abs(x[: exact.shape[1]].astype(np.float64))
            getattr(loaded, f"{name}_{suffix}x")(ctypes.c_void_p(x.ctypes.data))
            error = np.abs(x[: exact.shape[0]] - expected)
            assert (error <= 4 * np.finfo(dtype).eps * scale).all(), (name, suffix)
