"""Resources of compiled kernels, and lower bounds of their times from an emulator, without a GPU."""

from .emulated_cost import CountingError, EmulatorError, emulator
from .rows import InspectionError, Row, inspect_kernels, inspect_workloads

__all__ = [
    "CountingError",
    "EmulatorError",
    "InspectionError",
    "Row",
    "emulator",
    "inspect_kernels",
    "inspect_workloads",
]
