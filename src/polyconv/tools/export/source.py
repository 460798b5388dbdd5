"""The CUDA source of one convolution of an exported file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ...cuda.planner.device import CudaDevice
from ...cuda.planner.plan import Launch
from ...cuda.planner.planner import DEFAULT_WORKSPACE
from ...problem import Pass, Problem
from . import parameters
from .device_code import cuda_texts
from .host_code import ANYWHERE, LAUNCHED, NAMES, Launching, chosen_for, launching

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
    """Source for the passes ``kinds`` of a convolution; they replace ``problem.kind``."""
    families = LAUNCHED if tensor_cores else ANYWHERE
    functions: dict[Pass, Launching] = {}
    launches: list[Launch] = []
    for kind in kinds:
        of_pass = replace(problem, kind=kind)
        functions[kind] = launching(of_pass, chosen_for(of_pass, device, families), device)
        for candidate in functions[kind].candidates:
            launches += parameters.launches(candidate, of_pass)
    constants = dict(pair for one in functions.values() for pair in one.constants)
    direct, planned, calls = cuda_texts(
        specs=list(dict.fromkeys(launch.kernel for launch in launches)),
        fixed=parameters.fixed_fields(launches),
        shared={struct: fields for one in functions.values() for struct, fields in one.shared},
        direct="direct_depthwise" if prod(problem.channels_per_group) < 16 else "direct",
        constants=_constants(constants),
        ones=[name for name, value in constants.items() if value == "1"],
        sizes=dict([("kWorkspace", WORKSPACE), *(pair for one in functions.values() for pair in one.sizes)]),
        hosts=dict.fromkeys(host for one in functions.values() for host in one.hosts),
        calls={NAMES[kind]: one.call for kind, one in functions.items()},
        borders=borders,
    )
    return CudaSource(direct, planned, calls, functions)


def _constants(values: dict[str, str]) -> str:
    """C++ definitions of the numbers and tables of the host texts; a 1 is substituted in the texts instead."""
    kinds = {name: "TapClass" if "[" in name else "i64" if name == "kMostPixels" else "int" for name in values}
    numbers = [f"{name} = {value}" for name, value in values.items() if kinds[name] == "int" and value != "1"]
    others = [f"constexpr {kinds[name]} {name} = {value};\n" for name, value in values.items() if kinds[name] != "int"]
    return (f"constexpr int {', '.join(numbers)};\n" if numbers else "") + "".join(others)
