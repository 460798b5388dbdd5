"""polyconv's convolutions on CPU tensors, as a kernel of the Hugging Face hub."""

from . import layers
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "layers"]
