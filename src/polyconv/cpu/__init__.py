"""CPU backends. Today there is one: :mod:`polyconv.cpu.aten`, which hands the work to PyTorch."""
