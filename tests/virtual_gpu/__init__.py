"""A GPU without a GPU: polyconv's real launch path, on a fake CUDA driver, with an emulator behind it.

``tools/fake_cuda`` builds a ``libcuda.so.1`` that checks every launch against the limits of a V100, or of the GPUs that
the environment names (``FAKE_CUDA_DEVICES=t4``: see ``driver/device.c`` there). The CUDA bindings load it as they would
load NVIDIA's, so planning, compiling, caching, loading and marshalling are the code that runs in production. The driver
passes machine code and parameter bytes to ``tools/gpu_emulator``, which executes them on the memory of CPU tensors.

A library can only take libcuda's place before the process starts. So tests run their bodies in a child process::

    def check():
        with VirtualGpu() as gpu:
            backend = gpu.backend()
            backend.run(problem, tensors)


    def test_something():
        run_in_virtual_gpu(check)

The child is started once and reused; it is killed when a call takes too long. What the function returns, or raises,
comes back to the test.
"""

from __future__ import annotations

from .process import run_in_virtual_gpu

__all__ = ["run_in_virtual_gpu"]
