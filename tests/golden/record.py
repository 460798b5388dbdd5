"""The golden record: plans for all workloads on all known devices, and the machine code of every kernel, as they were.

A change that is to change no plan must leave these files alone; one that does shows in them, problem by problem, what
it changed. Of launches the record has names and grids, and a hash of everything else in them, parameter bytes included;
of a kernel's machine code it has a hash for the compiler that made it.

    python tests/golden/record.py                    write all records anew
    python tests/golden/record.py v100 machine_code  write these
    python tests/golden/record.py machine_code --kernels band_wgrad  only kernels with this word; the others stay
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import isclose
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpu_emulator import elf
from polyconv.activation import Activation
from polyconv.cpu import native, planner
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines import channel_lanes
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel, compiler_id
from polyconv.cuda.planner import DEVICES, KernelSpec, Launch, Plan, all_kernels, plan_cuda
from polyconv.measure.workloads import find
from polyconv.problem import PaddingMode, Pass, Problem

FOLDER = Path(__file__).resolve().parent
CPUS = {
    "avx512": CpuDevice("avx512", cores=16, l1_bytes=48 * 2**10, l2_bytes=2 * 2**20),
    "avx2": CpuDevice("avx2", cores=8, l1_bytes=32 * 2**10, l2_bytes=512 * 2**10),
}
"""Described here, so that the record does not depend on the machine."""
MACHINE_CODE = "machine_code"
ARCHS = ("sm_70", "sm_80")
DIGITS = 6
"""Significant digits of errors and costs."""
_ADDRESSES = 4
"""Constant bank with the addresses of a cubin's variables."""

Record = dict[str, Any]
"""By problem: the plan. By kernel: the hash of its machine code."""


def problems() -> Iterator[tuple[str, Problem]]:
    """Every pass of every workload, on dense tensors."""
    for workload in find("all"):
        for kind in Pass:
            yield f"{workload.id} {kind}", workload.problem(kind)


def variants() -> Iterator[tuple[str, Problem]]:
    """Variants: channels_last tensors, a border of image values, an epilogue."""
    for name, problem in problems():
        yield f"{name}, channels_last", problem.channels_last()
        if any(problem.padding):
            yield f"{name}, replicated border", replace(problem, padding_mode=PaddingMode.REPLICATE)
        if problem.kind is Pass.FPROP:
            yield f"{name}, residual and SiLU", replace(problem, residual=True, activation=Activation.SILU)


# ------------------------------------------------------------------------------------------------------------- records


def cuda_record(name: str) -> Record:
    """Plans for a known GPU; for the first one also variants."""
    every = [*problems(), *(variants() if name == next(iter(DEVICES)) else ())]
    return {problem_name: _cuda_entry(plan_cuda(problem, DEVICES[name])) for problem_name, problem in every}


def _cuda_entry(plan: Plan) -> dict[str, Any]:
    times: dict[str, int] = {}
    for launch in plan.launches:
        times[str(launch)] = times.get(str(launch), 0) + 1
    return {
        "runs": plan.algorithm,
        "error": _rounded(plan.predicted_error),
        "cost_us": _rounded(plan.cost_us),
        "workspace": plan.workspace_bytes,
        "launches": [text + (f", {n} times" if n > 1 else "") for text, n in times.items()],
        "bytes": launch_hash(plan.launches),
    }


def launch_hash(launches: Iterable[Launch]) -> str:
    """All launches in order: kernels, grids, blocks, shared memory, parameters, and pointer targets."""
    digest = hashlib.sha256()
    for launch in launches:
        pointers = [(slot.offset, slot.buffer, slot.byte_offset) for slot in launch.pointers]
        digest.update(f"{launch} {pointers} {len(launch.params)} ".encode() + launch.params)
    return digest.hexdigest()[:16]


def cpu_record(name: str) -> Record:
    """Plans for a described processor, with weights transformed at every call and, in inference, cached: frozen, or
    read at each call.

    The cut of a weight gradient's sums depends on the instruction set of the native kernels, and so does its error:
    they are switched to it, and cached plans are dropped.
    """
    found: Record = {}
    native.instruction_set(name)
    try:
        _forget()
        for problem_name, problem in problems():
            found[problem_name] = _cpu_entry(planner.plan_cpu(problem, CPUS[name]))
            if problem.kind is Pass.FPROP:
                frozen = planner.plan_cpu(replace(problem, frozen=True), CPUS[name], inference=True)
                found[f"{problem_name}, weights kept"] = _cpu_entry(frozen)
                checked = planner.plan_cpu(problem, CPUS[name], inference=True)
                found[f"{problem_name}, weights read"] = _cpu_entry(checked)
    finally:
        native.instruction_set("best")
        _forget()
    return found


