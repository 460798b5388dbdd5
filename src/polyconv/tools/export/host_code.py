"""Launch code per kernel family in an exported file: its text in ``host/`` and the C++ call into it.

The fallback is the direct kernels, which every file contains: for a family without a host text, or a problem that the
text does not support (several phases, say).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from types import ModuleType

from ...algebra.polyphase import DenseAxis
from ...cuda.planner.candidate import CudaCandidate
from ...cuda.planner.depthwise.strip import COLUMNS, StripCandidate, StripWgradCandidate
from ...cuda.planner.device import CudaDevice
from ...cuda.planner.implicit_gemm.fprop_dgrad import roles
from ...cuda.planner.planner import DEFAULT_WORKSPACE, FAMILIES, choose, weigh
from ...cuda.planner.winograd.axis import ToomAxis
from ...cuda.planner.winograd.fused import FusedCandidate
from ...cuda.planner.winograd.nonfused import NonfusedCandidate
from ...cuda.planner.winograd.nonfused_tiling import gemm_blocks, segments_of
from ...cuda.planner.winograd.wgrad import WinogradWgradCandidate, lattices
from ...cuda.planner.winograd_fp16x3 import fused, nonfused, wgrad
from ...cuda.planner.winograd_fp16x3.nonfused import M8N8K4, Fp16x3Candidate, headroom
from ...problem import Pass, Problem

ANYWHERE = tuple(family for family in FAMILIES if family not in (nonfused, wgrad, fused))
"""Families whose kernels run on every GPU that an exported file supports."""
LAUNCHED = (*ANYWHERE, nonfused)
"""Families to choose from with tensor cores. The fp16x3 weight gradient and fused kernel have no host text yet: the
direct kernels, their fallback, would be slower than the next best family."""
NAMES = {Pass.FPROP: "forward", Pass.DGRAD: "input_gradient", Pass.WGRAD: "weight_gradient"}


@dataclass(frozen=True)
class Launching:
    """Implementation of one of the three entry points of a file."""

    hosts: tuple[str, ...]
    """Stems of texts in ``host/``, in this order."""
    call: str
    """C++ expression in terms of ``*call``."""
    candidates: tuple[CudaCandidate, ...] = ()
    """Candidates whose kernels it launches besides the direct ones."""
    about: str = "by the direct kernels"
    """Description for the file's docstring."""
    constants: dict[str, str] = field(default_factory=dict)
    """Values of the constants in the host texts; names of tables end in ``[]``."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the kernels' tables [elements]."""
    shared: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter structs that are derived from ``Call``: their fields that it provides -> C++ expression."""


def chosen_for(problem: Problem, device: CudaDevice, families: tuple[ModuleType, ...] = ANYWHERE) -> CudaCandidate:
    """The planner's choice among ``families``."""
    return choose(problem, device, families=families).chosen


def launching(problem: Problem, chosen: CudaCandidate, device: CudaDevice) -> Launching:
    """Implementation of a pass by the chosen candidate, or by the direct kernels if no host text supports it."""
    if isinstance(chosen, Fp16x3Candidate):
        return _tensor(problem, chosen, device)
    if isinstance(chosen, NonfusedCandidate) and (found := _separable(problem, chosen, device)):
        return found
    if isinstance(chosen, WinogradWgradCandidate):
        return _toom_wgrad(problem, chosen, device)
    if isinstance(chosen, FusedCandidate) and (found := _fused(problem, chosen)):
        return found
    if isinstance(chosen, StripCandidate | StripWgradCandidate) and (found := _strips(problem, chosen)):
        return found
    return Launching((), f"direct_{NAMES[problem.kind]}(*call)")


def axis_name(axis: ToomAxis) -> str:
    """Struct name of an axis: ``F45`` for F(4,5), ``F45x2`` for two summed segments, ``F45Nested`` if nested."""
    if axis.is_direct:
        return "Direct"
    several = "Nested" if axis.tiles > 1 else f"x{len(axis.segments)}" if len(axis.segments) > 1 else ""
    return f"F{axis.m}{axis.longest}{several}"


def _axis_constants(name: str, h: DenseAxis, w: DenseAxis) -> dict[str, str]:
    """Numbers of both axes, and the tables of their tap classes, which are named after the direction ``name``."""
    axes = {"H": h, "W": w}
    return {
        **{f"kLattices{letter}": str(axis.dilation) for letter, axis in axes.items()},
        **{f"kReadStep{letter}": str(axis.read_step) for letter, axis in axes.items()},
        **{f"kClasses{letter}": str(len(axis.classes)) for letter, axis in axes.items()},
        **{f"k{name}{letter}[]": _table(axis) for letter, axis in axes.items()},
    }


