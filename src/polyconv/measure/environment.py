"""Environment variables that PyTorch and its libraries read when loaded, so they must be set before."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""PyTorch puts large tensors on huge pages if this is 1 when its first tensor is made."""
MALLOC = "GLIBC_TUNABLES"
MALLOC_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Value with which C's ``malloc`` does the same, for libraries that do not allocate through PyTorch."""

ISAS: dict[str, dict[str, str]] = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse4": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""Variables that limit PyTorch's libraries to an instruction set, by the native kernels' name for it."""


def wanted(isa: str | None) -> dict[str, str]:
    """Variables of a benchmark that are not set yet. An existing huge-page setting is respected."""
    return ({} if HUGE_PAGES in os.environ else {HUGE_PAGES: "1"}) | limits(isa)


def for_any_library(threads: int) -> dict[str, str]:
    """Variables of a process whose libraries get ``threads`` threads, and huge pages if PyTorch gets them here."""
    pages = os.environ.get(HUGE_PAGES) == "1"
    tunables = ":".join(filter(None, [os.environ.get(MALLOC), MALLOC_HUGE_PAGES]))
    return {"OMP_NUM_THREADS": str(threads)} | ({MALLOC: tunables} if pages else {})


def limits(isa: str | None) -> dict[str, str]:
    """Variables that limit PyTorch to an instruction set and are not set yet."""
    variables = ISAS[isa] if isa is not None else {}
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def is_limited() -> bool:
    """Whether the variables of this process limit PyTorch to an instruction set."""
    return any(not limits(isa) for isa in ISAS)


def start_anew(variables: Mapping[str, str]) -> None:
    """Restart this program with the same arguments and additional variables."""
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})
