"""Compiler and its origin, state of the device, and latency of a first call: planning, compiling, loading."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

from ....cuda import driver
from ....cuda.jit.compile import compile_kernel, compiler_id, in_threads, ptx_arch
from ....cuda.planner.plan import KernelSpec
from ....cuda.planner.planner import plan_cuda
from ..check import Part, Result, not_here, passed, warning
from ..device_under_test import GpuUnderTest, spread
from ..kernel_coverage import problems, selected

COMPUTE_MODES = {0: "shared by processes", 1: "one thread at a time", 2: "no process", 3: "one process at a time"}
SMI = ("driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "mig.mode.current")
TIMED = 8
"""Kernels compiled for timing, even if they are cached."""


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    return {
        "compiler": lambda: compiler(subject),
        "device": lambda: device(subject),
        "nvidia-smi": lambda: smi(subject),
        "planning": lambda: planning(subject),
        "compiling": lambda: compiling(subject),
        "loading": lambda: loading(subject),
    }


def compiler(subject: GpuUnderTest) -> Result:
    build, older = compiler_id(), ptx_arch(subject.description.arch)
    loaded = [line.split()[-1] for line in _maps() if "libnvrtc" in line and "builtins" not in line]
    figures = {"NVRTC": build, "from": loaded[0] if loaded else "unknown"}
    if older:
        return warning(f"NVRTC {build} is older than the GPU, and the driver translates PTX of {older}", **figures)
    return passed(f"NVRTC {build}", **figures)


def _maps() -> list[str]:
    """Memory map of this process; empty without ``/proc``."""
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []


def device(subject: GpuUnderTest) -> Result:
    gpu = driver.device(subject.index)
    mode, ecc = gpu.attribute("COMPUTE_MODE"), gpu.attribute("ECC_ENABLED")
    clock, memory = gpu.attribute("CLOCK_RATE") // 1000, gpu.attribute("MEMORY_CLOCK_RATE") // 1000
    figures = {"MHz": clock, "memory_MHz": memory, "compute_mode": COMPUTE_MODES.get(mode, str(mode)), "ECC": bool(ecc)}
    if mode:
        return warning(f"the GPU is set to be used by {COMPUTE_MODES.get(mode, mode)}", **figures)
    return passed(f"{clock} MHz, memory {memory} MHz", **figures)


def smi(subject: GpuUnderTest) -> Result:
    """Current clocks, MIG mode and driver version, which the driver API does not report."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return not_here("nvidia-smi is not on the path")
    uuid = UUID(bytes=bytes(driver.call("cuDeviceGetUuid", driver.device(subject.index).handle).bytes))
    asked = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    if ran.returncode:
        return not_here(f"nvidia-smi does not answer: {(ran.stdout + ran.stderr).strip()[:200]}")
    return passed(**dict(zip(SMI, (text.strip() for text in ran.stdout.split(",")), strict=False)))


def planning(subject: GpuUnderTest) -> Result:
    found = list(problems(4).values())
    began = time.perf_counter()
    for problem in found:
        plan_cuda.__wrapped__(problem, subject.description)
    each = (time.perf_counter() - began) / len(found)
    return passed(f"{each * 1e3:.1f} ms for a new problem", ms_per_problem=each * 1e3, problems=len(found))


def compiling(subject: GpuUnderTest) -> Result:
    """Fill the cache with the kernels of later checks, and time the compilation of a few."""
    arch = subject.description.arch
    wanted = _kernels(subject)
    began = time.perf_counter()
    subject.cache.get_many(wanted, arch)
    ready = time.perf_counter() - began
    timed = spread(wanted, 2 if subject.quick else TIMED)
    began = time.perf_counter()
    in_threads(lambda spec: compile_kernel(spec, arch), timed)
    each = (time.perf_counter() - began) / len(timed)
    words = f"{len(wanted)} kernels were ready after {ready:.0f} s; {each:.2f} s for one that is compiled on all cores"
    return passed(words, kernels=len(wanted), seconds_until_ready=ready, seconds_per_kernel=each)


def loading(subject: GpuUnderTest) -> Result:
    wanted = _kernels(subject)
    codes = subject.cache.get_many(wanted, subject.description.arch)
    gpu = driver.device(subject.index)
    began = time.perf_counter()
    for spec, code in zip(wanted, codes, strict=True):
        gpu.load(spec, code)
    each = (time.perf_counter() - began) / len(wanted)
    return passed(f"{each * 1e3:.2f} ms for a kernel", ms_per_kernel=each * 1e3)


def _kernels(subject: GpuUnderTest) -> list[KernelSpec]:
    """Kernels that later checks launch by name."""
    return list(dict.fromkeys(kernel for way in selected(subject).values() for kernel in way.kernels))
