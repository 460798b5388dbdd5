"""Normalisation of a convolution's arguments: ``stride=2`` and ``stride=(2, 2)`` give equal :class:`Geometry`.

Everything here works on numbers (no tensor, no device), so that the rules of ``torch.nn.functional.conv2d`` can be read
and tested in one place. Exceptions have torch's types, because existing code may catch them; the messages are
polyconv's and name the wrong value and a valid one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args

import torch

from .activation import ACTIVATIONS, Activation
from .problem import AXES, Extents, PaddingMode, Sides, Tolerance, output_size
from .settings import checked_tolerance

Extent = int | Sequence[int]
"""One number for all axes, or one per axis."""
Padding = str | int | Sequence[int]
"""``"same"``, ``"valid"``, one number, one per axis, or all sides: (top, bottom, left, right) in 2-D."""

PADDING_MODES = tuple(mode.value for mode in PaddingMode)


Policy = Literal["auto", "own"]
"""Choice between polyconv's kernels and PyTorch's convolution on a GPU, see :func:`polyconv.replace`."""
EITHER = "+torch"
"""Suffix of a padding mode that permits passthrough on a GPU: the plan may be PyTorch's convolution. Operators have no
argument for it, because saved graphs store the arguments of operators by position."""


class Geometry(NamedTuple):
    """Normalised arguments of a convolution. A named tuple, because one is built on every call."""

    stride: Extents = (1, 1)
    padding: Sides = (0, 0, 0, 0)
    """Before and after each axis: top, bottom, left, right in 2-D. A negative side crops the image."""
    dilation: Extents = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    """May end with :data:`EITHER`, or with the format in which PyTorch would compute: ``zeros+TF32``."""
    tolerance: float | None = None
    """Error budget; None means that of :func:`polyconv.set_tolerance`."""

    @property
    def border(self) -> str:
        """The padding mode alone."""
        return self.padding_mode.partition("+")[0]

    @property
    def torch_format(self) -> str:
        """Format in which PyTorch convolves float32 tensors, if its convolution may run on a GPU; else empty."""
        return self.padding_mode.partition("+")[2]

    def under_policy(self, policy: str | None) -> Geometry:
        """The geometry of a call under a policy: with ``"auto"``, PyTorch's convolution may run on a GPU."""
        return self._replace(padding_mode=self.padding_mode + EITHER) if policy == "auto" else self

    def out_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> Extents:
        """Output extents; zero or negative where the kernel does not fit."""
        return output_size(in_size, kernel, self)


def checked_policy(policy: Policy) -> Policy:
    """The policy. Raises ValueError if there is no such one."""
    if policy not in get_args(Policy):
        raise ValueError(
            f'policy must be "auto" (on a GPU, each pass by the faster of polyconv and PyTorch, as far as is expected) '
            f'or "own" (always polyconv\'s kernels); got {policy!r}'
        )
    return policy


def normalise(
    kernel: Sequence[int],
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    tolerance: Tolerance | None = None,
    *,
    rank: int = 2,
) -> Geometry:
    """Check the arguments of a ``rank``-D convolution and combine them; ``kernel`` is needed for ``"same"`` padding."""
    strides = per_axis("stride", stride, rank)
    dilations = per_axis("dilation", dilation, rank)
    groups = integer("groups", groups)
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be one of {', '.join(PADDING_MODES)}; got {padding_mode!r}")
    if min(strides) <= 0:
        raise RuntimeError(f"non-positive stride is not supported: got {stride!r}, a stride is at least 1")
    if min(dilations) <= 0:
        raise RuntimeError(f"dilation should be greater than zero: got {dilation!r}; 1 means a dense kernel")
    if groups <= 0:
        raise RuntimeError(f"non-positive groups is not supported: got {groups!r}; 1 means an ordinary convolution")
    sides = padding_sides(padding, kernel, strides, dilations)
    if tolerance is not None:
        tolerance = checked_tolerance(tolerance)
    return Geometry(strides, sides, dilations, groups, padding_mode, tolerance)


