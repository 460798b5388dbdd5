"""The CUDA source of one convolution of an exported file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..plan.cuda import DEFAULT_WORKSPACE, choose
from ..plan.device import CudaDevice
from ..plan.plan import Launch
from ..problem import Pass, Problem
from . import parameters
from .families import NAMES, Launching, launching
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


def cuda_source(problem: Problem, device: CudaDevice, kinds: Iterable[Pass], borders: bool = False) -> CudaSource:
    """The source for these passes of a convolution, which is given as its forward problem."""
    functions: dict[Pass, Launching] = {}
    launches: list[Launch] = []
    for kind in kinds:
        of_pass = replace(problem, kind=kind)
        functions[kind] = launching(of_pass, choose(of_pass, device).chosen, device)
        candidate = functions[kind].candidate
        if candidate is not None:
            launches += parameters.launches(candidate, of_pass)
    constants = dict(pair for one in functions.values() for pair in one.constants)
    direct, planned, calls = cuda_texts(
        specs=list(dict.fromkeys(launch.kernel for launch in launches)),
        fixed=parameters.fixed_fields(launches),
        shared={struct: fields for one in functions.values() for struct, fields in one.shared},
        constants="".join(_constant(*pair) for pair in constants.items()),
        sizes=dict([("kWorkspace", WORKSPACE), *(pair for one in functions.values() for pair in one.sizes)]),
        direct=direct_texts(problem),
        hosts=dict.fromkeys(host for one in functions.values() for host in one.hosts),
        calls={NAMES[kind]: one.call for kind, one in functions.items()},
        borders=borders,
    )
    return CudaSource(direct, planned, calls, functions)


def _constant(name: str, value: str) -> str:
    kind = "TapClass" if name.endswith("[]") else "i64" if name == "kMostPixels" else "int"
    return f"constexpr {kind} {name} = {value};\n"


def direct_texts(problem: Problem) -> tuple[str, ...]:
    """The direct kernels: a matrix product of each group, or where groups have few channels a thread per element."""
    c, k = problem.channels_per_group
    return ("indices", "slices", "direct_depthwise" if c * k < 16 else "direct")
