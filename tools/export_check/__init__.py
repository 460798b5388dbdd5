"""Exported model.py files, proven as they are built: by nvcc, in a CUDA build of PyTorch, as machine code.

``python tools/export_check`` does all of it; ``python tools/export_check --list`` names the steps.
"""