def normalise_transposed(
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    tolerance: Tolerance | None = None,
    *,
    rank: int,
) -> tuple[Geometry, Extents]:
    """Geometry of the convolution whose input gradient is this transposed convolution, and its output extents.

    ``output_padding`` adds outputs at the end. If it is less than the stride, the convolution's output size is
    unaffected; otherwise the trailing padding is reduced by it, and crops if it becomes negative.
    """
    if isinstance(padding, str):
        raise TypeError(f"the padding of a transposed convolution is made of integers; got {padding!r}")
    padding = per_axis("padding", padding, rank)
    extra = per_axis("output_padding", output_padding, rank)
    geometry = normalise(kernel, stride, padding, dilation, groups, tolerance=tolerance, rank=rank)
    if min(extra) < 0:
        raise RuntimeError(f"negative output_padding is not supported: got {output_padding!r}")
    extents, sides = [], []
    for axis, name in enumerate(AXES[rank]):
        step, reach = geometry.stride[axis], geometry.dilation[axis]
        if extra[axis] >= step and extra[axis] >= reach:
            raise RuntimeError(
                f"output padding must be smaller than either stride or dilation, but got output_padding {extra[axis]} "
                f"along the {name}, with stride {step} and dilation {reach}"
            )
        span = (in_size[axis] - 1) * step + reach * (kernel[axis] - 1) + 1
        extents.append(span - 2 * padding[axis] + extra[axis])
        sides += [padding[axis], padding[axis] - (0 if extra[axis] < step else extra[axis])]
    if any(statically(extent < 0) for extent in extents):
        raise RuntimeError(
            f"Given input size per channel: {_by(in_size)}. Calculated output size per channel: {_by(extents)}. "
            "Output size is too small"
        )
    # Not _replace, which torch.compile in PyTorch 2.4 cannot trace.
    stride, _, dilation, groups, padding_mode, tolerance = geometry
    return Geometry(stride, tuple(sides), dilation, groups, padding_mode, tolerance), tuple(extents)


def activation_name(activation: str | None) -> str:
    """Text of an :class:`Activation`; "none" for None. Callables are refused: a kernel applies the activation."""
    if activation is None:
        return "none"
    if not isinstance(activation, str):
        raise ValueError(
            f"activation must be None or one of {', '.join(ACTIVATIONS)}; got {activation!r}. "
            "Any other function can be called on the result"
        )
    return str(Activation(activation))


def per_axis(name: str, value: Extent, rank: int) -> Extents:
    """One integer per axis from an integer, a sequence of one, or a sequence of ``rank``."""
    if type(value) is tuple and len(value) == rank and all(type(n) is int and n < 2**62 for n in value):
        return value  # by far the most common case
    if isinstance(value, (list, tuple)):
        if len(value) not in (1, rank):
            raise RuntimeError(f"{name} takes one integer or {_in_words(AXES[rank])}; got {len(value)}: {value!r}")
        numbers = tuple(integer(name, number, TypeError) for number in value)
        return numbers if len(numbers) == rank else numbers * rank
    return (integer(name, value),) * rank


def _in_words(names: Sequence[str]) -> str:
    """Text such as ``two (height, width)``."""
    return f"{_COUNTS[len(names)]} ({', '.join(names)})"


_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four", 6: "six"}
_SIDES = {"length": "left, right", "width": "left, right", "height": "top, bottom", "depth": "front, back"}


def padding_sides(padding: Padding, kernel: Sequence[int], stride: Extents, dilation: Extents) -> Sides:
    """Padding before and after each axis, (top, bottom, left, right) in 2-D, from any form of :data:`Padding`."""
    rank = len(stride)
    if isinstance(padding, str):
        if padding == "valid":
            return (0, 0) * rank
        if padding != "same":
            raise RuntimeError(f"Invalid padding string: {padding!r}; use 'same', 'valid' or numbers")
        if max(stride) > 1:
            raise RuntimeError(
                f"padding='same' is not supported for strided convolutions: got stride={stride!r}. "
                f"Give the padding in numbers, for example as {_all_sides(rank)}"
            )
        return same_sides(kernel, dilation)
    if isinstance(padding, (list, tuple)) and len(padding) == 2 * rank:
        return tuple(integer("padding", side, TypeError) for side in padding)
    if isinstance(padding, (list, tuple)) and len(padding) not in (1, rank):
        raise RuntimeError(
            f"padding takes one integer, {_in_words(AXES[rank])} or {_all_sides(rank)}; got {len(padding)}: {padding!r}"
        )
    both = per_axis("padding", padding, rank)
    if min(both) < 0:
        raise RuntimeError(
            f"negative padding is not supported: got {padding!r}. To crop, give all {_all_sides(rank)}, which may be "
            "negative"
        )
    return tuple(side for side in both for _ in range(2))


