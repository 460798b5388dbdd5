"""Training graphs that call kernels."""
