"""Problems: one pass of one convolution over one to three axes, described by numbers.

A :class:`Problem` is all that a planner sees. It is frozen, hashable and printable, independent of torch and of a
device, and equal for equal calls, so it can be a cache key, be logged, sent to another process or written into a test.

Names used everywhere in polyconv:

======  =====================================================================================
``x``   the input (in the input-gradient pass: the input gradient, which is written)
``w``   the weight, out_channels x in_channels/groups x kernel extents
``y``   the output (in both gradient passes: the incoming gradient, which is read)
======  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Literal, Protocol

from .activation import Activation

DEFAULT_TOLERANCE = 1e-4
Tolerance = float | Literal["torch"]
"""Error budget as a user writes it. ``"torch"``: the error that PyTorch has under its current flags."""
TORCH_TOLERANCE = -(2.0**-20)
"""``"torch"`` as a number, for operators and problems: TF32's error on GPUs that have the format, else float32's."""
TORCH_FLOAT32 = -(2.0**-21)
"""The same where PyTorch's flags do not allow TF32."""

Pair = tuple[int, int]
Extents = tuple[int, ...]
"""One number per axis, the slowest axis of a dense image first: (height, width) in 2-D."""
Sides = tuple[int, ...]
"""Before and after each axis: (top, bottom, left, right) in 2-D."""
Shape = tuple[int, ...]
"""Batch (of a weight: output channels), channels, extents."""
Strides = tuple[int, ...]
"""Element strides in the order of a :data:`Shape`, whatever the order in memory."""

ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""dtype -> size of an element [bytes]."""
HALF_DTYPES = ("float16", "bfloat16")
TF32 = "TF32"
"""Name of the format of 19 bits in which PyTorch may multiply float32 tensors."""

IMAGE_CHANNELS = 4
"""Most channels of an input that is assumed to be the network's own input, which needs no gradient."""

LENGTH_BITS = 5
"""Significant bits of the lengths of signals for which choices are made; others take that of the next smaller one.
PyTorch needs about a millisecond for a length that it has not met, and a choice would take twice as long."""

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""Number of axes -> their names."""


class Moves(Protocol):
    """Stride, padding and dilation of a convolution, per axis."""

    @property
    def stride(self) -> Extents: ...
    @property
    def padding(self) -> Sides: ...
    @property
    def dilation(self) -> Extents: ...
    @property
    def padding_mode(self) -> str: ...


class Word(str, Enum):
    """Enumeration of strings: equal to its text, and printed as it."""

    __hash__ = str.__hash__  # consistent with equality; in C, because problems are keys of every cache

    def __str__(self) -> str:
        return str(self.value)


class Pass(Word):
    """The three passes of a convolution."""

    FPROP = "fprop"
    """Output from input and weight (and bias)."""
    DGRAD = "dgrad"
    """Gradient of the input from the gradient of the output; also a transposed convolution."""
    WGRAD = "wgrad"
    """Gradient of the weight (and of the bias) from the input and the gradient of the output."""


RESULTS = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "dw"}
"""Pass -> name of its result among the tensors of a backend."""


class PaddingMode(Word):
    """Values outside the image. Named as in ``torch.nn.Conv2d``."""

    ZEROS = "zeros"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"


def tolerance_text(tolerance: float) -> str:
    """A problem's tolerance as a user writes it."""
    return f"{tolerance:g}" if tolerance >= 0 else "torch"


