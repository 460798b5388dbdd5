"""The CUDA source of one convolution of an exported file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ..plan.cuda import DEFAULT_WORKSPACE
from ..plan.device import CudaDevice
from ..plan.plan import Launch
from ..problem import Pass, Problem
from . import parameters
from .families import ANYWHERE, LAUNCHED, NAMES, Launching, chosen_for, launching
from .kernels import cuda_texts

WORKSPACE = f"{DEFAULT_WORKSPACE >> 20} << 20"
"""Bytes of scratch memory, as a file allocates them and as its host functions count with them."""


@dataclass(frozen=True)
class CudaSource:
    """What is compiled: the direct kernels for any geometry, and with the rest behind them for the one planned for."""

    direct: str
    planned: str
    calls: dict[str, str]
    """What each of the three functions does for the geometry that was planned for."""
    launching: dict[Pass, Launching]


def cuda_source(
    problem: Problem,
    device: CudaDevice,
    kinds: Iterable[Pass],
    borders: bool = False,
    tensor_cores: bool = False,
) -> CudaSource:
    """The source for these passes of a convolution, which is given as its forward problem."""
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
    """Numbers and tables that the host texts count with; a number that is one stands there as such."""
    kinds = {name: "TapClass" if "[" in name else "i64" if name == "kMostPixels" else "int" for name in values}
    numbers = [f"{name} = {value}" for name, value in values.items() if kinds[name] == "int" and value != "1"]
    others = [f"constexpr {kinds[name]} {name} = {value};\n" for name, value in values.items() if kinds[name] != "int"]
    return (f"constexpr int {', '.join(numbers)};\n" if numbers else "") + "".join(others)
