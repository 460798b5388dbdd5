"""Exact mathematics of convolution: integers and fractions only, no torch, no device."""
