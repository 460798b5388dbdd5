"""A GPU without a GPU: polyconv's real launch path, on a stub of the CUDA driver, with an emulator behind it.

``driver/`` builds a ``libcuda.so.1`` that checks every launch against the limits of a V100, or of another GPU that the
environment names (``VIRTUAL_GPU_MODEL=t4``: see ``driver/model.c``). The CUDA bindings load it as they would load
NVIDIA's, so planning, compiling, caching, loading and marshalling are the code that runs in production.
What the stub is handed (machine code and parameter bytes) goes to ``tools/gpu_emulator``, which executes it on the
memory of ordinary CPU tensors.

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
