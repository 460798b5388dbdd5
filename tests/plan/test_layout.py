"""Parameter structs: the division that kernels rely on, and that host and device mean the same by every byte."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyconv.cuda.compile import compile_kernel
from polyconv.cuda.errors import CompileError
from polyconv.plan import KernelSpec, assertions, layout, separable, strips, toom_wgrad, wgrad
from polyconv.plan.cuda import all_kernels
from polyconv.problem import Pass


def quotient(dividend: int, by: layout.FastDivisor) -> int:
    return dividend if by.divisor == 1 else (dividend * by.multiplier >> 32) >> by.shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_fast_divisor_is_exact_below_2_to_31(dividend: int, divisor: int) -> None:
    by = layout.FastDivisor.of(divisor)
    assert quotient(dividend, by) == dividend // divisor


@given(st.integers(1, 2**31 - 1))
def test_fast_divisor_at_its_edges(divisor: int) -> None:
    by = layout.FastDivisor.of(divisor)
    last = (2**31 - 1) // divisor * divisor
    for dividend in (0, divisor - 1, divisor, last - 1, last, 2**31 - 1):
        assert quotient(dividend, by) == dividend // divisor


def test_structs_fit_the_driver_limit_for_kernel_parameters() -> None:
    structs = [v for v in vars(layout).values() if isinstance(v, type) and issubclass(v, ctypes.Structure)]
    assert structs
    assert all(ctypes.sizeof(struct) <= 4096 for struct in structs)


def test_slots_point_at_the_pointer_fields() -> None:
    (slot,) = layout.slots(layout.GatherParams, written=("y", 16))
    assert (slot.offset, slot.buffer, slot.byte_offset) == (32, "y", 16)


# ---- what the compiler is told


def test_every_struct_is_asserted_by_a_kernel() -> None:
    told = "".join(spec.source() for spec in all_kernels())
    for name, struct in vars(layout).items():
        if not isinstance(struct, type) or not issubclass(struct, layout.Params) or struct is layout.Params:
            continue
        for field, *_ in struct._fields_:  # type: ignore[misc]
            owner = r"polyconv::WithEpilogue<\S+>" if struct is layout.EpilogueParams else f"polyconv::{name}"
            assert re.search(rf"POLYCONV_FIELD\({owner}, {field}, \d+, \d+\);", told), f"{name}.{field}"


@pytest.fixture
def other_facts() -> Iterator[None]:
    """Whatever a test makes the host believe, nobody believes afterwards."""
    assertions.assertions.cache_clear()
    yield
    assertions.assertions.cache_clear()


@pytest.mark.usefixtures("other_facts")
def test_fields_that_changed_places_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers of the same size: the struct's size and every other field are as before."""
    fields = dict(layout.ReduceParams._fields_)  # type: ignore[arg-type]
    order = [{"slices": "columns", "columns": "slices"}.get(name, name) for name in fields]
    swapped = type("ReduceParams", (layout.Params,), {"_fields_": [(name, fields[name]) for name in order]})
    assert ctypes.sizeof(swapped) == ctypes.sizeof(layout.ReduceParams)
    monkeypatch.setattr(layout, "ReduceParams", swapped)
    with pytest.raises(CompileError, match=r"host and device disagree about polyconv::ReduceParams::slices"):
        compile_kernel(wgrad.REDUCE, "sm_70")


@pytest.mark.usefixtures("other_facts")
def test_a_moved_field_of_an_epilogue_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(spec for spec in all_kernels() if spec.twin)
    swapped = type("EpilogueParams", (layout.Params,), {"_fields_": layout.EpilogueParams._fields_[::-1]})
    monkeypatch.setattr(assertions, "EpilogueParams", swapped)
    with pytest.raises(CompileError, match=r"disagree about polyconv::WithEpilogue<\S+>::residual"):
        compile_kernel(kernel, "sm_70")


@pytest.mark.usefixtures("other_facts")
def test_a_number_that_changed_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "polyconv::kSlicesPerGroup"
    monkeypatch.setitem(assertions._NUMBERS["toom_wgrad_finish"], name, toom_wgrad.SLICES_PER_GROUP + 1)
    with pytest.raises(CompileError, match=f"host and device disagree about {name}"):
        compile_kernel(toom_wgrad.SUM, "sm_70")


@pytest.mark.parametrize("kernel", [strips.CANDIDATES[Pass.FPROP][0].kernel, separable.gemm_kernel(separable.F23, 16)])
def test_a_number_of_one_instance_that_changed_does_not_compile(kernel: KernelSpec) -> None:
    (name, value), *others = kernel.facts
    with pytest.raises(CompileError, match="host and device disagree about polyconv::"):
        compile_kernel(replace(kernel, facts=((name, value + 1), *others)), "sm_70")


def test_of_a_struct_from_elsewhere_the_size_is_asserted_whatever_it_is_called() -> None:
    assert assertions.assertions("axpy", "Params", 16) == f"{assertions.size_assertion('Params', 16)}\n"


def test_numbers_are_of_kernels_that_there_are() -> None:
    assert set(assertions._NUMBERS) <= {spec.stem for spec in all_kernels()}
