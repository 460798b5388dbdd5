"""Layers for ``kernels.kernelize``: ``forward`` methods for the modules of ``torch.nn`` with the same names.

The hub's rules for a layer: a subclass of ``nn.Module`` with ``forward`` and no other method. ``self`` is torch's.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


def _forward(conv: Any, module: Any, input: Tensor) -> Tensor:
    geometry = module.stride, module.padding, module.dilation, module.groups
    result: Tensor = conv(input, module.weight, module.bias, *geometry, padding_mode=module.padding_mode)
    return result


def _transposed(conv: Any, module: Any, input: Tensor, output_size: Sequence[int] | None) -> Tensor:
    output_padding = module.output_padding
    if output_size is not None:
        sizes = module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
        output_padding = tuple(module._output_padding(input, list(output_size), *sizes))
    geometry = module.stride, module.padding, output_padding, module.groups, module.dilation
    result: Tensor = conv(input, module.weight, module.bias, *geometry)
    return result


class Conv1d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return _forward(conv1d, self, input)


class Conv2d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return _forward(conv2d, self, input)


class Conv3d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return _forward(conv3d, self, input)


class ConvTranspose1d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return _transposed(conv_transpose1d, self, input, output_size)


class ConvTranspose2d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return _transposed(conv_transpose2d, self, input, output_size)


class ConvTranspose3d(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return _transposed(conv_transpose3d, self, input, output_size)
