"""Lowerings to 2-D problems by reshaping: signals (1-D), and convolutions of patches that do not overlap.

Only this module and :meth:`polyconv.problem.Problem.as_2d` convert signals. Layers above see the user's tensors and
problem; backends, tuning entries and weight caches see 2-D problems.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from math import prod

from torch import Tensor

from ..backend import Run
from ..problem import (
    HALF_DTYPES,
    Extents,
    Pass,
    Problem,
    Shape,
    Strides,
    channels_last_strides,
    contiguous_strides,
)
from .base import Rewrite

HEIGHT = 2
"""Dimension that is inserted."""


def as_image(tensor: Tensor) -> Tensor:
    """View with a height of 1 if the tensor is a signal or its weight, else the tensor."""
    return tensor.unsqueeze(HEIGHT) if tensor.dim() == HEIGHT + 1 else tensor


class Signal(Rewrite):
    """A 1-D problem as a 2-D problem."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (self.problem.as_2d(),)

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        (run,) = runs.values()

        def run_on_views(tensors: MutableMapping[str, Tensor]) -> None:
            given = {name: as_image(tensor) for name, tensor in tensors.items()}
            if "w" in tensors:
                given["owner"] = tensors["w"]
            views = dict(given)
            run(views)
            for name in given.keys() - views.keys():
                del tensors[name]  # used up by the run
            for name, tensor in views.items():
                if tensor is not given[name]:  # the backend returned a result buffer of its own
                    tensors[name] = tensor.squeeze_(HEIGHT)  # in place: autograd forbids writing to a view

        return run_on_views

    def in_words(self) -> str:
        return "as a 2-D problem of height 1"


# ---- patches


_MOST_CHANNELS = 7
"""Most channels of a patch: with eight, kernels read the channels of a tap at once."""
_LEAST_ELEMENTS = {Pass.FPROP: 128, Pass.DGRAD: 48, Pass.WGRAD: 128}
"""Fewest elements of a patch. Below, the copy is modelled to cost more than it gains."""
_LEAST_COPIED = 2**20
"""Fewest elements of the images of a weight gradient, which gains least."""


def is_patches(problem: Problem, backend: str) -> bool:
    """Whether a problem may be lowered to :class:`Patches`: where that is modelled ahead on every GPU, in bfloat16
    on those with tensor cores for it. On the others the cost model decides (``is_ahead`` of
    :func:`polyconv.lowering.lower.lower`).

    In float32 the input gradient alone is and, of patches that are not copied, the forward pass. ``torch_format``:
    PyTorch's convolution may run instead, on the tensors as they are.
    """
    kernel, grid = problem.kernel, problem.out_size
    if backend != "cuda" or problem.rank == 1 or problem.torch_format or kernel != problem.stride:
        return False
    if any(problem.padding) or max(problem.dilation) > 1 or problem.groups > 1 or min(grid) < 1:
        return False
    patch = problem.in_channels * prod(kernel)
    if problem.in_channels > _MOST_CHANNELS or patch < _LEAST_ELEMENTS[problem.kind] or _order(problem) is None:
        return False
    if prod(grid) == 1:  # a product of two matrices, as they are
        if problem.kind is Pass.WGRAD and problem.dtype not in HALF_DTYPES:
            return False
        return _is_dense(problem) and patch % (16 if problem.dtype == "float16" else 8) == 0
    if not _merges(problem.y_strides, grid):
        return False
    if problem.kind is Pass.WGRAD and problem.rank == 2:
        return problem.dtype == "bfloat16" and _adjacent(problem) and prod(problem.x_shape) >= _LEAST_COPIED
    return problem.kind is Pass.DGRAD or problem.dtype in HALF_DTYPES


def _order(problem: Problem) -> str | None:
    """Order of a patch's elements, that of a filter's in memory: channels ``first`` or ``last``; None if neither."""
    if problem.w_strides == contiguous_strides(problem.w_shape):
        return "first"
    return "last" if problem.w_strides == channels_last_strides(problem.w_shape) else None


def _is_dense(problem: Problem) -> bool:
    """Whether the elements of an image lie in the order of a filter's."""
    return problem.x_strides[1:] == problem.w_strides[1:] and problem.in_size == problem.kernel


def _merges(strides: Strides, grid: Extents) -> bool:
    """Whether depth and height of y are one axis in memory."""
    return len(grid) == 2 or strides[2] == grid[1] * strides[3]


