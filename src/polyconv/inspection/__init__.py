"""What can be said about a kernel without running it on a GPU.

=======================  ==================================================================================
:mod:`~.counting`        what a V100 or an A100 would spend on a launch, counted by executing a sample of its blocks
:mod:`~.rows`            both, for the kernels of a workload's plans: the rows of ``polyconv inspect``
=======================  ==================================================================================
"""

from .counting import CountingError, EmulatorError, emulator
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
