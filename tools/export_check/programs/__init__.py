"""Programs for the Python of a CUDA build of PyTorch: they import torch and an exported file, never polyconv."""