def _adjacent(problem: Problem) -> bool:
    """Whether the elements of a patch are adjacent in the copy: where those of a pixel of y are, in whole chunks."""
    return problem.y_strides[1] == 1 and problem.in_channels * prod(problem.kernel) % 8 == 0


class Patches(Rewrite):
    """A convolution whose stride is its kernel as a 1x1 convolution of patches, with a patch's elements as channels.

    Patches are copied, unless each image is one patch and lies in memory like a filter.
    """

    __slots__ = ("copied", "part", "x_place")

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        grid, elements = problem.out_size, problem.in_channels * prod(problem.kernel)
        self.copied = prod(grid) > 1
        size = prod(grid[:-1]), grid[-1]
        y = (*problem.y_strides[:2], *problem.y_strides[-2:])
        flat = replace(
            problem,
            in_channels=elements,
            in_size=size,
            kernel=(1, 1),
            stride=(1, 1),
            padding=(0, 0, 0, 0),
            dilation=(1, 1),
        )
        if self.copied:
            strides_of = channels_last_strides if _adjacent(problem) else contiguous_strides
            x = strides_of(flat.x_shape)
        else:  # images are the columns of one; the strides of its only row matter for alignment alone
            flat = replace(flat, batch=1, in_size=(1, problem.batch))
            x = problem.x_strides[0], 1, problem.x_strides[0], problem.x_strides[0]
            y = y[0], y[1], y[0], y[0]
        self.part = replace(flat, x_strides=x, w_strides=(elements, 1, 1, 1), y_strides=y)
        self.x_place = _place(problem, self.part)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (self.part,)

    @property
    def extra_traffic(self) -> tuple[int, int]:
        return 2 * self.copied * self.problem.element_bytes * prod(self.problem.x_shape), int(self.copied)

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        (run,) = runs.values()
        part, reads = self.part, self.problem.kind is not Pass.DGRAD
        views = {
            "y": (part.y_shape, part.y_strides),
            "residual": (part.y_shape, part.y_strides),
            "w": (part.w_shape, part.w_strides),
            "dw": (part.w_shape, part.w_strides),
        }

        def run_on_patches(tensors: MutableMapping[str, Tensor]) -> None:
            given = {
                name: tensor.as_strided(*views[name]) if name in views else tensor for name, tensor in tensors.items()
            }
            if "w" in tensors:
                given["owner"] = tensors.get("owner", tensors["w"])
            if not self.copied:
                if "x" in tensors:
                    given["x"] = tensors["x"].as_strided(part.x_shape, part.x_strides)
                run(given)
                return
            like = tensors["x" if "x" in tensors else "y"]
            patches = like.new_empty_strided(part.x_shape, part.x_strides)
            given["x"] = patches
            if reads:
                patches.as_strided(*self.x_place).copy_(self._seen(tensors["x"]))
                run(given)
            else:
                run(given)
                if self.problem.in_size != covered(self.problem):
                    tensors["x"].zero_()
                self._seen(tensors["x"]).copy_(patches.as_strided(*self.x_place))

        return run_on_patches

    def _seen(self, x: Tensor) -> Tensor:
        """Patches of an image: images, grid, channels, kernel."""
        kernel, (batch, channel, *axes) = self.problem.kernel, self.problem.x_strides
        steps = (taps * step for taps, step in zip(kernel, axes, strict=True))
        return x.as_strided(self.x_place[0], (batch, *steps, channel, *axes))

    def in_words(self) -> str:
        copied = " of copied patches" if self.copied else ""
        return f"as a 1x1 convolution{copied} with {self.part.in_channels} channels, the elements of a patch"


def covered(problem: Problem) -> Extents:
    """Extents of the image that patches cover."""
    return tuple(count * taps for count, taps in zip(problem.out_size, problem.kernel, strict=True))


def _place(problem: Problem, part: Problem) -> tuple[Shape, tuple[int, ...]]:
    """Shape and strides of the copied patches: images, grid, channels, kernel."""
    (batch, element, row, column), grid, kernel = part.x_strides, problem.out_size, problem.kernel
    areas = [prod(kernel[axis + 1 :]) for axis in range(len(kernel))]
    if _order(problem) == "first":
        channel, taps = prod(kernel), areas
    else:
        channel, taps = 1, [problem.in_channels * area for area in areas]
    of_grid = (grid[1] * row, row, column)[-len(grid) :]
    within = (element * step for step in (channel, *taps))
    return (problem.batch, *grid, problem.in_channels, *kernel), (batch, *of_grid, *within)
