"""Programs for the Python of a CUDA build of PyTorch: they import torch, an exported file, and nothing of polyconv."""