def _forget() -> None:
    for value in (*vars(planner).values(), *vars(channel_lanes).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _cpu_entry(plan: planner.CpuPlan) -> dict[str, Any]:
    return {"runs": plan.name, "error": _rounded(plan.predicted_error), "cycles": _rounded(plan.chosen.cycles)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def code_key(spec: KernelSpec, arch: str) -> str:
    """Key of a kernel in the machine-code record: compiler, kernel, architectures."""
    return f"{compiler_id()}, {arch}, {spec.symbol}"


def code_hash(spec: KernelSpec, arch: str, known: str | None) -> str:
    """Hash of a compiled kernel: machine code, constants, resources, parameter layout.

    NVRTC orders the instructions of a few kernels differently while other threads compile, and sometimes after many
    other compilations. So a cached kernel that differs from the record is compiled again by a process that does nothing
    else. One compilation in several can differ even there, so there is a second attempt.
    """
    found = cubin_hash(KernelCache().get(spec, arch))
    for _ in range(2):
        if found == known:
            break
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found = cubin_hash(alone.submit(compile_kernel, spec, arch).result())
    return found


def cubin_hash(cubin: bytes) -> str:
    """Hash of a cubin's only kernel. Names and debug sections do not count, nor do variables, whose addresses are
    constant bank 4: every static constant of a header is one, used or not, and no kernel reads any.
    """
    loaded = elf.load(cubin)
    (kernel,) = map(loaded.kernel, loaded.kernel_names)
    digest = hashlib.sha256(kernel.code)
    for bank, data in kernel.constants.items():
        digest.update(data if bank != _ADDRESSES else b"")
    layout = [(parameter.offset, parameter.size) for parameter in kernel.parameters]
    facts = (kernel.registers, kernel.static_shared, kernel.frame_bytes, kernel.stack_bytes, kernel.max_threads)
    digest.update(f"{layout} {facts}".encode())
    return digest.hexdigest()[:16]


def machine_code_record(word: str = "") -> Record:
    """Hash of every kernel whose symbol contains the word; entries of others and of other compilers stay on record."""
    others = load(MACHINE_CODE) if path(MACHINE_CODE).exists() else {}
    found = {key: value for key, value in others.items() if not key.startswith(f"{compiler_id()}, ")}
    for arch in ARCHS:
        KernelCache().get_many([spec for spec in all_kernels(arch) if word in spec.symbol], arch)
        for spec in all_kernels(arch):
            key = code_key(spec, arch)
            if word in spec.symbol:
                found[key] = code_hash(spec, arch, others.get(key))
            elif key in others:
                found[key] = others[key]
    return found


RECORDS: dict[str, Callable[[], Record]] = {
    **{name: lambda name=name: cuda_record(name) for name in DEVICES},  # type: ignore[misc]
    **{name: lambda name=name: cpu_record(name) for name in CPUS},  # type: ignore[misc]
    MACHINE_CODE: machine_code_record,
}
"""The current records, by name."""


# --------------------------------------------------------------------------------------------------------- differences


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """Text of the differences by problem: the recorded choice, and the current one."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        if name not in now:
            found.append(f"{name} on {where} is on record and is not planned any more")
        elif name not in before:
            found.append(f"{name} on {where} is planned and not on record")
        else:
            changed = [key for key in before[name] if not _same(before[name][key], now[name].get(key))]
            if changed:
                found.append(f"{name} on {where}:")
                found += [f"  {key}: {_text(before[name][key])} -> {_text(now[name].get(key))}" for key in changed]
    return found


def _same(before: object, now: object) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return isclose(before, now, rel_tol=2 * 10.0 ** (1 - DIGITS))
    return before == now


def _text(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


# --------------------------------------------------------------------------------------------------------------- files


def path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def load(name: str) -> Record:
    found: Record = json.loads(path(name).read_text(encoding="utf-8"))
    return found


def save(name: str, record: Record) -> None:
    """One line per problem or kernel, so that a diff is readable."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    path(name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden record anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(RECORDS)}; all if none is named")
    parser.add_argument("--kernels", metavar="WORD", default="", help=f"{MACHINE_CODE}: only kernels with this word")
    args = parser.parse_args()
    for name in args.names or RECORDS:
        if name not in RECORDS:
            parser.error(f"no record is called {name}; there are {', '.join(RECORDS)}")
        save(name, machine_code_record(args.kernels) if name == MACHINE_CODE else RECORDS[name]())
        print(path(name))


if __name__ == "__main__":
    main()
