"""CUDA text of an exported file: the specialised kernels of its plan and their host functions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ...activation import Activation
from ...algebra.emit import emit_transform
from ...algebra.matrices import Matrix
from ...cuda.planner.device import CudaDevice
from ...cuda.planner.plan import KernelSpec, Launch
from ...cuda.planner.planner import DEFAULT_WORKSPACE
from ...cuda.planner.winograd.axis import ToomAxis, choice_of, index_of
from ...problem import Pass, Problem
from . import parameters
from .epilogue import Epilogue
from .host_code import ANYWHERE, LAUNCHED, NAMES, Launching, axis_name, chosen_for, launching
from .partial_eval.constants import constants_by_part, with_constant_arguments, with_functions_of_constants, with_values
from .partial_eval.fields import with_fixed_parameters, without_assignments
from .partial_eval.folding import folded, simplified, without_copies, without_unused
from .partial_eval.layout import compacted, joined, tidied, with_pragmas_in_line, wrapped
from .partial_eval.scanning import closing, definitions, identifiers, name_of, reachable
from .partial_eval.templates import without_settled_parameters, without_zero_members

_KERNELS = Path(__file__).resolve().parents[2] / "cuda" / "kernels"
_TEXTS = Path(__file__).resolve().parent / "host"
_INCLUDE = re.compile(r'^#include "(.+)\.cuh"\n', re.MULTILINE)
_SMALL = {
    *("common/common", "common/epilogue", "depthwise/strip_tile"),
    *("implicit_gemm/split_k_reduce", "implicit_gemm/tile", "winograd/axis"),
}
_PRELUDE = """\
#include <cstdio>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

