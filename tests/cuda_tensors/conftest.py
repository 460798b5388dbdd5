"""Tests of the CUDA path with real CUDA tensors: a CUDA build of PyTorch on fake GPUs (tools/fake_cuda).

    .ci/check_cuda_tensors                                               all of it
    python tools/fake_cuda -m pytest -m 'not caching' tests/cuda_tensors
    python tools/fake_cuda --caching -m pytest -m caching tests/cuda_tensors

An ordinary run of the tests has no such PyTorch, and leaves this folder out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fake_cuda import LaunchRecord, PretendedGpu, execute

from .comparing import is_ours

collect_ignore_glob = [] if "FAKE_CUDA_DEVICES" in os.environ else ["*"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[PretendedGpu]:
    """Two V100s, the first one current. For polyconv's kernels, data races in global memory are checked as well."""

    def executor(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
        execute(launch, buffers, check_global=is_ours(launch))

    torch.cuda.set_device(0)
    with PretendedGpu(executor) as found:
        yield found
        found.repair()
    assert torch.cuda.current_device() == 0, "the device guard of something did not restore the current device"
