"""Exported model.py files, checked as built: by nvcc, in a CUDA build of PyTorch, as machine code.

``python tools/export_check`` runs all checks; ``python tools/export_check --list`` names the steps.
"""