def _table(axis: DenseAxis) -> str:
    rows = (f"{{{c.read_first}, {c.taps}, {c.tap_first}, {c.tap_stride}}}" for c in axis.classes)
    return f"{{{', '.join(rows)}}}"


def _only_pair(problem: Problem) -> tuple[DenseAxis, DenseAxis] | None:
    """The two axes, or None if a stride splits the pass into several correlations: the host texts launch one. An axis
    of one pixel has one phase whatever the stride, but a file serves any size."""
    if problem.kind is Pass.DGRAD and problem.stride != (1, 1):
        return None
    (pair,) = roles(problem).pairs
    return pair


def _direction(problem: Problem, h: DenseAxis, w: DenseAxis) -> tuple[str, dict[str, str]]:
    """Call and direction as arguments of the host texts, and the constants that these need."""
    name, call = ("Forward", "*call") if problem.kind is Pass.FPROP else ("Gradient", "exchanged(*call)")
    return f"{call}, k{name}", _axis_constants(name, h, w)


def _separable(problem: Problem, chosen: NonfusedCandidate, device: CudaDevice) -> Launching | None:
    pair = _only_pair(problem)
    if pair is None:
        return None
    h, w = pair
    direction, constants = _direction(problem, h, w)
    segments = segments_of(chosen.h, h.taps), segments_of(chosen.w, w.taps)
    axes = f"{axis_name(chosen.h)}, {axis_name(chosen.w)}"
    numbers = (chosen.k_tile, *segments, gemm_blocks(chosen.w, chosen.k_tile), _resident(problem, chosen, device))
    arguments = f"{axes}, {', '.join(map(str, numbers))}"
    parts = max(len(h.classes) * segments[0], len(w.classes))
    return Launching(
        ("taps", "direction", "winograd_nonfused"),
        f"separable<{arguments}>({direction})",
        (chosen,),
        f"{chosen.h} along H, {chosen.w} along W, one after the other; {chosen.k_tile} channels per block",
        constants,
        {"kMaxParts": parts},
    )


def _resident(problem: Problem, chosen: CudaCandidate, device: CudaDevice) -> int:
    """Size of the slabs that are to stay in L2 [bytes], or 0 if slabs fill the workspace."""
    room = weigh(chosen, problem, device, DEFAULT_WORKSPACE).workspace
    return room if room < DEFAULT_WORKSPACE else 0


def _tensor(problem: Problem, chosen: Fp16x3Candidate, device: CudaDevice) -> Launching:
    """fp16x3 on GPUs that have the instruction in hardware, the direct kernels elsewhere. Without a transform along W,
    the exported file of problem 63 was found to give wrong results on an A100: another family is exported."""
    pair = _only_pair(problem)
    if pair is None or chosen.w.points == 1:
        return launching(problem, chosen_for(problem, device), device)
    h, w = pair
    direction, constants = _direction(problem, h, w)
    mma, nested = chosen.mma, chosen.w.tiles > 1
    steps = mma.steps(chosen.w).replace("polyconv::", "").replace(chosen.w.struct, axis_name(chosen.w))
    numbers = (
        1 if nested else segments_of(chosen.w, w.taps),
        headroom(chosen.w, "input", nested),
        headroom(chosen.w, "weights", nested),
        _resident(problem, chosen, device),
        mma.generations[0],
    )
    arguments = f"{axis_name(chosen.w)}, {steps}, {', '.join(map(str, numbers))}"
    error = chosen.error(problem, device.sms, DEFAULT_WORKSPACE)
    others = "other than" if mma is M8N8K4 else "before"
    return Launching(
        ("taps", "direction", "winograd_fp16x3"),
        f"on_tensor_cores<{arguments}>({direction})",
        (chosen,),
        f"{chosen.w} along W on tensor cores, floats as two halves; expected error {error:.0e}\n"
        f"on GPUs {others} compute capability {mma.generations[0] / 10}: the direct kernels",
        constants,
        {"kTensorClasses": max(len(h.classes), len(w.classes))},
    )


