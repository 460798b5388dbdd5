"""Parameter structs: the fast division of kernels, and equal layouts on host and device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyconv.cuda.errors import CompileError
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.planner import KernelSpec, codegen, kernel_params
from polyconv.cuda.planner.codegen import source
from polyconv.cuda.planner.depthwise import strip
from polyconv.cuda.planner.epilogue import EpilogueParams
from polyconv.cuda.planner.implicit_gemm import wgrad as implicit_gemm_wgrad
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import ImplicitGemmParams
from polyconv.cuda.planner.implicit_gemm.wgrad import SplitKReduceParams
from polyconv.cuda.planner.planner import all_kernels
from polyconv.cuda.planner.winograd import nonfused
from polyconv.cuda.planner.winograd import wgrad as winograd_wgrad
from polyconv.problem import Pass


def quotient(dividend: int, by: kernel_params.FastDivisor) -> int:
    return dividend if by.divisor == 1 else (dividend * by.multiplier >> 32) >> by.shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_fast_divisor_is_exact_below_2_to_31(dividend: int, divisor: int) -> None:
    by = kernel_params.FastDivisor.of(divisor)
    assert quotient(dividend, by) == dividend // divisor


@given(st.integers(1, 2**31 - 1))
def test_fast_divisor_at_its_edges(divisor: int) -> None:
    by = kernel_params.FastDivisor.of(divisor)
    last = (2**31 - 1) // divisor * divisor
    for dividend in (0, divisor - 1, divisor, last - 1, last, 2**31 - 1):
        assert quotient(dividend, by) == dividend // divisor


def test_structs_fit_the_driver_limit_for_kernel_parameters() -> None:
    assert all(spec.params_bytes <= 4096 for spec in all_kernels())


def test_slots_point_at_the_pointer_fields() -> None:
    (slot,) = kernel_params.slots(ImplicitGemmParams, written=("y", 16))
    assert (slot.offset, slot.buffer, slot.byte_offset) == (32, "y", 16)


# ---- the compile-time assertions


def test_every_struct_is_asserted_by_a_kernel() -> None:
    told = "".join(source(spec) for spec in all_kernels())
    for struct in structs(kernel_params.Params):
        for field, *_ in struct._fields_:  # type: ignore[misc]
            owners = "|".join(one.__name__ for one in (struct, *struct.__subclasses__()))  # kernels of 16-bit tensors
            owner = r"polyconv::WithEpilogue<\S+>" if struct is EpilogueParams else f"polyconv::(?:{owners})"
            assert re.search(rf"POLYCONV_FIELD\({owner}, {field}, \d+, \d+\);", told), f"{struct.__name__}.{field}"


def structs(base: type[kernel_params.Params]) -> Iterator[type[kernel_params.Params]]:
    """All parameter structs of the package."""
    for struct in base.__subclasses__():
        if struct.__module__.startswith("polyconv."):
            yield struct
            yield from structs(struct)


def test_fields_that_changed_places_do_not_compile() -> None:
    """Two fields of equal size are swapped: the struct's size and every other field stay."""
    fields = dict(SplitKReduceParams._fields_)  # type: ignore[arg-type]
    order = [{"slices": "columns", "columns": "slices"}.get(name, name) for name in fields]
    swapped = type(
        "SplitKReduceParams", (kernel_params.Params,), {"_fields_": [(name, fields[name]) for name in order]}
    )
    assert ctypes.sizeof(swapped) == ctypes.sizeof(SplitKReduceParams)
    with pytest.raises(CompileError, match=r"host and device disagree about polyconv::SplitKReduceParams::slices"):
        compile_kernel(replace(implicit_gemm_wgrad.REDUCE, struct=swapped), "sm_70")


def test_a_moved_field_of_an_epilogue_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(spec for spec in all_kernels() if spec.twin)
    swapped = type("EpilogueParams", (kernel_params.Params,), {"_fields_": EpilogueParams._fields_[::-1]})
    monkeypatch.setattr(codegen, "EpilogueParams", swapped)
    codegen.assertions.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"disagree about polyconv::WithEpilogue<\S+>::residual"):
            compile_kernel(kernel, "sm_70")
    finally:
        codegen.assertions.cache_clear()


@pytest.mark.parametrize(
    "kernel",
    [strip.CANDIDATES[Pass.FPROP, "float32"][0].kernel, nonfused.gemm_kernel(nonfused.F23, 16), winograd_wgrad.SUM],
)
def test_a_number_of_one_instance_that_changed_does_not_compile(kernel: KernelSpec) -> None:
    (name, value), *others = kernel.facts
    with pytest.raises(CompileError, match=re.escape(f"host and device disagree about {name}")):
        compile_kernel(replace(kernel, facts=((name, value + 1), *others)), "sm_70")


def test_of_a_struct_from_elsewhere_the_size_is_asserted_whatever_it_is_called() -> None:
    assert codegen.assertions(None, "Params", 16) == f"{codegen.size_assertion('Params', 16)}\n"
