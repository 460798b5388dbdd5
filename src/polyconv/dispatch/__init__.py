"""Convolution passes as operators of PyTorch's dispatcher.

========================  =================================================================================
``conv2d_fprop``          output from input, weight and bias; the epilogue adds a residual and applies an activation
                          before the output is stored
``conv2d_dgrad``          input gradient from output gradient and weight; with a bias, a transposed convolution
``conv2d_wgrad``          weight and bias gradients from output gradient and input
``conv_transpose``        ``conv2d_dgrad`` with the arguments of a transposed convolution: computes the output size
                          itself, so that a ``torch.jit.trace`` graph holds no size
========================  =================================================================================

Operators rather than plain functions, so that ``torch.compile``, ``torch.export``, fake tensors, autocast and autograd
see one well-described call. Weight and bias gradients share an operator because both read the output gradient. Each
pass is linear in each of its tensors, so its derivatives are again these three passes, which is all that double
backward needs. An epilogue adds the mask of its activation.

The weight determines the rank; ``conv2d`` in the names is kept for saved graphs. Strides are arbitrary, and inputs are
never copied: the gradient of ``y.sum()``, with stride zero everywhere, reaches the backend as it is. The one exception
is a residual whose layout differs from the output's: it is copied into that layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Pass
from . import execute
from .operands import geometry_of, problem_of, transposed_layout
from .schema import Args, dgrad, fprop, library, split_bias, split_epilogue, transposed, wgrad
from .transforms import autograd as transforms_autograd
from .transforms import fake as fakes
from .transforms import flops
from .transforms.autocast import HOW_TO_ALLOW, overruled_dtype, register_autocast
from .transforms.autograd import input_gradient, weight_gradient
from .transforms.dtensor_import import expect_dtensors
from .transforms.vmap import register_vmap, vmap_dgrad, vmap_fprop, vmap_wgrad

__all__ = [
    "HOW_TO_ALLOW",
    "dgrad",
    "expect_dtensors",
    "fprop",
    "geometry_of",
    "input_gradient",
    "overruled_dtype",
    "problem_of",
    "split_bias",
    "split_epilogue",
    "transposed",
    "transposed_layout",
    "weight_gradient",
    "wgrad",
]


def _register(kind: Pass, op: Any, run: Any, fake: Any, autograd: Any, vmap: Any) -> None:
    name = f"conv2d_{kind}"
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyconv::{name}", fake, lib=library)
    library.impl(name, autograd, "Autograd", with_keyset=True)
    register_vmap(name, vmap)
    register_autocast(name, op)


def _run_transposed(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Args,
    padding: Args,
    output_padding: Args,
    groups: int,
    dilation: Args,
    tolerance: float | None = None,
) -> Tensor:
    numbers = stride, padding, output_padding, groups, dilation, tolerance
    geometry, (size, channels_last) = transposed_layout(w.dim() - 2, x, w, bias, *numbers)
    return dgrad(x, w, size, channels_last, *geometry, bias)


_register(Pass.FPROP, fprop, execute.run_fprop, fakes.fake_fprop, transforms_autograd.fprop_kernel, vmap_fprop)
_register(Pass.DGRAD, dgrad, execute.run_dgrad, fakes.fake_dgrad, transforms_autograd.dgrad_kernel, vmap_dgrad)
_register(Pass.WGRAD, wgrad, execute.run_wgrad, fakes.fake_wgrad, transforms_autograd.wgrad_kernel, vmap_wgrad)

library.impl("conv_transpose", _run_transposed, "CompositeImplicitAutograd")
register_autocast("conv_transpose", transposed)
flops.expect_counter()
