"""Winograd kernels with float32 accuracy on tensor cores, by three float16 products."""