"""
_OLDEST = 70
"""Compute capability that every kernel of a file has to compile for."""
WORKSPACE = f"{DEFAULT_WORKSPACE >> 20} << 20"
"""Size of the workspace [bytes] as C++ and Python text: what a file allocates and its host functions divide up."""


@dataclass(frozen=True)
class CudaSource:
    """CUDA source of a layer: ``direct`` for any geometry, followed by ``planned`` for the exported one."""

    direct: str
    planned: str
    calls: dict[str, str]
    """Entry point -> its C++ expression for the exported geometry."""
    launching: dict[Pass, Launching]


def cuda_source(
    problem: Problem,
    device: CudaDevice,
    kinds: Iterable[Pass],
    borders: bool = False,
    tensor_cores: bool = False,
) -> CudaSource:
    """Source for the passes ``kinds`` of a convolution, which replace ``problem.kind``. It is specialised and reduced
    to what their calls reach. Without ``borders`` all padding is zeros."""
    families = LAUNCHED if tensor_cores else ANYWHERE
    functions: dict[Pass, Launching] = {}
    launches: list[Launch] = []
    kinds = tuple(kinds)
    epilogue = Epilogue(problem.activation, always=kinds == (Pass.FPROP,))
    for kind in kinds:
        of_pass = replace(problem, kind=kind, activation=Activation.NONE)
        chosen = chosen_for(replace(problem, kind=kind), device, families)
        functions[kind] = launching(of_pass, chosen, device)
        for candidate in functions[kind].candidates:
            launches += parameters.launches(candidate, of_pass)
    calls = {NAMES[kind]: one.call for kind, one in functions.items()}
    specs = list(dict.fromkeys(launch.kernel for launch in launches))
    axes = {axis.struct: axis for spec in specs for axis in spec.axes}
    types = {axis_name(axis) for axis in axes.values()}
    known = {f"{axis_name(a)}::k{name}": n for a in axes.values() for name, n in a.counts.items()}
    sizes: dict[str, int] = {}  # of tables that passes share
    for name, size in (pair for one in functions.values() for pair in one.sizes.items()):
        sizes[name] = max(size, sizes.get(name, 0))
    alone = sizes.get("kMaxClasses") == sizes.get("kMaxTapClasses") == 1
    found = _texts(problem, functions, specs, parameters.fixed_fields(launches, alone), calls, epilogue)
    if not borders:
        found = [re.sub(r"\bkBorder\b", "0", part) for part in found]
        if problem.stride != (1, 1):  # a border mixes the phases, and without strides there is one
            found = [part.replace("direct<InputGradient>", "direct<PhasedInputGradient>") for part in found]
    found = [_resized(part, sizes | {"kWorkspace": WORKSPACE}) for part in map(with_pragmas_in_line, found)]
    last = "\n".join(calls.values())
    alike = {
        f"{axis_name(a)}::{name}": values[0]
        for a in axes.values()
        for name, values in a.tables.items()
        if len(set(values)) == 1
    }
    before: list[str] = []
    while found != before:
        before = found
        *found, last = without_zero_members(without_settled_parameters([*found, last], types))
        found = [_with_tables(part, alike) for part in found]
        found = _without_tables(found, sizes)
        found = [_folded(*pair) for pair in zip(found, constants_by_part(found, known), strict=True)]
    ascending = sorted(specs, key=lambda spec: spec.threads)  # a template has the launch bounds of its largest block
    bodies = {re.sub(r"[<(].*", "", spec.body.removeprefix("polyconv::")): spec for spec in ascending}
    found = [_entry(part, bodies.get(name_of(part) or "")) for part in found]
    general = reachable(found, {"Call", *(f"direct_{name}" for name in calls)})
    kept = _reduced([part for part in reachable(found, identifiers(last)) if part not in general], general, last, known)
    transforms = _transforms(axes.values(), "\n".join([*kept, *general, last]))
    at = next((i for i, part in enumerate(kept) if identifiers(part) & types), len(kept))
    planned = _laid_out([*kept[:at], *transforms, *kept[at:]])
    calls = dict(zip(calls, last.split("\n"), strict=True))
    return CudaSource(_PRELUDE + _laid_out(general), planned, calls, functions)


def _texts(
    problem: Problem,
    functions: Mapping[Pass, Launching],
    specs: list[KernelSpec],
    fixed: dict[str, dict[str, str]],
    calls: Mapping[str, str],
    epilogue: Epilogue,
) -> list[str]:
    """Definitions of the kernels' headers that the host texts name, and of the host texts, with the ``fixed``
    parameters in place."""
    shared, constants = dict[str, dict[str, str]](), dict[str, str]()
    for one in functions.values():
        shared |= one.shared
        constants |= one.constants
    fixed = {struct: fields | shared.get(struct, {}) for struct, fields in fixed.items()}
    unassigned = {struct: {n: v for n, v in fields.items() if v != f"p.{n}"} for struct, fields in fixed.items()}
    for fields in unassigned.values() if not epilogue.is_flagged else ():
        fields["activates"] = "1"
    ones = "|".join(name for name, value in constants.items() if value == "1") or "(?!)"
    direct = "direct_depthwise" if prod(problem.channels_per_group) < 16 else "direct"
    hosts: list[str] = []
    for host in dict.fromkeys(("indices", direct, "host", *(host for one in functions.values() for host in one.hosts))):
        text = epilogue.in_host((_TEXTS / f"{host}.cuh").read_text(encoding="utf-8"))
        text = re.sub(rf"\b(?:{ones})\b", "1", text)
        hosts += [without_assignments(part, unassigned) for part in definitions(f"\n{text}")]
        hosts += definitions(_constants(constants)) if host == "taps" else []
    for struct in (spec.struct for spec in specs if spec.struct):
        left = _unassigned(hosts, struct) - fixed[struct.__name__].keys()
        assert not left, f"the host texts do not set {', '.join(left)} of {struct.__name__}"
    headers = [_inheriting(part, shared) for part in with_functions_of_constants([*_headers(specs, fixed, epilogue)])]
    named = identifiers("\n".join([*hosts, *calls.values()])) | {"Call", "MIN_BLOCKS"}
    return [*reachable(headers, named), *hosts]  # unused definitions would give templates further arguments


def _unassigned(hosts: list[str], struct: type[ctypes.Structure]) -> set[str]:
    """Parameters that no host text sets, of a struct that one of them names. ``zero`` is to be 0."""
    named = [(part, name) for part in hosts for name in re.findall(rf"\b{struct.__name__} (\w+)[{{)]", part)]
    found = [field for part, name in named for field in re.findall(rf"\b{name}\.(\w+)(?:\[\w+\])? = ", part)]
    return {name for name, *_ in struct._fields_} - {*found, "zero"} if named else set()


def _constants(values: dict[str, str]) -> str:
    """C++ definitions of the numbers and tables of the host texts; a 1 is substituted in the texts instead."""
    kinds = {
        name: "TapClass" if "[" in name else "i64" if name in ("kMostPixels", "kWgradElements") else "int"
        for name in values
    }
    numbers = [f"{name} = {value}" for name, value in values.items() if kinds[name] == "int" and value != "1"]
    others = [f"constexpr {kinds[name]} {name} = {value};\n" for name, value in values.items() if kinds[name] != "int"]
    return (f"constexpr int {', '.join(numbers)};\n" if numbers else "") + "".join(others)


def _reduced(kept: list[str], general: list[str], last: str, known: Mapping[str, int]) -> list[str]:
    """Definitions without what neither they nor ``general`` nor the calls in ``last`` use."""
    before: list[str] = []
    while kept != before:  # dropping a constant or variable may leave its operands unused
        before = kept
        everything = re.sub(r"//.*", "", "\n".join([*kept, *general, last]))
        constants = constants_by_part([*general, *kept], known)[len(general) :]
        kept = [
            without_unused(with_values(*pair, everything), everything) for pair in zip(kept, constants, strict=True)
        ]
        kept = reachable([*general, *kept], identifiers(last) | {"Call"})
        kept = [part for part in kept if part not in general]
    return kept


def _laid_out(parts: Iterable[str]) -> str:
    """Definitions concatenated, tidied and wrapped."""
    text = tidied("".join(parts).lstrip("\n")).replace("__device__ __forceinline__", "DEVICE")
    return compacted(tidied(joined(wrapped(re.sub(r"\bWinogradWgrad(?=[A-Z])", "Wgrad", text)))))


def _folded(part: str, constants: dict[str, int]) -> str:
    part = folded(simplified(part, constants), constants)
    return tidied(with_constant_arguments(without_copies(part), constants))


def _headers(specs: list[KernelSpec], fixed: dict[str, dict[str, str]], epilogue: Epilogue) -> Iterator[str]:
    """Specialised definitions of the kernels' headers, in include order."""
    stems: list[str] = []

    def collect(stem: str) -> None:
        for included in _INCLUDE.findall((_KERNELS / f"{stem}.cuh").read_text(encoding="utf-8")):
            collect(included)
        if stem not in stems:
            stems.append(stem)

    collect("common/common")
    for spec in specs:
        collect(spec.stem)
    params = {spec.stem: spec.params.removeprefix("polyconv::") for spec in specs}
    for stem in stems:
        if stem == "common/epilogue":  # which an Epilogue replaces
            continue
        parts = _with_heading(stem, definitions(_body(stem)))
        struct = next((name for name in map(name_of, parts) if name and name.endswith("Params")), params.get(stem, ""))
        for part in parts:
            name = name_of(part) or ""
            part = epilogue.in_kernel(_of_struct(part, struct))
            named = re.search(r"\b(\w+Params)& p(?:arams)?\b", part)
            part = parameters.without_fields(part, fixed[name]) if name in fixed else part
            yield with_fixed_parameters(part, fixed.get(named.group(1) if named else struct, {}))
        if stem == "common/common":
            yield from definitions(epilogue.in_host((_TEXTS / "call.cuh").read_text(encoding="utf-8")))
            yield from epilogue.definitions(_body("common/epilogue"))


