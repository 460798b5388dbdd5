"""``ctypes`` mirrors of the kernels' parameter structs, read from the device headers that declare them.

Each generated kernel source asserts the name, offset and size of every field (:mod:`polyconv.cuda.planner.codegen`), so
the compiler checks what :func:`declared` read. Pointers are zero here and filled in per call
(:class:`~polyconv.cuda.planner.plan.PointerSlot`).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ...algebra.polyphase import Phase
from ...problem import Extents, Strides
from ...selection import PlanError
from .plan import Launch, PointerSlot

MAX_PHASES = 8
"""Phases per axis in one launch (``kMaxPhases`` in common/common.cuh)."""
PHASE_FACTS = {"polyconv::kMaxPhases": MAX_PHASES}
DIVIDEND_LIMIT = 2**31
"""Exclusive upper bound of :class:`FastDivisor` dividends, and so of flattened pixel indices."""

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
"""Folder of the device headers. They are plain files, because NVRTC reads them by path."""

pointer = c_uint64
_KINDS: dict[str, Any] = {"int": c_int32, "u32": c_uint32, "i64": c_int64}
"""Types of fields by their C++ names, structs included."""


def int32(value: int, what: str) -> int:
    """Return ``value``; raise a PlanError that calls it ``what`` if it does not fit the kernels' 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise PlanError(f"{what} is {value}; polyconv's CUDA kernels take at most {2**31 - 1}")
    return value


class Params(ctypes.Structure):
    """A struct that raises a PlanError for an int too large for its field, which ``ctypes`` alone would truncate. An
    int assigned to a :class:`FastDivisor` field is converted."""

    def __init_subclass__(cls) -> None:
        _KINDS.setdefault(cls.__name__, cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is int and isinstance(getattr(self, name), FastDivisor):
            value = FastDivisor.of(value)
        super().__setattr__(name, value)
        if type(value) is int and getattr(self, name) != value:
            raise PlanError(
                f"{name} of {type(self).__name__} is {value}: more than its field in the CUDA kernels holds"
            )

    def place(self, name: str, strides: Strides, what: str) -> None:
        """Fill in the stride fields that begin with ``name``; errors call the tensor ``what``."""
        every = (*strides[:2], *pixel_strides(strides, what))
        for axis, stride in zip(("batch", "channel", "row", "column"), every, strict=True):
            setattr(self, f"{name}_{axis}", stride)


def pixel_strides(strides: Strides, what: str) -> Extents:
    """Row and column stride; raises a PlanError if either exceeds 32 bits."""
    return int32(strides[2], f"the row stride of {what}"), int32(strides[3], f"the column stride of {what}")


def declared(header: str, name: str, **lengths: int) -> type[Params]:
    """Struct ``name``, or template ``nameOf``, as a header declares it.

    ``lengths``: values of the constants that are lengths of arrays. Its base, and structs in it, are declared before.
    """
    text = (KERNELS / f"{header}.cuh").read_text(encoding="utf-8")
    found = re.search(rf"^struct {name}(?:Of)?(?: : (\w+?)(?:Of<\w+>)?)? {{$(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert found, f"{header}.cuh declares no struct {name}"
    fields: list[tuple[str, Any]] = []
    for kind, star, names in re.findall(r"(?:const )?(\w+)(\*)? ([^;]+);", re.sub("//.*", "", found[2])):
        element = pointer if star else _KINDS[kind]
        for field in names.split(","):
            label, _, length = field.strip(" ]\n").partition("[")
            factors = [lengths[one] if one in lengths else int(one) for one in length.split(" * ") if one]
            fields.append((label, element * prod(factors) if factors else element))
    return _class(name, _KINDS[found[1]] if found[1] else Params, {"_fields_": tuple(fields)})


def half_structs(struct: type[Params]) -> dict[str, type[Params]]:
    """Structs with the same fields for 16-bit tensors, by dtype. The headers derive them from one template."""
    names = {"float16": f"Half{struct.__name__}", "bfloat16": f"BFloat16{struct.__name__}"}
    found = {}
    for dtype, name in names.items():
        found[dtype] = _class(name, struct, {})
    return found


def _class(name: str, base: type[Params], members: dict[str, Any]) -> type[Params]:
    """Make a class and a name of it in the family's module, by which plans can be pickled."""
    module = sys._getframe(2).f_globals
    made = module[name] = type(name, (base,), {**members, "__module__": module["__name__"]})
    return made


class FastDivisor(Params):
    """Division by an invariant as one high multiplication and a shift, exact for dividends below 2^31."""

    _fields_ = (("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32))

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        if divisor <= 1:
            return cls(1, 0, 0)
        power = 31 + (divisor - 1).bit_length()
        return cls(divisor, ((1 << power) + divisor - 1) // divisor, power - 32)


AxisPhase = declared("common/common", "AxisPhase")


def axis_phase(phase: Phase) -> Params:
    return AxisPhase(*(getattr(phase, field[0]) for field in AxisPhase._fields_))


def set_phases(p: Params, h: tuple[Phase, ...], w: tuple[Phase, ...]) -> None:
    """Fill in the phases of one launch. All phases of an axis share one tap step."""
    for i, phase in enumerate(h):
        p.phase_h[i] = axis_phase(phase)
    for i, phase in enumerate(w):
        p.phase_w[i] = axis_phase(phase)
    p.phases_w, p.tap_step_h, p.tap_step_w = len(w), h[0].tap_step, w[0].tap_step


def slots(struct: type[ctypes.Structure], **buffers: str | tuple[str, int] | None) -> tuple[PointerSlot, ...]:
    """Pointer slots of a struct: per field a buffer, or a buffer and a byte offset; None leaves the field null."""
    found = []
    for name, buffer in buffers.items():
        if buffer is not None:
            where, offset = buffer if isinstance(buffer, tuple) else (buffer, 0)
            found.append(PointerSlot(getattr(struct, name).offset, where, offset))
    return tuple(found)


def slots_within(
    struct: type[ctypes.Structure], name: str, of_field: tuple[PointerSlot, ...]
) -> tuple[PointerSlot, ...]:
    """Pointer slots of a struct that is the field ``name`` of another one."""
    start = getattr(struct, name).offset
    return tuple(replace(slot, offset=start + slot.offset) for slot in of_field)


def with_fields(launch: Launch, fields: Mapping[str, int]) -> Launch:
    """The launch with these parameters, among them those that a launch for a 2-D problem does not have."""
    struct = launch.kernel.struct
    assert struct is not None
    p = struct.from_buffer_copy(launch.params.ljust(launch.kernel.params_bytes, b"\0"))
    for field, value in fields.items():
        setattr(p, field, value)
    return replace(launch, params=bytes(p) + launch.params[ctypes.sizeof(p) :])
