"""CPU backend: a planner, native C++ engines, and ATen's convolution where no engine beats it."""
