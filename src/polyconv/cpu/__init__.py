"""The CPU backend: a planner, engines of polyconv's own in C++, and PyTorch's convolution where nothing beats it."""