def _inheriting(text: str, shared: dict[str, dict[str, str]]) -> str:
    """Derive a parameter struct in ``shared`` from ``Call``; divisors that ``Call`` lacks become ``u32`` members."""
    name = name_of(text) or ""
    if name not in shared:
        return text
    call = identifiers((_TEXTS / "call.cuh").read_text(encoding="utf-8"))
    divisors = [field for field, value in shared[name].items() if value == f"p.{field}" and field not in call]
    return text.replace(f"struct {name} {{\n", f"struct {name} : Call {{\n  u32 {', '.join(divisors)};\n")


def _with_heading(stem: str, parts: list[str]) -> list[str]:
    """Put a header's opening comment under a ruled title above its first definition, except for ``_SMALL`` headers."""
    if stem in _SMALL or not parts or name_of(parts[0]) is not None:
        return parts
    first = next(i for i, part in enumerate(parts) if name_of(part) is not None)
    return [f"{_ruled(stem)}{parts[0].strip()}\n\n{parts[first].lstrip()}", *parts[first + 1 :]]


def _ruled(title: str) -> str:
    return f"// ---- {title} {'-' * (111 - len(title))}\n"


def _body(stem: str) -> str:
    text = (_KERNELS / f"{stem}.cuh").read_text(encoding="utf-8")
    text = _INCLUDE.sub("", text).replace("#pragma once\n", "").replace("POLYCONV_", "")
    text = re.sub(r"^(?:namespace polyconv \{|\}  // namespace polyconv)\n", "", text, flags=re.MULTILINE)
    # nvcc 11.8 compiles a selection between these sums and others as if both were the others, where they are unset.
    text = text.replace("Sums sum, other;", "Sums sum, other = {};")
    text = re.sub(r"\b([\w/]+)\.cuh\b", r"\1", text)
    return _in_float(text) if stem.startswith("depthwise/") else text


