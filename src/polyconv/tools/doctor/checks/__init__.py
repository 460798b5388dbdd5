"""All checks, in the order in which they run: prerequisites of others first.

============================  ======================================================================
:mod:`~.installation`         compiler, driver and clocks; planning, compile and load times
:mod:`~.occupancy`            every kernel loads, with the planned number of blocks per multiprocessor
:mod:`~.kernels`              every kernel, forced by name, and every pass of every family
:mod:`~.layouts`              views, channels last, expanded gradients
:mod:`~.streams_and_threads`  streams, threads, another GPU, a backward pass first
:mod:`~.graphs`               CUDA graphs
:mod:`~.training`             next to PyTorch: plain, deterministic, autocast, several GPUs
:mod:`~.large`                more than 2**31 elements
:mod:`~.timing`               next to PyTorch and to the cost model
:mod:`~.workloads`            headline workloads next to PyTorch
============================  ======================================================================

:mod:`~.layer` is the small convolution that many of them run.
"""

from __future__ import annotations

from ..check import Check
from ..journal import SELF_TEST
from .graphs import GRAPHS
from .installation import INSTALLATION
from .kernels import EVERY_KERNEL, EVERY_PASS
from .large import LARGE
from .layouts import LAYOUTS
from .occupancy import OCCUPANCY
from .streams_and_threads import ANOTHER_GPU, BACKWARD_FIRST, FRESH_THREAD, SIDE_STREAM
from .timing import TIMING
from .training import AUTOCAST, DATA_PARALLEL, DETERMINISTIC, TRAINING, TWO_RANKS
from .workloads import WORKLOADS

SELECTIONS: dict[str, tuple[Check, ...]] = {
    "full": (
        INSTALLATION,
        OCCUPANCY,
        EVERY_KERNEL,
        EVERY_PASS,
        LAYOUTS,
        BACKWARD_FIRST,
        FRESH_THREAD,
        SIDE_STREAM,
        ANOTHER_GPU,
        GRAPHS,
        DETERMINISTIC,
        AUTOCAST,
        TRAINING,
        DATA_PARALLEL,
        TWO_RANKS,
        LARGE,
        TIMING,
        WORKLOADS,
    ),
    "quick": (INSTALLATION, OCCUPANCY, EVERY_KERNEL, LAYOUTS, SIDE_STREAM, TIMING),
    SELF_TEST: (EVERY_PASS, WORKLOADS),
}
"""Checks of each kind of session. Those of the self-test run on the CPU, too."""
CHECKS = {check.name: check for check in SELECTIONS["full"]}
