"""Winograd (Cook-Toom) kernels in float32: fused, nonfused, and the weight gradient."""
