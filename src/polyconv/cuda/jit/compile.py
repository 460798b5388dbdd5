"""Compile a kernel description to machine code with NVRTC.

The generated source only instantiates a template of ``polyconv/cuda/kernels``. A cubin is compiled for the exact
architecture: what was tested is what runs. Only a GPU newer than this NVRTC gets PTX, for the newest architecture
before its own, which the driver translates.

Quoted includes are looked up only in the kernels' folder and in ``include_dirs``. NVRTC would also search the current
directory, where a stray file could change the binary without changing the cache key.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ...runtime.lazy_import import imported
from ...util.cpuinfo import usable_cores
from ...util.gpu_arch import capability
from ..errors import CompileError, RefusedKernelError
from ..planner.codegen import source
from ..planner.device import why_too_old
from ..planner.kernel_params import KERNELS
from ..planner.plan import KernelSpec
from .cubin import read_cubin

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_RENUMBERED = 101
OPTIONS: dict[str, Any] = {"std": "c++17", "fma": True, "use_fast_math": False, "no_source_include": True}
"""Compile options of every kernel, named as in cuda.core. Fast math stays off: float32 means float32."""
ALLOCATIONS = ("--register-usage-level=0", "--register-usage-level=10")
"""Settings of ptxas (5 by default) that are tried for a kernel that spills registers."""


def search_path(include_dirs: Iterable[str | os.PathLike[str]] = ()) -> tuple[Path, ...]:
    """Search path of quoted includes."""
    return (KERNELS, *(Path(directory) for directory in include_dirs))


def compile_kernel(spec: KernelSpec, arch: str, *, include_dirs: Iterable[str | os.PathLike[str]] = ()) -> bytes:
    """Compile a kernel for one architecture (``"sm_70"``) to a cubin, or to PTX for :func:`ptx_arch`. Needs no GPU."""
    check_arch(arch)
    older = ptx_arch(arch)
    core = _import("cuda.core")
    name, include = f"{spec.symbol}.cu", [str(path) for path in search_path(include_dirs)]

    def compiled(ptxas: str | None) -> bytes:
        options = core.ProgramOptions(
            arch=older or arch, name=name, include_path=include, ptxas_options=ptxas, **OPTIONS
        )
        log = io.StringIO()
        try:
            if older:
                code = _ptx(source(spec), name, options.as_bytes("nvrtc"), log)
            else:
                code = core.Program(source(spec), "c++", options).compile("cubin", logs=log).code
        except Exception as error:
            raise RefusedKernelError(
                f"NVRTC could not compile {spec.symbol} for {arch}:\n{_relevant(str(error))}", symbol=spec.symbol
            ) from error
        if (said := _relevant(log.getvalue())) and ptxas is None:
            logger.warning("NVRTC warned about %s for %s:\n%s", spec.symbol, arch, said)
        return bytes(code)

    return compiled(None) if older else without_spills(compiled)


def without_spills(compiled: Callable[[str | None], bytes]) -> bytes:
    """Machine code of ``compiled``, a function of an option for ptxas: the first of ``ALLOCATIONS`` without spills, or
    that of None.

    Our kernels use nearly all registers that their blocks leave them, and releases of ptxas differ by a few: with
    NVRTC 13.2 six of them would spill on sm_90, sm_100 or sm_120.
    """
    code = compiled(None)
    for allocation in ALLOCATIONS if _spills(code) else ():
        with suppress(RefusedKernelError):  # an option that this release does not know
            if not _spills(other := compiled(allocation)):
                return other
    return code


def _spills(cubin: bytes) -> bool:
    return any(kernel.stack for kernel in read_cubin(cubin).values())


SLOWEST = (
    *("winograd_fp16x3/wgrad", "winograd/wgrad", "winograd/fused", "winograd/fused_resident", "winograd_fp16x3/fused"),
    *("implicit_gemm/fprop_dgrad", "implicit_gemm/wgrad", "implicit_gemm/wgrad_1x1", "winograd/nonfused_gemm"),
)
"""Stems of the kernels that compile slowest, slowest first. Started last, such a kernel would delay all."""


def in_threads(function: Callable[[KernelSpec], Result], specs: Sequence[KernelSpec]) -> list[Result]:
    """``[function(spec) for spec in specs]`` on all cores, slowest kernels first. NVRTC holds no lock, nor the GIL."""
    workers = min(len(specs), usable_cores())
    if workers <= 1:
        return [function(spec) for spec in specs]
    with ThreadPoolExecutor(workers, thread_name_prefix="polyconv-nvrtc") as pool:
        order = sorted(dict.fromkeys(specs), key=_slowness)
        done = dict(zip(order, pool.map(function, order), strict=True))
    return [done[spec] for spec in specs]


def _slowness(spec: KernelSpec) -> int:
    return SLOWEST.index(spec.stem) if spec.stem in SLOWEST else len(SLOWEST)


def flags(arch: str) -> tuple[str, ...]:
    """Compiler flags as NVRTC gets them, without include paths, which do not affect the binary."""
    options = _import("cuda.core").ProgramOptions(arch=ptx_arch(arch) or arch, **OPTIONS)
    return tuple(flag.decode() for flag in options.as_bytes("nvrtc"))


@lru_cache(maxsize=1)
def compiler_id() -> str:
    """NVRTC's exact build, such as ``CL-36037853 12.9``, or its release, ``13.2.86``, if it does not name a build.

    ``nvrtcVersion`` returns 12.9 for every patch release of 12.9, and these generate different code. Build and release
    are only in the PTX, so an empty program is compiled to read them (30 ms, once per process). The releases of 13.2
    have ``UNKNOWN`` as build.
    """
    major, minor = _checked(_nvrtc().nvrtcVersion())
    text = _ptx("", "empty.cu", [], io.StringIO()).decode()
    if build := re.search(r"Compiler Build ID: (CL-\d+)", text):
        return f"{build[1]} {major}.{minor}"
    release = re.search(r"compilation tools, release [\d.]+, V([\d.]+)", text)
    return release[1] if release else f"{major}.{minor}"


def _ptx(source: str, name: str, options: list[bytes], log: io.StringIO) -> bytes:
    """Compile to PTX. Uses the bindings: ``cuda.core`` makes PTX only if there is a driver that accepts it."""
    nvrtc = _nvrtc()
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, None, None))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        said = bytes(*_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, said))
        log.write(said.decode())
        if status:
            raise CompileError(f"{status.name}\n{log.getvalue()}")
        code = bytes(*_checked(nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc.nvrtcGetPTX(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


@lru_cache(maxsize=1)
def supported_archs() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC compiles for: 70, 75, ..."""
    (archs,) = _checked(_nvrtc().nvrtcGetSupportedArchs())
    return tuple(archs)


