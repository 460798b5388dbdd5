"""Kernel parameters that the geometry fixes: fields with one value for every input of the exported convolution.

They are found by sampling, not declared: the convolution is planned at several batches, image sizes, strides and
devices, and a field that is equal in all launches becomes a constant of the file.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from ...cuda.planner import kernel_params
from ...cuda.planner.candidate import CudaCandidate
from ...cuda.planner.plan import Launch
from ...cuda.planner.planner import DEFAULT_WORKSPACE
from ...cuda.planner.winograd.wgrad import WinogradWgradOutputParams, WinogradWgradParams
from ...problem import Pass, Problem, Strides, channels_last_strides, contiguous_strides

_NEVER = {"zero", "first_plane", "first_row", "first_part"}
"""Fields that stay parameters even if all launches agree: ``zero`` must be unknown to the compiler, and the start of a
slab is 0 until an image is large enough for a second one."""
_CLASSED = (WinogradWgradParams, WinogradWgradOutputParams)
"""Structs with tables that have an element per class of taps."""


def variations(problem: Problem) -> Iterator[Problem]:
    """The convolution at other sizes and strides. Tensors that the file allocates are dense; its inputs may not be."""
    n, c, (height, width) = problem.batch, problem.in_channels, problem.in_size
    low, short = (dilation * (taps - 1) + 1 for dilation, taps in zip(problem.dilation, problem.kernel, strict=True))
    smaller = [(1, low + 3, short + 5), (2, low + 40, short + 90), (1, low + 300, short)]
    sizes = [(n, height, width), (n + 3, height + 13, 5 * width + 10), *smaller]
    wide = 1023 * problem.stride[1] + short - sum(problem.padding[2:])  # input width for 1024 outputs
    sizes.append((24, 517, 1024 if problem.kind is Pass.DGRAD else wide))  # many output rows of whole vectors
    for batch, h, w in sizes:
        x, y = (batch, c, h, w), replace(problem, batch=batch, in_size=(h, w)).y_shape
        for given in (contiguous_strides, channels_last_strides, _expanded):
            x_strides = contiguous_strides(x) if problem.kind is Pass.DGRAD else given(x)
            y_strides = contiguous_strides(y) if problem.kind is Pass.FPROP else given(y)
            for aligned in (True, False):
                yield replace(
                    problem,
                    batch=batch,
                    in_size=(h, w),
                    x_strides=x_strides,
                    y_strides=y_strides,
                    vector_aligned=aligned,
                )


def _expanded(shape: tuple[int, ...]) -> Strides:
    return (0, 0, 0, 0)


def launches(candidate: CudaCandidate, problem: Problem) -> list[Launch]:
    """Launches of a candidate for all variations that it accepts, on two device sizes and workspaces."""
    found: list[Launch] = []
    for other in variations(problem):
        if candidate.refusal(other) is None:
            for sms, workspace in ((80, DEFAULT_WORKSPACE), (30, 2**25)):
                found += _distinct(candidate.schedule(other, sms, workspace).launches)
    return found


def _distinct(of_schedule: Iterable[Launch]) -> Iterator[Launch]:
    """The first two launches and the last of each kernel: the slabs between them differ only in where they begin."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in of_schedule:
        by_kernel.setdefault(launch.kernel.symbol, []).append(launch)
    for alike in by_kernel.values():
        yield from {id(launch): launch for launch in (*alike[:2], alike[-1])}.values()


def struct_of(launch: Launch) -> type[ctypes.Structure]:
    assert launch.kernel.struct is not None
    return launch.kernel.struct


def fixed_fields(all_launches: Iterable[Launch], alone: bool = False) -> dict[str, dict[str, str]]:
    """Struct -> field -> value (C++ text), for the fields that are equal in all launches.

    ``alone``: of tables with an element per class of taps, the first element is the only one that is used.
    """
    found: dict[str, dict[str, str]] = {}
    for launch in all_launches:
        struct = struct_of(launch)
        params = struct.from_buffer_copy(launch.params)
        bound = {slot.offset for slot in launch.pointers}
        if struct.__name__ not in found:
            texts = {
                name: _text(struct, name, params, bound, alone) for name, *_ in struct._fields_ if name not in _NEVER
            }
            found[struct.__name__] = {name: text for name, text in texts.items() if text is not None}
        fields = found[struct.__name__]
        for name in [name for name, text in fields.items() if text != _text(struct, name, params, bound, alone)]:
            del fields[name]
    return found


def _text(
    struct: type[ctypes.Structure], name: str, params: ctypes.Structure, bound: set[int], alone: bool
) -> str | None:
    value = getattr(params, name)
    if alone and struct in _CLASSED and isinstance(value, ctypes.Array):
        value = value[0]
    if isinstance(value, kernel_params.FastDivisor):
        return str(value.divisor)
    if getattr(struct, name).offset in bound:
        return None
    if _types(struct)[name] is kernel_params.pointer:
        return "false"
    return str(value) if isinstance(value, int) else None


@cache
def _types(struct: type[ctypes.Structure]) -> dict[str, type]:
    return {name: kind for name, kind, *_ in struct._fields_}


def without_fields(struct: str, fixed: Iterable[str]) -> str:
    """The C++ text of a struct without its fixed fields."""
    gone = set(fixed)
    kept = []
    for line in struct.splitlines():
        found = re.match(r"  ((?:const )?\w+\*?) ([^;]*);(.*)", line)
        if found is None or "(" in line.partition(";")[0]:
            kept.append(line)
            continue
        kind, names, comment = found.groups()
        left = [name for name in re.split(r",\s*", names) if re.sub(r"\W.*", "", name) not in gone]
        if left:
            kept.append(f"  {kind} {', '.join(left)};{comment}")
    return "\n".join(kept) + "\n"
