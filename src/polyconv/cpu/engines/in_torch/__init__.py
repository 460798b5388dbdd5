"""Engines in PyTorch's operators: FFTs and matrix products in the place of native kernels."""