def check_arch(arch: str) -> None:
    """Raise for an architecture for which NVRTC generates neither machine code nor PTX."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise CompileError(f"{arch!r} is not a GPU architecture: expected a name such as 'sm_70'")
    if too_old := why_too_old(arch):
        raise CompileError(too_old)
    known = supported_archs()
    if capability(arch) < min(known):
        raise CompileError(
            f"NVRTC {compiler_id()} cannot compile for {arch}: CUDA 13 dropped sm_70 and older GPUs: install "
            f"polyconv[cu12] (it knows sm_{', sm_'.join(map(str, known))})"
        )


def ptx_arch(arch: str) -> str | None:
    """Newest known architecture before ``arch``, whose PTX runs there; None if NVRTC knows ``arch`` itself.

    Never sm_101: CUDA 13 renumbered it sm_110, so its PTX is that of a GPU newer than sm_103.
    """
    check_arch(arch)
    known = supported_archs()
    older = [one for one in known if one < capability(arch) and one != _RENUMBERED]
    return None if capability(arch) in known else f"sm_{max(older)}"


def why_unloadable(driver_version: int, arch: str) -> str | None:
    """User message why a driver may refuse kernels of this NVRTC for an architecture; None if it takes them.

    A driver loads cubins of the same CUDA major version, and PTX of the same or an older CUDA version.
    """
    major, minor = _checked(_nvrtc().nvrtcVersion())
    driver = (driver_version // 1000, driver_version % 1000 // 10)
    if major <= driver[0] and ((major, minor) <= driver or not ptx_arch(arch)):
        return None
    kind = "PTX" if ptx_arch(arch) else "machine code"
    return (
        f"NVRTC {major}.{minor} is newer than the NVIDIA driver, which is for CUDA {driver[0]}.{driver[1]} and need "
        f"not load its {kind}: update the driver, or install an NVRTC of its version (polyconv[cu{driver[0]}])"
    )


def _import(module: str) -> ModuleType:
    """Import a CUDA module on first use, so that ``import polyconv`` works without it.

    One thread at a time: ``cuda.core`` replaces itself by another module while it loads, and a second thread that
    imports it then gets a half-initialised one.
    """
    try:
        return imported(module)
    except ImportError as error:
        raise CompileError(
            f"{module} is not installed, and compiling a CUDA kernel needs it: install polyconv[cu12] or polyconv[cu13]"
        ) from error


def _nvrtc() -> ModuleType:
    """NVRTC's bindings. Raises if the library is missing."""
    nvrtc = _import("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CompileError(
            f"NVRTC, NVIDIA's run-time compiler, was not found: install polyconv[cu12] or polyconv[cu13] ({error})"
        ) from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values of an NVRTC call. Raises if its status, which comes first, is an error."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC failed: {status.name}")
    return tuple(values)


def _relevant(log: str) -> str:
    """The compiler's log without the deprecation warning of every sm_70 compilation."""
    kept = (line for line in log.replace("\0", "").splitlines() if "are deprecated and may be removed" not in line)
    return "\n".join(kept).strip()
