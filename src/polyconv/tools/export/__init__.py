"""``polyconv export``: one Python file with a convolution and its CUDA kernels, which imports only torch."""

from .board import board_file
from .model_file import exported_file
from .models import ExportError, Model, convolution_model, exportable, imported_model, named_model
from .simple_model import simple_file

__all__ = [
    "ExportError",
    "Model",
    "board_file",
    "convolution_model",
    "exportable",
    "exported_file",
    "imported_model",
    "named_model",
    "simple_file",
]
