"""What host and device must agree on, as assertions for the compiler: in every generated source, what it depends on.

A plan fills a kernel's parameters byte by byte (:mod:`polyconv.plan.layout`), and cuts the work by numbers that the
device headers have as well. Where the two differ the kernel does not compile, and the compiler says what differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from . import layout
from .chain import CHUNK
from .epilogue import ACTIVATIONS
from .gather import BORDERS
from .layout import MAX_CLASSES, MAX_PARTS, MAX_PHASES, TENSOR_CLASSES, EpilogueParams
from .tensor import CHUNK as TENSOR_CHUNK
from .tensor import K_TILE, PARTS, UNITS
from .tiles import CARRY, GemmTile, MatrixTile
from .toom_wgrad import INTERLEAVES, SLICES_PER_GROUP, STATE_BYTES, TILE_CHUNK

_GEMM = {"polyconv::kDepth": GemmTile.depth}
_PHASES = {"polyconv::kMaxPhases": MAX_PHASES}
_BORDERS = {f"int(polyconv::Border::k{mode.value.title()})": number for mode, number in BORDERS.items()}
_ACTIVATIONS = {f"int(polyconv::Activation::k{name.value.title()})": number for name, number in ACTIVATIONS.items()}
_HALO = {"polyconv::kCarry": CARRY, **_BORDERS}
_HALVES = {"polyconv::kMaxParts": MAX_PARTS, "polyconv::kChannelChunk": CHUNK}

_TENSOR = {
    "polyconv::kTensorClasses": TENSOR_CLASSES,
    "polyconv::kMagnitudeParts": PARTS,
    "polyconv::kTensorK": K_TILE,
    "polyconv::kTensorUnits": UNITS,
    "polyconv::kTensorChannels": TENSOR_CHUNK,
}

_TOOM_WGRAD = {
    "polyconv::kChunk": TILE_CHUNK,
    "polyconv::kMaxInterleave": max(INTERLEAVES),
    "polyconv::kMaxClasses": MAX_CLASSES,
    "sizeof(polyconv::ToomWgradState)": STATE_BYTES,
}

_DISAGREE = "host and device disagree about"

_NUMBERS: dict[str, dict[str, int]] = {
    "gather_gemm": {**_GEMM, **_PHASES, **_BORDERS},
    "pack_weights": {**_GEMM, **_PHASES},
    "tensor_gather": {"polyconv::kMatrixDepth": MatrixTile.depth, **_PHASES, **_BORDERS},
    "tensor_wgrad": {"polyconv::kMatrixDepth": MatrixTile.depth, **_BORDERS},
    "wgrad_gemm": {**_GEMM, **_BORDERS},
    "pointwise_wgrad": _GEMM,
    "depthwise": {**_HALO, **_PHASES},
    "depthwise_wgrad": _HALO,
    "transform_weights": _HALVES,
    "half_transform": _HALVES,
    "half_gemm": _HALVES,
    "half_inverse": _HALVES,
    "tensor_weights": _TENSOR,
    "tensor_transform": _TENSOR,
    "tensor_product": _TENSOR,
    "toom_wgrad": _TOOM_WGRAD,
    "toom_wgrad_tensor": {"polyconv::kMagnitudeParts": PARTS, **_TOOM_WGRAD},
    "toom_wgrad_finish": {"polyconv::kSlicesPerGroup": SLICES_PER_GROUP, "polyconv::kMaxTapClasses": MAX_CLASSES},
}
"""By the header of a kernel: what its launches count with, and the value that they have for it."""


@lru_cache(maxsize=128)
def assertions(stem: str, params: str, params_bytes: int, facts: tuple[tuple[str, int], ...] = ()) -> str:
    """The C++ for a kernel of this header whose one parameter has this type (kernels/layout.cuh has the macro), and
    for what is planned of this instance of it.

    A struct that is not in :mod:`polyconv.plan.layout` belongs to a kernel from elsewhere: its size alone is known.
    """
    inner, has_epilogue = _without_epilogue(params)
    numbers = {**_NUMBERS.get(stem, {}), **(_ACTIVATIONS if has_epilogue else {}), **dict(facts)}
    lines = [size_assertion(params, params_bytes)]
    namespace, _, name = inner.rpartition("::")
    struct = getattr(layout, name, None) if namespace == "polyconv" else None
    if struct is not None:
        lines += [f"POLYCONV_FIELD(polyconv::{field});" for field in _fields(struct)]
    if has_epilogue:
        start = params_bytes - ctypes.sizeof(EpilogueParams)
        lines += [f"POLYCONV_FIELD({params}, {field});" for field in _own_fields(EpilogueParams, start)]
    lines += [f'static_assert({name} == {value}, "{_DISAGREE} {name}");' for name, value in numbers.items()]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def size_assertion(params: str, params_bytes: int) -> str:
    """That a parameter has so many bytes."""
    return f'static_assert(sizeof({params}) == {params_bytes}, "{_DISAGREE} {params}");'


def _without_epilogue(params: str) -> tuple[str, bool]:
    """The name of a kernel's own struct, and whether an epilogue's stands behind it."""
    inner = params.removeprefix("polyconv::WithEpilogue<").removesuffix(">")
    return inner, inner != params


def _fields(struct: type[ctypes.Structure]) -> Iterator[str]:
    """Struct, name, offset and bytes of every field, those of the structs in it first."""
    for _, kind, *_ in struct._fields_:
        element: Any = kind._type_ if issubclass(kind, ctypes.Array) else kind
        if issubclass(element, ctypes.Structure):
            yield from _fields(element)
    yield from (f"{struct.__name__}, {field}" for field in _own_fields(struct))


def _own_fields(struct: type[ctypes.Structure], start: int = 0) -> Iterator[str]:
    """Name, offset and bytes of the fields of a struct that begins so many bytes behind the parameter."""
    for name, kind, *_ in struct._fields_:
        yield f"{name}, {start + getattr(struct, name).offset}, {ctypes.sizeof(kind)}"
