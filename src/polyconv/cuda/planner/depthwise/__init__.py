"""Depthwise kernels: tiles with a halo, and strips of rows."""