def _toom_wgrad(problem: Problem, chosen: WinogradWgradCandidate, device: CudaDevice) -> Launching:
    h, w = lattices(problem)
    tile = chosen.tile.cpp.removeprefix("polyconv::")
    cut = chosen.work(problem, device.sms, DEFAULT_WORKSPACE)
    classed = str(len(h.classes) * len(w.classes) > 1).lower()
    arguments = f"{axis_name(chosen.h)}, {axis_name(chosen.w)}, {tile}, {cut.interleave}, {classed}"
    numbers = {
        "kWgradThreads": chosen.spec(problem).threads,
        "kWgradShared": chosen.shared_bytes,
        "kWgradPairs": problem.out_channels * chosen.channels(problem),
        "kWgradBlocks": cut.blocks * problem.groups,
        "kWgradElements": chosen.elements(problem, cut),
        "kMostPixels": _most_pixels(problem, chosen, device),
    }
    classes = max(len(h.classes), len(w.classes))
    return Launching(
        ("taps", "winograd_wgrad"),
        f"toom_weight_gradient<{arguments}>(*call)",
        (chosen,),
        f"{chosen.h} along H, {chosen.w} along W, in its transposed form; {chosen.tile.name} channels per block",
        _axis_constants("Forward", h, w) | {name: str(value) for name, value in numbers.items()},
        {"kMaxClasses": classes, "kMaxTapClasses": classes},
    )


def _most_pixels(problem: Problem, chosen: WinogradWgradCandidate, device: CudaDevice) -> int:
    """Output pixels up to which the sums keep the tolerance, found by doubling the batch."""
    batch = problem.batch
    while batch < problem.batch << 20:
        larger = replace(problem, batch=2 * batch)
        if chosen.error(larger, device.sms, DEFAULT_WORKSPACE) > problem.tolerance:
            break
        batch *= 2
    return batch * prod(problem.out_size)


def _fused(problem: Problem, chosen: FusedCandidate) -> Launching | None:
    pair = _only_pair(problem)
    if pair is None:
        return None
    direction, constants = _direction(problem, *pair)
    tile = chosen.tile
    body = chosen.kernel.body.removesuffix("(params);").replace("polyconv::", "")
    for axis in (chosen.h, chosen.w):
        body = body.replace(axis.struct, axis_name(axis))
    kernel, _, rest = body.partition("<")
    axes = f"{axis_name(chosen.h)}, {axis_name(chosen.w)}"
    layout = f"{32 // (tile.lanes_k * tile.lanes_u)}, {tile.each}, {tile.lanes_k}, {tile.thread_k}"
    numbers = f"{layout}, {tile.chunk}, {tile.min_blocks}, {chosen.shared}"
    return Launching(
        ("taps", "direction", "winograd_fused"),
        f'fused_correlation<{rest.removesuffix(">")}, {axes}, {numbers}>({direction}, {body}, "{kernel}")',
        (chosen,),
        f"{chosen.h} along H, {chosen.w} along W, in one kernel; {tile.k} channels x {tile.columns} columns per block",
        constants,
    )


def _strips(problem: Problem, chosen: StripCandidate | StripWgradCandidate) -> Launching | None:
    if chosen.lanes != COLUMNS or (isinstance(chosen, StripCandidate) and chosen.scatters):
        return None
    (h, w), blocks = chosen.taps, chosen.kernel.min_blocks
    if problem.kind is Pass.WGRAD:
        shared = {"StripWgradParams": _call_fields("x", "dy") | {"columns_padded": str(h * w + 1)}}
    else:
        shared = {"StripParams": _call_fields("source", "written")}
    for fields in shared.values() if problem.bias else ():
        fields["bias"] = "p.bias"
    return Launching(
        ("depthwise_strip",),
        f"strip_{NAMES[problem.kind]}<{h}, {w}, {chosen.stride}, {blocks}>(*call)",
        (chosen,),
        f"by summation, {h}x{w} taps in registers, a thread for each strip of a column",
        shared=shared,
    )


def _call_fields(x: str, y: str) -> dict[str, str]:
    """Fields of a strip kernel's parameters that ``Call`` provides. ``x`` and ``y`` are its names of the tensors."""
    found = {x: "p.x", y: "p.y", "w": "p.w", "partial": "p.workspace", "row_strips": "p.row_strips"}
    found |= {"rows": "int(p.out_height)", "columns": "int(p.out_width)", "column_strips": "u32(p.out_width)"}
    for extent in ("height", "width"):
        found |= {
            extent: f"int(p.{extent})",
            f"{x}_{extent}": f"int(p.{extent})",
            f"{y}_{extent}": f"int(p.out_{extent})",
        }
    for own, tensor in ((x, "x"), (y, "y")):
        found |= {f"{own}_{axis}": f"p.{tensor}_{axis}" for axis in ("batch", "channel")}
        found |= {f"{own}_{axis}": f"int(p.{tensor}_{axis})" for axis in ("row", "column")}
    return found
