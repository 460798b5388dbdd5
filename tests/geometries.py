"""Named convolutions, one per edge case, and a hypothesis strategy for all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

MODES = ("zeros", "reflect", "replicate", "circular")
LAYOUTS = ("contiguous", "channels_last", "sliced", "expanded", "transposed", "offset")


@dataclass(frozen=True)
class Case:
    """Arguments of one call of conv2d."""

    x: tuple[int, ...]
    w: tuple[int, int, int, int]
    bias: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None]:
        bias = torch.randn(self.w[0], dtype=dtype) if self.bias else None
        return laid_out(self.x, self.layout, dtype), torch.randn(self.w, dtype=dtype), bias


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Random values of a shape in one of the memory layouts that occur in practice."""
    *lead, height, width = shape
    if layout == "channels_last" and len(shape) == 4:
        return torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
    if layout == "sliced":
        return torch.randn(*lead, height + 2, 2 * width + 1, dtype=dtype)[..., 1 : height + 1, 1::2]
    if layout == "expanded":
        return torch.randn(*lead[:-1], 1, 1, width, dtype=dtype).expand(shape)
    if layout == "transposed":
        return torch.randn(*lead, width, height, dtype=dtype).transpose(-1, -2)
    if layout == "offset":
        count = max(shape[0] * 9999, prod(shape))
        return torch.randn(count + 3, dtype=dtype)[3:].as_strided(shape, torch.empty(shape).stride())
    return torch.randn(shape, dtype=dtype)


CASES = {
    "plain 3x3": Case((2, 3, 7, 6), (4, 3, 3, 3), kwargs={"padding": 1}),
    "1x1": Case((2, 4, 5, 3), (6, 4, 1, 1)),
    "no bias": Case((2, 3, 6, 6), (4, 3, 3, 3), bias=False),
    "asymmetric kernel, dilated": Case((1, 2, 14, 21), (3, 2, 3, 5), kwargs={"padding": (2, 4), "dilation": (2, 3)}),
    "strided, odd remainder": Case((2, 2, 8, 9), (3, 2, 3, 2), kwargs={"stride": (3, 2), "padding": 1}),
    "stride larger than kernel": Case((1, 2, 9, 9), (2, 2, 2, 2), kwargs={"stride": 4}),
    "groups": Case((2, 6, 5, 5), (4, 3, 3, 3), kwargs={"groups": 2, "padding": 1}),
    "depthwise": Case((2, 4, 6, 5), (8, 1, 3, 3), kwargs={"groups": 4}),
    "same, even kernel": Case((1, 2, 6, 7), (3, 2, 4, 2), kwargs={"padding": "same", "dilation": (1, 3)}),
    "four sides": Case((2, 2, 5, 6), (3, 2, 3, 3), kwargs={"padding": (0, 3, 2, 1)}),
    "cropped": Case((2, 2, 8, 9), (3, 2, 3, 3), kwargs={"padding": (-1, 2, 1, -3)}),
    "reflect": Case((1, 2, 5, 6), (3, 2, 3, 3), kwargs={"padding": (4, 3), "padding_mode": "reflect"}),
    "replicate": Case((1, 2, 3, 2), (3, 2, 3, 3), kwargs={"padding": (1, 5, 3, 0), "padding_mode": "replicate"}),
    "circular, whole image": Case((1, 2, 3, 4), (3, 2, 3, 3), kwargs={"padding": (3, 4), "padding_mode": "circular"}),
    "channels_last": Case((2, 3, 6, 5), (4, 3, 3, 3), layout="channels_last"),
    "slice of an image": Case((2, 3, 6, 5), (4, 3, 3, 3), layout="sliced"),
    "expanded": Case((2, 3, 6, 5), (4, 3, 3, 3), layout="expanded"),
    "one pixel out": Case((2, 3, 3, 3), (4, 3, 3, 3)),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any small convolution that torch accepts, with arguments in any accepted form."""
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    dilation = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    per_group, multiplier = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    mode = draw(st.sampled_from(MODES))
    form = draw(st.sampled_from(["one", "pair", "sides", "same", "valid"]))
    reach = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    padding: Any
    if form == "same":
        stride, padding = (1, 1), "same"
        sides = [n for r in reach for n in ((r - 1) // 2, r - 1 - (r - 1) // 2)]
    elif form == "valid":
        padding, sides = "valid", [0] * 4
    elif form == "sides":
        padding = sides = [draw(st.integers(-2, 4)) for _ in range(4)]
    elif form == "pair":
        padding = (draw(st.integers(0, 4)), draw(st.integers(0, 4)))
        sides = [padding[0], padding[0], padding[1], padding[1]]
    else:
        padding = draw(st.integers(0, 3))
        sides = [padding] * 4
    size = []
    for axis in (0, 1):
        before, after = sides[2 * axis], sides[2 * axis + 1]
        crop = max(-before, 0) + max(-after, 0)
        least = max(1, reach[axis] - before - after, crop + 1)
        if mode != "zeros":
            least = max(least, crop + max(before, after, 0) + 1)
        size.append(least + draw(st.integers(0, 5)))
    batch = draw(st.sampled_from([(), (0,), (1,), (2,)]))
    kwargs: dict[str, Any] = {
        "stride": stride[0] if stride[0] == stride[1] else stride,
        "padding": padding,
        "dilation": [dilation[0]] if dilation[0] == dilation[1] else list(dilation),
        "groups": groups,
        "padding_mode": mode,
    }
    return Case(
        (*batch, groups * per_group, *size),
        (groups * multiplier, per_group, *kernel),
        draw(st.booleans()),
        kwargs,
        draw(st.sampled_from(LAYOUTS)),
    )