def _in_float(text: str) -> str:
    """A header whose templates have an ``Element``, for floats alone: the elements of exported models."""
    text = re.sub(r"^ *template <class Element>\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n(?:struct \w+ : \w+Of<\w+> \{\};\n)+", "", text)
    text = re.sub(
        r"(?:, class Element(?: = float)?|(?<=<)class Element, |, Element)(?=[,>])|(?<=Params)Of\b(?:<Element>)?",
        "",
        text,
    )
    text = re.sub(r"sizeof\(Element\) == 2\s*\? 2\s*: 1", "1", text)
    for call in ("widened(", "rounded<Element>("):
        while (at := text.find(call)) >= 0:
            end = closing(text, at + len(call) - 1)
            text = text[:at] + text[at + len(call) : end] + text[end + 1 :]
    return re.sub(r"\bElement\b", "float", text).replace("reinterpret_cast<const float*>(p.residual)", "p.residual")


def _of_struct(text: str, struct: str) -> str:
    """A definition with a struct in place of the template argument ``Params``, which may add an epilogue to it."""
    text = re.sub(r"^ *template <class Params>\n", "", text, flags=re.MULTILINE)
    text = re.sub(r", class Params>", ">", text)
    return re.sub(r"\bconst Params& p\b", f"const {struct}& p", text)


def _resized(text: str, sizes: Mapping[str, object]) -> str:
    """Set the sizes of tables and of the workspace to those of the file."""
    for name, size in sizes.items():
        text = re.sub(rf"((?:constexpr \w+|enum : int {{) {name} =) [^;}}]+?(?=;| }})", rf"\g<1> {size}", text)
    return text


def _with_tables(text: str, values: dict[str, int]) -> str:
    """Replace calls of an axis's table functions that have a single value by that value."""
    for name, value in values.items():
        while (at := text.find(f"{name}(")) >= 0:
            text = text[:at] + str(value) + text[closing(text, at + len(name)) + 1 :]
    return text


def _without_tables(texts: list[str], sizes: Mapping[str, int]) -> list[str]:
    """Replace tables of one element by a scalar if only element 0 is read."""
    for size in (name for name, value in sizes.items() if value == 1):
        for table in {table for text in texts for table in re.findall(rf"\b(\w+)\[{size}\]", text)}:
            places = {place for text in texts for place in re.findall(rf"\b{table}\[([^][]*)\]", text)}
            if places <= {size, "0"}:
                texts = [re.sub(rf"\b{table}\[(?:{size}|0)\]", table, text) for text in texts]
    return texts


def _entry(text: str, spec: KernelSpec | None) -> str:
    """Turn the body of a kernel into a ``__global__`` function with launch bounds; empty on GPUs before those that the
    kernel compiles for."""
    if spec is None:
        return text
    blocks = f"MIN_BLOCKS({spec.min_blocks})" if spec.min_blocks > 1 else "1"
    bounds = f"__global__ void __launch_bounds__({spec.threads}, {blocks})"
    head = r"__device__ __forceinline__ void (\w+)\(const (\w+)& p\)"
    found = re.search(head, text)
    apart = "\n" if found and len(bounds) + len(found.expand(r"\1 const __grid_constant__ \2 p")) > 112 else " "
    text = re.sub(head, rf"{bounds}{apart}\1(const __grid_constant__ \2 p)", text)
    if spec.generations[0] <= _OLDEST:
        return text
    opened = f"{{\n#if __CUDA_ARCH__ >= {spec.generations[0]}0\n"
    return opened.join(text.split("{\n", 1)).rstrip().removesuffix("}") + "#endif\n}\n"


