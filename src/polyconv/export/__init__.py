"""Self-contained files: one Python file that holds a convolution, its CUDA kernels, and nothing imported but torch."""

from .file import exported_file
from .models import ExportError, Model, convolution_model, exportable, imported_model, named_model

__all__ = [
    "ExportError",
    "Model",
    "convolution_model",
    "exportable",
    "exported_file",
    "imported_model",
    "named_model",
]
