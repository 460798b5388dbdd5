"""Findings about the installation: versions, devices, compiler, caches and settings, with advice on problems."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

import torch

from ... import settings, tuning_key
from ...autotune import tuning_file, tuning_lookup
from ...backend import backend_for
from ...cpu import native
from ...cuda import CudaError, driver, launch
from ...cuda.device import describe
from ...cuda.jit import store
from ...cuda.jit.bundle import Bundle, in_force
from ...cuda.jit.compile import check_arch, compiler_id, ptx_arch, supported_archs, why_unloadable
from ...cuda.jit.store import EntryError
from ...cuda.planner.device import CudaDevice
from ...dispatch import override
from ...util.cpuinfo import cpu_limit, processor_name
from ...version import __version__
from .check import Verdict

OLDEST_TORCH = (2, 4)
INSTALL_CUDA = "pip install 'polyconv[cu12]' (or polyconv[cu13], which has no V100)"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: Verdict
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": str(self.state)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU reported by the driver. ``memory`` is in bytes."""

    index: int
    description: CudaDevice
    memory: int

    def __str__(self) -> str:
        d = self.description
        return f"{d.name} ({d.arch}, {d.sms} multiprocessors, {self.memory / 2**30:.0f} GiB)"


def findings() -> list[Finding]:
    found: list[Finding] = []
    for check in (_versions, _cpu, _devices, _compiler, _cache, _bundles, _settings, _tuning, _what_runs):
        try:
            found += check()
        except Exception as error:  # reported as a finding; the other checks still run
            found.append(Finding(check.__name__.strip("_"), Verdict.PROBLEM, f"{type(error).__name__}: {error}"))
    return found


def gpus() -> list[Gpu]:
    """GPUs of this machine; empty without a driver. Raises :class:`~polyconv.cuda.CudaError` if the driver fails."""
    if not has_driver():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = int(driver.call("cuDeviceGetCount"))
        return [Gpu(index, describe(index), _memory(index)) for index in range(count)]


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def usable_gpus() -> list[Gpu]:
    """GPUs that PyTorch can use."""
    return _working_gpus() if torch.cuda.is_available() else []


def _working_gpus() -> list[Gpu]:
    """GPUs of this machine; empty if the driver fails."""
    try:
        return gpus()
    except CudaError:
        return []


# ---- the checks