# ---- the transforms

_INNER = ("M", "Longest", "Points")
"""Counts of an axis that do not depend on how its taps are cut into segments."""


def _transforms(axes: Iterable[ToomAxis], used: str) -> Iterator[str]:
    """Structs with the transforms named in ``used``, one per F(m, r); then a derived struct per segmented axis."""
    plain: dict[tuple[int, int], ToomAxis] = {}
    distinct = {axis_name(axis): axis for axis in axes}
    for axis in distinct.values():
        plain.setdefault((axis.m, axis.longest), ToomAxis(axis.m, (axis.longest,)))
    for inner in plain.values():
        numbers = ", ".join(f"k{name} = {inner.counts[name]}" for name in _INNER)
        lines = [f"// {inner}: {inner.m} outputs of {inner.longest} taps from {inner.points} products."]
        lines += [f"struct {axis_name(inner)}{'' if axis_name(inner) in distinct else 'Transforms'} {{"]
        lines += [f"  static constexpr int {numbers};"]
        if axis_name(inner) in distinct:
            lines += _uses(inner, used)
        for name, matrix in inner.transforms().items():
            if f"::{name}(" in used:
                lines += _method(name, matrix)
        yield "\n".join([*lines, "};\n"])
    for name, axis in distinct.items():
        if len(axis.segments) > 1:
            base = axis_name(ToomAxis(axis.m, (axis.longest,)))
            base += "" if base in distinct else "Transforms"
            head = f"// {axis}.\nstruct {name} : {base} {{"
            yield "\n".join([head, *_uses(axis, used), "};\n"])


def _uses(axis: ToomAxis, used: str) -> list[str]:
    numbers = {f"k{name}": value for name, value in axis.counts.items() if name not in _INNER}
    listed = ", ".join(f"{name} = {value}" for name, value in numbers.items() if _named(axis, name, used))
    lines = [f"  static constexpr int {listed};"] if listed else []
    for name, values in axis.tables.items():
        if _named(axis, name, used):
            returned = f"{{ return {choice_of(values)}; }}"
            lines.append(f"  static __device__ constexpr int {name}({index_of(values)}) {returned}")
    return lines


def _named(axis: ToomAxis, member: str, used: str) -> bool:
    """Whether a text names a member of an axis, directly or through a template parameter."""
    return re.search(rf"\b(?:{axis_name(axis)}|H|W|Axis)::{member}\b", used) is not None


def _method(name: str, matrix: Matrix) -> list[str]:
    """C++ lines of a transform, with as many operations per line as fit."""
    comment, _, _, *body, _ = emit_transform(name, matrix, rounded=True).rstrip("\n").split("\n")
    body = [re.sub(r"\bx(\d+)\b", r"x[\1]", line.strip()) for line in body if not re.match(r"  const T x\d", line)]
    body = [re.sub(r"mul_sub\(([^,]*), ([^,]*), (.*)\)", r"fmaf(\1, \2, -\3)", line) for line in body]
    body = [
        line.replace("mul_add(", "fmaf(").replace("const T ", "const float ").replace("T(", "float(") for line in body
    ]
    lines = [f"  {comment}", f"  static __device__ __forceinline__ void {name}(const float* x, float* y) {{"]
    for operation in body:
        last = lines[-1].rstrip(";")
        if operation.startswith("const float ") and lines[-1].startswith("    const float "):
            joined = f"{last}, {operation.removeprefix('const float ')}"
        elif operation.startswith("y[") and lines[-1].startswith("    y["):
            joined = f"{last}, {operation}"
        else:
            joined = ""
        if joined and len(joined) <= 120:
            lines[-1] = joined
        else:
            lines.append(f"    {operation}")
    return [*lines, "  }"]
