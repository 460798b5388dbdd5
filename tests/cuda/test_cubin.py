"""The resource report of a cubin against NVIDIA's tools.

Expected values are from ``ptxas -v`` and ``cuobjdump -res-usage`` of CUDA 12.9 and 12.8. Register counts depend on the
compiler: they are compared with ``ptxas`` where it is installed, else only bounded.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyconv.cuda.jit.compile import compile_kernel, search_path
from polyconv.cuda.jit.cubin import CubinError, Parameter, kernel_info, read_cubin
from polyconv.cuda.planner.codegen import source
from polyconv.cuda.planner.plan import KernelSpec
from virtual_gpu.example import KERNELS, axpy_spec

ARCHS = ("sm_70", "sm_80", "sm_90", "sm_100", "sm_120")
SPECS = {
    "plain": axpy_spec(),
    "static shared": axpy_spec(function="swap_neighbours", value=128),
    "spilling": axpy_spec(1024, "spill", min_blocks=2, value=200),
}


@cache
def cubin_of(name: str, arch: str) -> bytes:
    return compile_kernel(SPECS[name], arch, include_dirs=[KERNELS])


@pytest.mark.parametrize("arch", ARCHS)
def test_parameters_threads_and_shared_memory(arch: str) -> None:
    plain = kernel_info(cubin_of("plain", arch))
    assert plain.arch == arch
    assert plain.params_bytes == 32
    assert plain.parameters == (Parameter(0, 32),)
    assert plain.max_threads == 128
    assert plain.static_shared == 0
    assert plain.stack == 0
    assert 8 <= plain.registers <= 40
    assert kernel_info(cubin_of("static shared", arch)).static_shared == 2 * 128 * 4


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "sm_100"])
def test_spills_are_seen(arch: str) -> None:
    info = kernel_info(cubin_of("spilling", arch))
    assert info.registers <= 64
    assert info.stack > 0
    assert "spilled" in str(info)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_agrees_with_ptxas(name: str, arch: str, tmp_path: Path) -> None:
    ptxas = _ptxas()
    if ptxas is None:
        return  # bounded by the tests above
    registers, stack, shared = _ptxas_says(ptxas, SPECS[name], arch, tmp_path)
    info = kernel_info(cubin_of(name, arch))
    assert (info.registers, info.stack, info.static_shared) == (registers, stack, shared)


def test_a_kernel_that_is_not_there_is_named() -> None:
    with pytest.raises(CubinError, match="no kernel 'gemm', only axpy_128"):
        kernel_info(cubin_of("plain", "sm_70"), "gemm")


@pytest.mark.parametrize("size", [0, 3, 40, 100, 2000])
def test_damaged_bytes_are_an_error_not_a_crash(size: int) -> None:
    with pytest.raises(CubinError):
        read_cubin(cubin_of("plain", "sm_70")[:size])


def _ptxas() -> Path | None:
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        path = Path(folder) / "cuda_nvcc" / "bin" / "ptxas"
        if path.exists():
            return path
    return None


def _ptxas_says(ptxas: Path, spec: KernelSpec, arch: str, folder: Path) -> tuple[int, int, int]:
    """Registers, stack and static shared memory as ``ptxas -v`` prints them."""
    from cuda.bindings import nvrtc

    include = [f"-I{folder}" for folder in search_path([KERNELS])]
    options = [f"-arch={arch.replace('sm', 'compute')}", *include, "--std=c++17"]
    _, program = nvrtc.nvrtcCreateProgram(source(spec).encode(), b"kernel.cu", 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert status == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytes(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    (folder / "kernel.ptx").write_bytes(ptx.rstrip(b"\0"))
    command = [str(ptxas), "-v", "-arch", arch, "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
