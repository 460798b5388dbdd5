"""Variables that PyTorch and its libraries read when they are loaded: they have to be set before."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""PyTorch puts large tensors on huge pages where this variable is 1 when its first tensor is made."""

ISAS: dict[str, dict[str, str]] = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse4": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""Instruction set -> what limits PyTorch's libraries to it. Ours are told by their own name for it."""


def wanted(isa: str | None) -> dict[str, str]:
    """The variables that a benchmark wants and that are not set so. Whoever has set the pages has his way."""
    return ({} if HUGE_PAGES in os.environ else {HUGE_PAGES: "1"}) | limits(isa)


def limits(isa: str | None) -> dict[str, str]:
    """Those that limit PyTorch to an instruction set and are not set so."""
    variables = ISAS[isa] if isa is not None else {}
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def start_anew(variables: Mapping[str, str]) -> None:
    """Start this program once more, with the same arguments and these variables."""
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **variables})
