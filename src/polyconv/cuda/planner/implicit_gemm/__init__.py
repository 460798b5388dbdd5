"""Implicit GEMM kernels: forward and input gradient, weight gradient, with and without tensor cores."""
