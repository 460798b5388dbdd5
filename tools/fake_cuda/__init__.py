"""A CUDA build of PyTorch on a machine without a GPU: a fake CUDA runtime, with an emulator behind it.

One library is preloaded in place of libcudart (``runtime/``) and libcuda (``driver/``). PyTorch's allocator, streams,
autograd threads and kernels, polyconv's kernels, and extensions built by nvcc, then run as they are; their machine
code for compute capability 7.0 is executed by ``tools/gpu_emulator``. A library can only be preloaded before a process
starts::

    subprocess.run([python, "program.py"], env=process_environment(headers))

and in ``program.py``::

    with PretendedGpu() as gpu:
        y = model(torch.randn(1, 32, 24, 40, device="cuda"))
    print(len(gpu.launches))
"""

from __future__ import annotations

from .gpu import Executor, LaunchRecord, PretendedGpu, compute_nothing, counts, describe_kernels, execute
from .library import process_environment

__all__ = [
    "Executor",
    "LaunchRecord",
    "PretendedGpu",
    "compute_nothing",
    "counts",
    "describe_kernels",
    "execute",
    "process_environment",
]
