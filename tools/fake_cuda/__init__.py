"""A fake CUDA driver, and a fake CUDA runtime on top of it, with an emulator behind them.

The driver alone (``driver/``) takes the place of libcuda in ``tests/virtual_gpu``. With the runtime (``runtime/``) it
is preloaded in place of libcudart, too: PyTorch's allocator, streams, autograd threads and kernels, polyconv's kernels,
and extensions built by nvcc then run unchanged, and ``tools/gpu_emulator`` executes their machine code for compute
capability 7.0. A library can only be preloaded before a process starts::

    subprocess.run([python, "program.py"], env=process_environment(headers))

and in ``program.py``::

    with PretendedGpu() as gpu:
        y = model(torch.randn(1, 32, 24, 40, device="cuda"))
    print(len(gpu.launches))
"""

from __future__ import annotations

from .gpu import Executor, LaunchRecord, PretendedGpu, compute_nothing, counts, execute, unpack_fat_binaries
from .library import process_environment

__all__ = [
    "Executor",
    "LaunchRecord",
    "PretendedGpu",
    "compute_nothing",
    "counts",
    "execute",
    "process_environment",
    "unpack_fat_binaries",
]
