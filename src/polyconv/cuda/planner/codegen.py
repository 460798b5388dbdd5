"""Compile-time assertions in each generated source that host and device agree.

A plan fills a kernel's parameters byte by byte, and cuts the work by constants that the device headers define as well
(``KernelSpec.facts``). Where the two differ, the kernel does not compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from .epilogue import EpilogueParams
from .plan import KernelSpec

_DISAGREE = "host and device disagree about"


def source(spec: KernelSpec) -> str:
    """CUDA source that instantiates the kernel and asserts the planner's assumptions, and nothing else."""
    return (
        f'#include "{spec.stem}.cuh"\n#include "common/field_check.cuh"\n\n'
        + "".join(axis.text() + "\n" for axis in dict.fromkeys(spec.axes))
        + f"{assertions(spec.struct, spec.params, spec.params_bytes, spec.facts)}\n{spec.entry()}"
    )


@lru_cache(maxsize=128)
def assertions(
    struct: type[ctypes.Structure] | None, params: str, params_bytes: int, facts: tuple[tuple[str, int], ...] = ()
) -> str:
    """C++ assertions for a kernel's parameters (macro in common/field_check.cuh) and its ``facts``. Without ``struct``
    only the size is asserted."""
    lines = [size_assertion(params, params_bytes)]
    if struct is not None:
        lines += [f"POLYCONV_FIELD(polyconv::{field});" for field in _fields(struct)]
        if (start := ctypes.sizeof(struct)) < params_bytes:
            lines += [f"POLYCONV_FIELD({params}, {field});" for field in _own_fields(EpilogueParams, start)]
    lines += [f'static_assert({name} == {value}, "{_DISAGREE} {name}");' for name, value in facts]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def size_assertion(params: str, params_bytes: int) -> str:
    """C++ assertion of a parameter's size."""
    return f'static_assert(sizeof({params}) == {params_bytes}, "{_DISAGREE} {params}");'


def _fields(struct: type[ctypes.Structure]) -> Iterator[str]:
    """Struct, name, offset and size of every field, nested structs first."""
    for _, kind, *_ in struct._fields_:
        element: Any = kind._type_ if issubclass(kind, ctypes.Array) else kind
        if issubclass(element, ctypes.Structure):
            yield from _fields(element)
    yield from (f"{struct.__name__}, {field}" for field in _own_fields(struct))


def _own_fields(struct: type[ctypes.Structure], start: int = 0) -> Iterator[str]:
    """Name, offset and size of the fields of a struct that begins ``start`` bytes into the parameter."""
    for name, kind, *_ in struct._fields_:
        yield f"{name}, {start + getattr(struct, name).offset}, {ctypes.sizeof(kind)}"
