"""Runs machine code of a V100 or an A100 without a GPU, checks every access, counts what the chip would spend.

>>> report = gpu_emulator.run(cubin, "kernel", grid=4, block=128, args=[x, y, gpu_emulator.i32(n)])
>>> print(report, report.speed_of_light(), sep="\\n")
"""

from .chips import A100, CHIPS, V100, Chip
from .elf import CubinError, Resources, resources
from .faults import (
    BadBranch,
    BadConstant,
    Deadlock,
    DivergentBarrier,
    Fault,
    GlobalRace,
    InstructionLimit,
    LaunchError,
    Misaligned,
    OutOfBounds,
    SharedRace,
    Trap,
    UnfinishedCopy,
    UninitialisedShared,
    Unsupported,
)
from .launch import Buffer, Device, f32, f64, i32, i64, run, run_raw, sparse, u32, u64
from .report import Report, SpeedOfLight
from .toolchain import ToolchainError

__all__ = [
    "A100",
    "CHIPS",
    "V100",
    "BadBranch",
    "BadConstant",
    "Buffer",
    "Chip",
    "CubinError",
    "Deadlock",
    "Device",
    "DivergentBarrier",
    "Fault",
    "GlobalRace",
    "InstructionLimit",
    "LaunchError",
    "Misaligned",
    "OutOfBounds",
    "Report",
    "Resources",
    "SharedRace",
    "SpeedOfLight",
    "ToolchainError",
    "Trap",
    "UnfinishedCopy",
    "UninitialisedShared",
    "Unsupported",
    "f32",
    "f64",
    "i32",
    "i64",
    "resources",
    "run",
    "run_raw",
    "sparse",
    "u32",
    "u64",
]
