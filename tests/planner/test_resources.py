"""Every kernel of every plan, compiled for every generation: no spills, no warnings, one struct."""

from __future__ import annotations

import logging

import pytest

from compiled_kernels import compiled
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner import KernelSpec, all_kernels


@pytest.mark.parametrize(
    ("spec", "arch"), [pytest.param(spec, arch, id=f"{spec.symbol}-{arch}") for spec, arch in compiled()]
)
def test_compiles_without_spills(spec: KernelSpec, arch: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="polyconv.cuda.jit.compile"):
        info = kernel_info(KernelCache().get(spec, arch), spec.symbol)
    assert info.stack == 0, f"{info.stack} bytes of registers are spilled at {info.registers} registers"
    assert info.max_threads == spec.threads
    assert info.params_bytes == spec.params_bytes
    assert not caplog.records, "the compiler warns"
    if arch == "sm_70":
        assert info.registers * spec.threads * spec.min_blocks <= 65536, "fewer blocks per multiprocessor than planned"


def test_symbols_are_unique() -> None:
    symbols = [spec.symbol for spec in all_kernels()]
    assert len(set(symbols)) == len(symbols)