def _all_sides(rank: int) -> str:
    """Text such as ``four sides (top, bottom, left, right)``."""
    return f"{_COUNTS[2 * rank]} sides ({', '.join(_SIDES[axis] for axis in AXES[rank])})"


def same_sides(kernel: Sequence[int], dilation: Extents) -> Sides:
    """Padding that preserves the size at stride 1; an odd remainder goes to the bottom and to the right."""
    reaches = [step * (taps - 1) for taps, step in zip(kernel, dilation)]  # noqa: B905 - of a weight without such axes nothing is asked yet
    return tuple(side for reach in reaches for side in (reach // 2, reach - reach // 2))


def integer(name: str, value: Any, too_large: type[Exception] = ValueError) -> int:
    """Convert to int what torch accepts as one: also NumPy integers and one-element integer tensors; no bool or float.

    ``too_large`` is raised for values beyond 64 bits: torch raises ValueError, or TypeError inside a sequence.
    """
    if type(value) is not int:
        if isinstance(value, torch.SymInt):
            return cast(int, value)  # a symbolic int, whose value is not known yet
        if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
            _not_an_integer(name, value)
        try:
            value = int(value.__index__())
        except TypeError:
            _not_an_integer(name, value)
    if not -(2**63) <= value < 2**63:
        raise too_large(f"{name} is counted in 64 bits, which do not hold {value}")
    return cast(int, value)


def _not_an_integer(name: str, value: Any) -> NoReturn:
    raise TypeError(f"{name} must be made of integers; got {value!r} of type {type(value).__name__}")


def statically(condition: bool, otherwise: bool = False) -> bool:
    """Evaluate a condition on sizes while tracing. Returns ``otherwise`` if it depends on an unbacked symbol.

    A backed symbol has an example value, and the decision becomes a guard of the traced program. An unbacked symbol (a
    size computed from data) has none; its checks are repeated when the operator runs.
    """
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental import symbolic_shapes  # imported here: only traced programs need it

    name = "guard_or_true" if otherwise else "guard_or_false"
    return bool(getattr(symbolic_shapes, name, bool)(condition))  # absent from the first versions of PyTorch 2


def check_shapes(
    x: Sequence[int],
    w: Sequence[int],
    bias: Sequence[int] | None,
    geometry: Geometry,
    *,
    may_be_empty: bool = False,
) -> None:
    """Raise torch's exceptions unless shapes and geometry match. ``may_be_empty``: the input may have no pixels."""
    rank = len(geometry.stride)
    if len(x) != rank + 2 or len(w) != rank + 2:
        axes = ", ".join(AXES[rank])
        raise RuntimeError(
            f"conv{rank}d needs an input of (batch, channels, {axes}) and a weight of (out_channels, "
            f"in_channels/groups, {axes}); got an input of size {list(x)} and a weight of size {list(w)}"
        )
    groups = geometry.groups
    if statically(w[0] < groups):
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if statically(w[0] % groups != 0):
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if statically(x[1] != w[1] * groups):
        raise RuntimeError(
            f"Given groups={groups} and a weight of size {list(w)}, expected an input with {w[1] * groups} channels, "
            f"but got {x[1]} channels in an input of size {list(x)}"
        )
    if bias is not None and (len(bias) != 1 or statically(bias[0] != w[0])):
        raise RuntimeError(
            f"Given a weight of size {list(w)}, expected bias to be 1-dimensional with {w[0]} elements, "
            f"but got bias of size {list(bias)}"
        )
    check_extents(x[2:], w[2:], geometry, may_be_empty=may_be_empty)


def check_transposed(x: Sequence[int], w: Sequence[int], bias: Sequence[int] | None, groups: int) -> None:
    """Raise torch's exceptions unless the channels of a transposed convolution match."""
    if statically(w[0] % groups != 0):
        raise RuntimeError(
            f"Given transposed=1, groups={groups}, expected weight to be divisible by {groups} at dimension 0 "
            f"(in_channels), but got weight of size {list(w)}"
        )
    if statically(x[1] != w[0]):
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(w)}, expected input{list(x)} to have {w[0]} channels, "
            f"but got {x[1]} channels instead"
        )
    if bias is not None and (len(bias) != 1 or statically(bias[0] != w[1] * groups)):
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(w)}, expected bias to be 1-dimensional with {w[1] * groups} "
            f"elements, but got bias of size {list(bias)}"
        )


