"""Exported model.py files, proven as they are built: by nvcc, in a CUDA build of PyTorch, as machine code.

``python tools/exported`` does all of it; ``python tools/exported --list`` names the steps.
"""