def output_extent(extent: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> int:
    """Number of outputs along one axis: positions of the kernel within the padded extent."""
    return (extent + before + after - dilation * (kernel - 1) - 1) // stride + 1


def output_size(in_size: Sequence[int], kernel: Sequence[int], moves: Moves) -> Extents:
    """Output extents; zero or negative where the kernel does not fit."""
    before, after = moves.padding[::2], moves.padding[1::2]
    return tuple(map(output_extent, in_size, before, after, kernel, moves.stride, moves.dilation))


def planned_length(length: int, padding: int, stretched: int) -> int:
    """Length of the signal whose choice a dense float32 signal takes: the next smaller one of :data:`LENGTH_BITS`
    significant bits. Its own, if a kernel that covers ``stretched`` pixels would not fit into that one."""
    low = max(0, length.bit_length() - LENGTH_BITS)
    rounded = length >> low << low
    return rounded if rounded > 0 and rounded + padding >= stretched else length


def contiguous_strides(shape: Shape) -> Strides:
    """Element strides of a dense NCHW tensor. An extent of zero counts as one, as in torch."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def channels_last_strides(shape: Shape) -> Strides:
    """Element strides of a dense NHWC tensor whose shape is given in NCHW order."""
    batch, channels, *extents = shape
    n, *inner, c = contiguous_strides((batch, *extents, channels))
    return (n, c, *inner)


def dense_strides(shape: Sequence[int], channels_last: bool) -> Strides:
    """Element strides of a dense tensor in one of the two memory formats."""
    return (channels_last_strides if channels_last else contiguous_strides)(tuple(shape))


@dataclass(frozen=True, slots=True)
class Problem:
    """One pass of a convolution. Build it with :meth:`make`, which fills in dense strides."""

    kind: Pass
    batch: int
    in_channels: int
    out_channels: int
    in_size: Extents
    kernel: Extents
    stride: Extents
    padding: Sides
    dilation: Extents
    groups: int
    padding_mode: PaddingMode
    bias: bool
    """FPROP: a bias is added. WGRAD: the bias gradient is computed too. DGRAD: ignored."""
    x_strides: Strides
    w_strides: Strides
    y_strides: Strides
    vector_aligned: bool
    """The first elements of x, y and the residual lie on 16-byte boundaries."""
    dtype: str
    tolerance: float = DEFAULT_TOLERANCE
    """Largest predicted error of a fast algorithm, relative to the output's scale; 0: direct summation only. Planners
    replace :data:`TORCH_TOLERANCE` and :data:`TORCH_FLOAT32` by numbers."""
    activation: Activation = Activation.NONE
    """FPROP: applied to the sums, bias and residual included. Unused in the gradient passes."""
    residual: bool = False
    """FPROP: a tensor with the strides of y is added before the activation."""
    frozen: bool = False
    """FPROP in inference: every write to the weight moves its version counter (:func:`polyconv.freeze`)."""
    torch_format: str = ""
    """Format in which PyTorch would compute it on a GPU, where its convolution may run instead of a kernel; else empty.
    :data:`TF32` if PyTorch's flags allow that: the GPU need not have it."""

    @classmethod
    def make(
        cls,
        kind: Pass | str,
        x_shape: Shape,
        w_shape: Shape,
        *,
        stride: Extents | None = None,
        padding: Sides | None = None,
        dilation: Extents | None = None,
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
        """Build a problem from the shapes of input and weight; strides default to those of dense NCHW tensors."""
        rank = len(x_shape) - 2
        if rank not in AXES or len(w_shape) != len(x_shape):
            raise ValueError(
                f"a convolution has one to three axes beside batch and channels: got an input of size {list(x_shape)} "
                f"and a weight of size {list(w_shape)}"
            )
        ones = (1,) * rank
        problem = cls(
            kind=Pass(kind),
            batch=x_shape[0],
            in_channels=x_shape[1],
            out_channels=w_shape[0],
            in_size=tuple(x_shape[2:]),
            kernel=tuple(w_shape[2:]),
            stride=stride or ones,
            padding=padding or (0,) * (2 * rank),
            dilation=dilation or ones,
            groups=groups,
            padding_mode=PaddingMode(padding_mode),
            bias=bias,
            x_strides=x_strides or contiguous_strides(x_shape),
            w_strides=w_strides or contiguous_strides(w_shape),
            y_strides=y_strides or (),
            vector_aligned=vector_aligned,
            dtype=dtype,
            tolerance=tolerance,
            activation=Activation(activation),
            residual=residual,
        )
        return problem if y_strides else replace(problem, y_strides=contiguous_strides(problem.y_shape))

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.kernel)

    @property
    def out_size(self) -> Extents:
        """Output extents; zero or negative where the kernel does not fit."""
        return output_size(self.in_size, self.kernel, self)

    @property
    def x_shape(self) -> Shape:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def w_shape(self) -> Shape:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def y_shape(self) -> Shape:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def channels_per_group(self) -> Pair:
        """Input and output channels of one group."""
        return (self.in_channels // self.groups, self.out_channels // self.groups)

    @property
    def element_bytes(self) -> int:
        """Size of an element of x, w, y, the bias and the residual [bytes]."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def depthwise(self) -> bool:
        """Whether every input channel is its own group (each may feed several output channels)."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def has_aten_padding(self) -> bool:
        """Whether ATen supports the padding: zeros, equal on both sides, not negative."""
        before, after = self.padding[::2], self.padding[1::2]
        if not any(self.padding):
            return True
        return self.padding_mode is PaddingMode.ZEROS and before == after and min(before) >= 0

    @property
    def is_contiguous(self) -> bool:
        """Whether x and y are dense NCHW tensors."""
        dense = contiguous_strides(self.x_shape), contiguous_strides(self.y_shape)
        return (self.x_strides, self.y_strides) == dense

    @property
    def multiplications(self) -> int:
        """Multiply-adds of the direct method, padding counted as data."""
        return prod(self.y_shape) * prod(self.w_shape[1:])

    @property
    def in_brief(self) -> str:
        """Short text of the convolution without defaults: ``32→64 5×9, dilation 2×3``."""
        parts = [f"{self.in_channels}→{self.out_channels} {_times(self.kernel, '×')}"]
        for name, numbers in (("stride", self.stride), ("dilation", self.dilation)):
            if max(numbers) > 1:
                alike = len(set(numbers)) == 1
                parts.append(f"{name} {numbers[0] if alike else _times(numbers, '×')}")
        if self.groups != 1:
            parts.append("depthwise" if self.depthwise else f"{self.groups} groups")
        return ", ".join(parts)

    def another_pass(self, kind: Pass) -> Problem:
        """Another pass of this layer with equal strides; bias and epilogue, unknown from this pass, are left out."""
        return replace(self, kind=kind, bias=False, activation=Activation.NONE, residual=False, frozen=False)

    def as_2d(self) -> Problem:
        """Lower a 1-D problem to a 2-D problem of height 1 with the strides of ``torch.unsqueeze``; no-op otherwise."""
        if self.rank != 1:
            return self

        def with_height(shape: Shape, strides: Strides) -> Strides:
            return (*strides[:2], shape[2] * strides[2], strides[2])

        return replace(
            self,
            in_size=(1, *self.in_size),
            kernel=(1, *self.kernel),
            stride=(1, *self.stride),
            padding=(0, 0, *self.padding),
            dilation=(1, *self.dilation),
            x_strides=with_height(self.x_shape, self.x_strides),
            w_strides=with_height(self.w_shape, self.w_strides),
            y_strides=with_height(self.y_shape, self.y_strides),
        )

    def across(self, axis: int) -> Problem:
        """The problem without one axis: a slice of a volume."""

        def without(numbers: tuple[int, ...], place: int = axis, count: int = 1) -> tuple[int, ...]:
            return numbers[:place] + numbers[place + count :]

        return replace(
            self,
            in_size=without(self.in_size),
            kernel=without(self.kernel),
            stride=without(self.stride),
            padding=without(self.padding, 2 * axis, 2),
            dilation=without(self.dilation),
            x_strides=without(self.x_strides, 2 + axis),
            w_strides=without(self.w_strides, 2 + axis),
            y_strides=without(self.y_strides, 2 + axis),
        )

    def why_not_2d(self) -> str | None:
        """Refusal of kernels for 2-D problems: None if this is one, else the message."""
        if self.rank == 2:
            return None
        return (
            f"polyconv's kernels convolve over height and width; this problem has {', '.join(AXES[self.rank])}: {self}"
        )

    def contiguous(self) -> Problem:
        """This problem on dense NCHW tensors."""
        strides = contiguous_strides(self.x_shape), contiguous_strides(self.y_shape)
        return replace(self, x_strides=strides[0], y_strides=strides[1])

    def channels_last(self) -> Problem:
        """This problem on dense channels_last tensors."""
        x, w, y = map(channels_last_strides, (self.x_shape, self.w_shape, self.y_shape))
        return replace(self, x_strides=x, w_strides=w, y_strides=y)

    def for_pass(self, kind: Pass) -> Problem:
        """Another pass of this convolution, bias included; only FPROP keeps activation, residual and frozen weight."""
        if kind is Pass.FPROP:
            return replace(self, kind=kind)
        return replace(self, kind=kind, activation=Activation.NONE, residual=False, frozen=False)

    def __str__(self) -> str:
        parts = [
            f"{self.kind} {_times(self.x_shape)}",
            f"{self.out_channels} channels",
            f"kernel {_times(self.kernel)}",
        ]
        if max(self.stride) > 1:
            parts.append(f"stride {_times(self.stride)}")
        if any(self.padding):
            before, after = self.padding[::2], self.padding[1::2]
            sides = _times(before) if before == after else ",".join(map(str, self.padding))
            mode = "" if self.padding_mode is PaddingMode.ZEROS else f" {self.padding_mode}"
            parts.append(f"padding {sides}{mode}")
        if max(self.dilation) > 1:
            parts.append(f"dilation {_times(self.dilation)}")
        if self.groups != 1:
            parts.append(f"{self.groups} groups")
        if self.bias:
            parts.append("bias")
        if self.residual:
            parts.append("residual")
        if self.activation is not Activation.NONE:
            parts.append(str(self.activation))
        if self.frozen:
            parts.append("frozen weight")
        return ", ".join(parts)


def _times(numbers: Sequence[int], by: str = "x") -> str:
    return by.join(map(str, numbers))
