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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..check import Check, Needs, Part, Result
from ..journal import SELF_TEST
from . import (
    graphs,
    installation,
    kernels,
    large,
    layouts,
    occupancy,
    streams_and_threads,
    timing,
    training,
    workloads,
)


def _single(part: Callable[[Any], Result]) -> Callable[[Any], Mapping[str, Part]]:
    """The only part of a check, without a name."""
    return lambda subject: {"": partial(part, subject)}


CHECKS = {
    check.name: check
    for check in (
        Check("installation", installation.parts, Needs.NOTHING, limit=1800.0),
        Check("occupancy", occupancy.parts, Needs.NOTHING),
        Check("every kernel", kernels.every_kernel, Needs.TENSORS),
        Check("every pass", kernels.every_pass, Needs.TENSORS, limit=600.0),
        Check("layouts", layouts.parts, Needs.TENSORS),
        Check("backward first", _single(streams_and_threads.backward_first), Needs.TENSORS),
        Check("fresh thread", _single(streams_and_threads.fresh_thread), Needs.TENSORS),
        Check("side stream", _single(streams_and_threads.side_stream), blocking=False),
        Check("another GPU", _single(streams_and_threads.another_gpu), Needs.TENSORS, gpus=2),
        Check("CUDA graphs", graphs.parts, blocking=False, limit=600.0),
        Check("deterministic mode", _single(training.deterministic), Needs.TENSORS),
        Check("autocast", _single(training.autocast), Needs.TENSORS),
        Check("training", _single(training.like_torch), Needs.TENSORS, limit=600.0),
        Check("DataParallel", _single(training.data_parallel), gpus=2, limit=600.0),
        Check("two ranks", _single(training.two_ranks), gpus=2, limit=600.0),
        Check("large tensors", large.parts, limit=600.0),
        Check("timing", timing.parts, blocking=False, limit=600.0),
        Check("workloads", workloads.parts, blocking=False, limit=600.0),
    )
}
SELECTIONS: Mapping[str, tuple[str, ...]] = {
    "full": tuple(CHECKS),
    "quick": ("installation", "occupancy", "every kernel", "layouts", "side stream", "timing"),
    SELF_TEST: ("every pass", "workloads"),
}
"""Names of the checks in each kind of session. Those of the self-test run on the CPU, too."""
