"""What is asked: one pass of one 2-D convolution, described by numbers alone.

A :class:`Problem` is the only thing that the planner sees. It is frozen, hashable and printable, it knows neither torch
nor a device, and two calls that ask for the same thing build equal problems: so a plan can be cached under it, logged,
sent to another process, or written into a test.

Names used everywhere in polyconv:

======  =====================================================================================
``x``   the input (or, in the input-gradient pass, where its gradient is written)
``w``   the weight, out_channels x in_channels/groups x kernel height x kernel width
``y``   the output (or, in both gradient passes, where the incoming gradient is read)
======  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

DEFAULT_TOLERANCE = 1e-4
"""The error budget of a caller who says nothing."""

Pair = tuple[int, int]
Sides = tuple[int, int, int, int]
"""Top, bottom, left, right."""
Strides = tuple[int, int, int, int]
"""Element strides in the order batch, channel, row, column, whatever the order in memory."""


class Pass(str, Enum):
    """Which of the three passes of a convolution is asked for."""

    FPROP = "fprop"
    """Output from input and weight (and bias)."""
    DGRAD = "dgrad"
    """Gradient of the input from the gradient of the output; also what a transposed convolution computes."""
    WGRAD = "wgrad"
    """Gradient of the weight (and of the bias) from the input and the gradient of the output."""

    __hash__ = str.__hash__  # of the value, as equality is; and not in Python, because problems are keys everywhere

    def __str__(self) -> str:
        return self.value


class PaddingMode(str, Enum):
    """What stands outside the image. Named as in ``torch.nn.Conv2d``."""

    ZEROS = "zeros"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"

    __hash__ = str.__hash__  # of the value, as equality is; and not in Python, because problems are keys everywhere

    def __str__(self) -> str:
        return self.value


class Activation(str, Enum):
    """What a forward pass applies to its sums before it stores them."""

    NONE = "none"
    RELU = "relu"
    SILU = "silu"

    __hash__ = str.__hash__  # of the value, as equality is; and not in Python, because problems are keys everywhere

    def __str__(self) -> str:
        return self.value


def output_extent(extent: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> int:
    """Number of outputs along one axis: the kernel's positions that fit into the padded extent."""
    return (extent + before + after - dilation * (kernel - 1) - 1) // stride + 1


def contiguous_strides(shape: tuple[int, int, int, int]) -> Strides:
    """Element strides of a dense NCHW tensor. An extent of zero counts as one, as in torch."""
    _, c, h, w = (max(extent, 1) for extent in shape)
    return (c * h * w, h * w, w, 1)


def channels_last_strides(shape: tuple[int, int, int, int]) -> Strides:
    """Element strides of a dense NHWC tensor whose shape is given in NCHW order."""
    _, c, h, w = (max(extent, 1) for extent in shape)
    return (h * w * c, 1, w * c, c)


