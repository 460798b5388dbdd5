"""The CUDA source of an exported file."""

from __future__ import annotations

CUDA_SOURCE = ""
"""In an exported file: the kernels (:mod:`polyconv.export.kernels` writes it), and the function that launches them."""
