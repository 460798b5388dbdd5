"""The passes of a convolution as operators of PyTorch's dispatcher.

========================  =================================================================================
``conv2d_fprop``          output from input, weight and bias; with an epilogue, a residual is added and an activation
                          applied before the sums are stored
``conv2d_dgrad``          gradient of the input from the gradient of the output and the weight; with a bias, the output
                          of a transposed convolution
``conv2d_wgrad``          gradients of weight and bias from the gradient of the output and the input
``conv_transpose``        ``conv2d_dgrad`` with the arguments of a transposed convolution: it computes the output's size
                          itself, so that a graph of ``torch.jit.trace`` holds no size
========================  =================================================================================

They are operators, and not plain functions, so that ``torch.compile``, ``torch.export``, fake tensors, autocast and
autograd all see one well-described call. The weight and bias gradients share an operator because they share a read of
the incoming gradient. Each of the three passes is linear in each of its tensors, so the derivative of any of them is
again made of these three: that is all that double backward needs. An epilogue adds the mask of its activation.

The operators take tensors over as many axes as the weight has; their names are those that saved graphs know. The
tensors may have any strides, and an input is never copied: the gradient of ``y.sum()``, a tensor of stride
zero everywhere, reaches the backend as it is. The one exception is a residual that is not laid out as the output will
be: it is brought into that layout first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Pass
from . import derivatives, execution, flops
from . import fake as fakes
from .autocast import overruled_dtype, register_autocast
from .derivatives import input_gradient, weight_gradient
from .layouts import geometry_of, transposed_layout
from .meeting import expect_dtensors
from .precision import HOW_TO_ALLOW, is_widened, widening
from .problems import dense_strides, problem_of
from .reduced import runs_as
from .schema import Args, dgrad, fprop, library, split_bias, split_epilogue, transposed, wgrad
from .vmap import register_vmap, vmap_dgrad, vmap_fprop, vmap_wgrad

__all__ = [
    "HOW_TO_ALLOW",
    "dense_strides",
    "dgrad",
    "expect_dtensors",
    "fprop",
    "geometry_of",
    "input_gradient",
    "is_widened",
    "overruled_dtype",
    "problem_of",
    "runs_as",
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
    library.impl(name, widening(kind, run), "CUDA")
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


_register(Pass.FPROP, fprop, execution.run_fprop, fakes.fake_fprop, derivatives.fprop_kernel, vmap_fprop)
_register(Pass.DGRAD, dgrad, execution.run_dgrad, fakes.fake_dgrad, derivatives.dgrad_kernel, vmap_dgrad)
_register(Pass.WGRAD, wgrad, execution.run_wgrad, fakes.fake_wgrad, derivatives.wgrad_kernel, vmap_wgrad)

library.impl("conv_transpose", _run_transposed, "CompositeImplicitAutograd")
register_autocast("conv_transpose", transposed)
flops.expect_counter()