def check_extents(
    in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry, *, may_be_empty: bool = False
) -> None:
    """Raise unless the kernel fits into the padded image and the padding mode can fill the padding."""
    padding, dilation = geometry.padding, geometry.dilation
    if any(statically(taps <= 0) for taps in kernel):
        raise RuntimeError(f"Kernel size should be greater than zero, but got {_by(kernel)}")
    for axis, name in enumerate(AXES[len(kernel)]):
        size, before, after = in_size[axis], padding[2 * axis], padding[2 * axis + 1]
        if type(before) is type(after) is int and before + after > 2**61:
            _check_padding(name, size, before, after)
        if before < 0 or after < 0:
            _check_crop(name, size, before, after)
        if statically(size + before + after < dilation[axis] * (kernel[axis] - 1) + 1):
            _kernel_does_not_fit(in_size, kernel, geometry)
        if statically(size < 0 if may_be_empty else size <= 0):
            raise RuntimeError(f"Only the batch and the channels may be empty: got an input of {_by(in_size)} pixels")
        if geometry.border != "zeros":
            _check_border(name, size, before, after, geometry.border)


def _check_border(name: str, size: int, before: int, after: int, mode: str) -> None:
    """Raise if the image, cropped by negative padding, lacks the pixels that the border copies."""
    left = size + min(before, 0) + min(after, 0)
    cropped = "" if left is size else f", of which negative padding leaves {left}"
    got = f"got {before} and {after} along a {name} of {size}{cropped}"
    if min(before, after) < 0 and statically(left <= 0):
        raise RuntimeError(f"padding_mode={mode!r} copies pixels of the image, and there are none: {got}")
    if mode == "reflect" and statically(max(before, after) >= left):
        raise RuntimeError(f"padding_mode='reflect' needs a padding smaller than the image: {got}")
    if mode == "circular" and statically(max(before, after) > left):
        raise RuntimeError(
            f"padding_mode='circular' needs a padding no larger than the image (it may wrap around once): {got}"
        )


def _check_padding(name: str, size: int, before: int, after: int) -> None:
    """Raise if a side exceeds 2**62 - 1 or the padded extent does not fit into 64 bits."""
    largest = 2**62 - 1
    if max(before, after) > largest or statically(size + before + after >= 2**63):
        raise RuntimeError(
            f"expected padding to be at most {largest}, and the padded {name} to be counted in 64 bits; "
            f"got {before} and {after} along a {name} of {size}"
        )


def _check_crop(name: str, size: int, before: int, after: int) -> None:
    if statically(max(-before, 0) + max(-after, 0) > size):
        raise RuntimeError(f"negative padding crops more than there is: {before} and {after} along a {name} of {size}")


def _kernel_does_not_fit(in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> NoReturn:
    padded = list(map(sum, zip(in_size, geometry.padding[::2], geometry.padding[1::2], strict=True)))
    reach = [step * (taps - 1) + 1 for taps, step in zip(kernel, geometry.dilation, strict=True)]
    raise RuntimeError(
        f"Kernel size can't be greater than actual input size: the padded image is {_by(padded)}, "
        f"the kernel of {_by(kernel)} with dilation {geometry.dilation} spans {_by(reach)}"
    )


def _by(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents))


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""torch's channels-last memory format, by number of dimensions."""


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch would classify these strides as channels_last (also where the tensor is not dense).

    This is ``c10::is_channels_last_strides_2d`` and ``_3d``, ambiguous cases included, so that outputs get the memory
    format of torch's convolution. Returns False for 1-D signals, for which torch has no such format.
    """
    if len(shape) == 3 or statically(strides[1] == 0):
        return False
    least = 0
    for axis in (1, *reversed(range(2, len(shape))), 0):
        extent, stride = shape[axis], strides[axis]
        if statically(stride < least, otherwise=True) or statically(extent == 0):
            return False
        if axis == 0 and statically(least == strides[1]):
            return False
        least = stride * extent if statically(extent > 1, otherwise=True) else stride
    return True