def _versions() -> Iterator[Finding]:
    yield Finding("polyconv", Verdict.OK, f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    version = str(torch.__version__)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    old = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH
    advice = f"install PyTorch {'.'.join(map(str, OLDEST_TORCH))} or newer" if old else ""
    yield Finding("PyTorch", Verdict.PROBLEM if old else Verdict.OK, f"{version}, built with {built}", advice)


def _cpu() -> Iterator[Finding]:
    limit = cpu_limit()
    name = f"{processor_name()}, {torch.get_num_threads()} threads"
    if limit.cores < (os.cpu_count() or 1):
        name += f", {limit.cores:.3g} of {os.cpu_count()} cores by {limit.source}"
    absent = native.why_absent()
    if absent is None:
        yield Finding("CPU", Verdict.OK, f"{name}, native kernels for {native.instruction_set()}")
    else:
        advice = "PyTorch's convolution runs instead. Install a wheel, or build the kernels (see README, Install)"
        yield Finding("CPU", Verdict.WARNING, f"{name}: {absent}", advice)
    if too_many := limit.too_many(torch.get_num_threads()):
        yield Finding("threads", Verdict.WARNING, too_many)


def _devices() -> Iterator[Finding]:
    if not has_driver():
        yield Finding("GPU", Verdict.OK, "none: no NVIDIA driver (libcuda.so.1) on this machine")
        return
    try:
        found = gpus()
        number = int(driver.call("cuDriverGetVersion"))
    except CudaError as error:
        advice = INSTALL_CUDA if isinstance(error.__cause__, ImportError) else "look at nvidia-smi"
        yield Finding("driver", Verdict.PROBLEM, str(error), advice)
        return
    yield Finding("driver", Verdict.OK, f"for CUDA {number // 1000}.{number % 1000 // 10} and older")
    if not found:
        yield Finding("GPU", Verdict.WARNING, "the driver shows none", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    for gpu in found:
        yield Finding(f"GPU {gpu.index}", Verdict.OK, str(gpu))
    if found:
        yield _launches()
    if found and not torch.cuda.is_available():
        text = "PyTorch cannot use the GPU" + ("" if torch.version.cuda else ": this build of it has no CUDA")
        yield Finding("PyTorch on GPU", Verdict.WARNING, text, "install a CUDA build of PyTorch: https://pytorch.org")


def _launches() -> Finding:
    absent = launch.why_absent()
    if absent is None:
        return Finding("launches", Verdict.OK, "a plan at a time")
    advice = "small convolutions take longer to launch than to compute. Install a wheel, or build it (README, Install)"
    return Finding("launches", Verdict.WARNING, f"one by one, from Python: {absent}", advice)


def _compiler() -> Iterator[Finding]:
    jit = settings.current().jit
    needed = _working_gpus() if jit else []
    try:
        build, archs = compiler_id(), supported_archs()
    except CudaError as error:
        state = Verdict.PROBLEM if needed else Verdict.OK
        text = f"none; needed for CUDA kernels only ({error})" if state is Verdict.OK else str(error)
        yield Finding("compiler", state, text, INSTALL_CUDA if state is Verdict.PROBLEM else "")
        return
    off = "" if jit else "; not run, because POLYCONV_JIT=off"
    yield Finding("compiler", Verdict.OK, f"NVRTC {build}, compiles for sm_{archs[0]} to sm_{archs[-1]}{off}")
    for gpu in needed:
        try:
            check_arch(gpu.description.arch)
        except CudaError as error:
            yield Finding("compiler", Verdict.PROBLEM, str(error), f"for GPU {gpu.index}, {gpu}")
            continue
        if newer := why_unloadable(int(driver.call("cuDriverGetVersion")), gpu.description.arch):
            yield Finding("compiler", Verdict.PROBLEM, newer, f"for GPU {gpu.index}, {gpu}")
        if older := ptx_arch(gpu.description.arch):
            text = f"no machine code for GPU {gpu.index}, {gpu}, which is newer; the driver translates PTX of {older}"
            yield Finding("compiler", Verdict.WARNING, text, "install a newer nvidia-cuda-nvrtc")


def _cache() -> Iterator[Finding]:
    directory = settings.current().cache_dir
    if directory is None:
        yield Finding("cache", Verdict.WARNING, settings.NO_CACHE, "every process compiles its kernels again")
        return
    found = store.Store.of_cache(directory)
    summary = store.summary(found)
    text = f"{found.path}, {summary['kernels']} kernels, {summary['bytes'] / 1e6:.1f} MB"
    if summary["refused"]:
        advice = "every process compiles its kernels again until then, or until POLYCONV_CACHE_DIR is a folder of yours"
        yield Finding("cache", Verdict.WARNING, f"{text}, none of them run: {summary['refused']}", advice)
    elif found.passed_over:
        text = f"{text}; those in {directory} are not run: {found.passed_over}"
        yield Finding("cache", Verdict.WARNING, text, "or move them: only this user may write the folder of a cache")
    elif summary["writable"]:
        yield Finding("cache", Verdict.OK, text)
    else:
        advice = "every process compiles its kernels again: set POLYCONV_CACHE_DIR to a folder that can be written"
        yield Finding("cache", Verdict.WARNING, f"{text}, not writable", advice)


def _bundles() -> Iterator[Finding]:
    for bundle in in_force():
        yield _bundle_finding(bundle)


def _bundle_finding(bundle: Bundle) -> Finding:
    try:
        damaged = bundle.check()
        kernels = bundle.manifest["kernels"]
    except EntryError as error:
        return Finding("bundle", Verdict.PROBLEM, str(error), "make one with polyconv warmup -o")
    archs = ", ".join(sorted({str(one["arch"]) for one in kernels.values()}))
    text = f"{bundle.folder}, {len(kernels)} kernels for {archs or 'nothing'}, digest {bundle.digest}"
    if damaged:
        advice = f"{len(damaged)} of them are refused (polyconv cache verify): make it anew with polyconv warmup -o"
        return Finding("bundle", Verdict.PROBLEM, text, advice)
    return Finding("bundle", Verdict.OK, text)


def _settings() -> Iterator[Finding]:
    variables = settings.current().as_variables()
    given = {name: text for name, text in os.environ.items() if name in variables and text.strip()}
    for name, text in given.items():
        yield Finding("setting", Verdict.OK, f"{name}={text} (environment)")
    defaults = {name: text for name, text in variables.items() if name not in given}
    rest = ", ".join(f"{name.removeprefix(settings.PREFIX)}={text or 'none'}" for name, text in defaults.items())
    yield Finding("settings", Verdict.OK, f"default: {rest}")
    slower = override.why_not_native()
    how = "native code passes calls through" if slower is None else f"calls pass through Python: {slower}"
    yield Finding(
        "enable", Verdict.OK, f"polyconv.enable() is {'' if override.is_enabled() else 'not '}in force; {how}"
    )
    for name in os.environ:
        if name.startswith(settings.PREFIX) and name not in variables and name not in OTHER_VARIABLES:
            close = get_close_matches(name, variables, n=1)
            advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(variables)}"
            yield Finding("setting", Verdict.WARNING, f"{name} is set, but no setting of polyconv", advice)


OTHER_VARIABLES = frozenset({"POLYCONV_NIGHTLY", "POLYCONV_BUILD_NATIVE"})
"""Not settings: read by the tests and the build."""


def _tuning() -> Iterator[Finding]:
    here = tuning_key.Environment.of_cpu(native.instruction_set() if native.is_available() else "").as_json()
    for path in tuning_lookup.files():
        if not path.exists():
            if path in (settings.current().tuning_file or ()):
                yield Finding("tuning", Verdict.WARNING, f"{path} does not exist", "the cost model decides instead")
            continue
        try:
            found = tuning_file.load(path)
        except (tuning_file.TuningError, OSError) as error:
            yield Finding("tuning", Verdict.WARNING, str(error), "the cost model decides instead")
            continue
        matching = sum(len(s.entries) for s in found.sections if s.environment in (here, *_gpu_environments()))
        yield Finding(
            "tuning", Verdict.OK, f"{path}: {len(found)} choices, {matching} of them measured on this machine"
        )


def _gpu_environments() -> list[Mapping[str, Any]]:
    """Environments of this machine's GPUs, as stored in a tuning file."""
    return [backend_for(torch.device("cuda", gpu.index)).environment().as_json() for gpu in usable_gpus()]


def _what_runs() -> Iterator[Finding]:
    if native.is_available():
        yield Finding(
            "cpu tensors", Verdict.OK, "polyconv's native kernels; PyTorch's where the planner expects no gain"
        )
    else:
        yield Finding("cpu tensors", Verdict.WARNING, "PyTorch's convolution", "see CPU above")
    if not usable_gpus():
        return
    current = settings.current()
    source = " and ".join(f"from {bundle.folder}" for bundle in in_force())
    if not current.jit:
        source = (source or "from the cache") + ", never compiled here (POLYCONV_JIT=off)"
    elif _compiler_works():
        source = (source + ", else " if source else "") + "compiled at first use"
    else:
        yield Finding("cuda tensors", Verdict.PROBLEM, "polyconv's kernels cannot be compiled", "see compiler above")
        return
    yield Finding("cuda tensors", Verdict.OK, f"polyconv's kernels, {source}; PyTorch's convolution is never called")


def _compiler_works() -> bool:
    try:
        for gpu in gpus():
            check_arch(gpu.description.arch)
    except CudaError:
        return False
    return True


def _memory(index: int) -> int:
    return int(driver.call("cuDeviceTotalMem", driver.device(index).handle))