@dataclass(frozen=True, slots=True)
class Problem:
    """One pass of a 2-D convolution. Build it with :meth:`make`, which fills in dense strides."""

    kind: Pass
    batch: int
    in_channels: int
    out_channels: int
    in_size: Pair
    kernel: Pair
    stride: Pair
    padding: Sides
    dilation: Pair
    groups: int
    padding_mode: PaddingMode
    bias: bool
    """FPROP: a bias is added. WGRAD: the bias gradient is wanted too. DGRAD: ignored."""
    x_strides: Strides
    w_strides: Strides
    y_strides: Strides
    vector_aligned: bool
    """The first elements of x, y and the residual lie on 16-byte boundaries."""
    dtype: str
    tolerance: float = DEFAULT_TOLERANCE
    """The error, relative to the output's scale, that a fast algorithm may be expected to make; 0: none may run."""
    activation: Activation = Activation.NONE
    """FPROP: applied to the sums, bias and residual included. The gradient passes know none."""
    residual: bool = False
    """FPROP: a tensor laid out as y is added before the activation."""

    @classmethod
    def make(
        cls,
        kind: Pass | str,
        x_shape: tuple[int, int, int, int],
        w_shape: tuple[int, int, int, int],
        *,
        stride: Pair = (1, 1),
        padding: Sides = (0, 0, 0, 0),
        dilation: Pair = (1, 1),
        groups: int = 1,
        padding_mode: PaddingMode | str = PaddingMode.ZEROS,
        bias: bool = False,
        x_strides: Strides | None = None,
        w_strides: Strides | None = None,
        y_strides: Strides | None = None,
        vector_aligned: bool = True,
        dtype: str = "float32",
        tolerance: float = DEFAULT_TOLERANCE,
        activation: Activation | str = Activation.NONE,
        residual: bool = False,
    ) -> Problem:
        """A problem from the shapes of input and weight; strides not given are those of dense NCHW tensors."""
        problem = cls(
            kind=Pass(kind),
            batch=x_shape[0],
            in_channels=x_shape[1],
            out_channels=w_shape[0],
            in_size=(x_shape[2], x_shape[3]),
            kernel=(w_shape[2], w_shape[3]),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            padding_mode=PaddingMode(padding_mode),
            bias=bias,
            x_strides=x_strides or contiguous_strides(x_shape),
            w_strides=w_strides or contiguous_strides(w_shape),
            y_strides=y_strides or (0, 0, 0, 0),
            vector_aligned=vector_aligned,
            dtype=dtype,
            tolerance=tolerance,
            activation=Activation(activation),
            residual=residual,
        )
        return problem if y_strides else replace(problem, y_strides=contiguous_strides(problem.y_shape))

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the output; zero or less where the kernel does not fit."""
        top, bottom, left, right = self.padding
        return (
            output_extent(self.in_size[0], top, bottom, self.kernel[0], self.stride[0], self.dilation[0]),
            output_extent(self.in_size[1], left, right, self.kernel[1], self.stride[1], self.dilation[1]),
        )

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def channels_per_group(self) -> Pair:
        """Input and output channels of one group."""
        return (self.in_channels // self.groups, self.out_channels // self.groups)

    @property
    def depthwise(self) -> bool:
        """Every input channel is its own group (each may feed several output channels)."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def multiplications(self) -> int:
        """Multiply-adds of the direct method, padding counted as if it were data."""
        out_h, out_w = self.out_size
        r, s = self.kernel
        return self.batch * self.out_channels * out_h * out_w * (self.in_channels // self.groups) * r * s

    def for_pass(self, kind: Pass) -> Problem:
        """The same convolution, another pass. Only the forward pass has an epilogue."""
        if kind is Pass.FPROP:
            return replace(self, kind=kind)
        return replace(self, kind=kind, activation=Activation.NONE, residual=False)

    def __str__(self) -> str:
        n, c, h, w = self.x_shape
        parts = [
            f"{self.kind} {n}x{c}x{h}x{w}",
            f"{self.out_channels} channels",
            f"kernel {self.kernel[0]}x{self.kernel[1]}",
        ]
        if self.stride != (1, 1):
            parts.append(f"stride {self.stride[0]}x{self.stride[1]}")
        if any(self.padding):
            top, bottom, left, right = self.padding
            symmetric = top == bottom and left == right
            sides = f"{top}x{left}" if symmetric else f"{top},{bottom},{left},{right}"
            mode = "" if self.padding_mode is PaddingMode.ZEROS else f" {self.padding_mode}"
            parts.append(f"padding {sides}{mode}")
        if self.dilation != (1, 1):
            parts.append(f"dilation {self.dilation[0]}x{self.dilation[1]}")
        if self.groups != 1:
            parts.append(f"{self.groups} groups")
        if self.bias:
            parts.append("bias")
        if self.residual:
            parts.append("residual")
        if self.activation is not Activation.NONE:
            parts.append(str(self.activation))
        return ", ".join(parts)
