"""Small convolutions that, together, every family of kernels takes part in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..problem import Pair, Pass, Problem, Sides, channels_last_strides


@dataclass(frozen=True, slots=True)
class Case:
    """A convolution with a bias."""

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    padding: Sides = (0, 0, 0, 0)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    channels_last: bool = False
    activation: str = "none"
    residual: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The gradients know no epilogue: theirs are those of the plain convolution."""
        return (Pass.FPROP,) if self.residual or self.activation != "none" else tuple(Pass)

    def problem(self, kind: Pass, larger: int = 1) -> Problem:
        """One pass of it, on an image that is so many times as high and as wide. The input gradient knows no bias."""
        n, c, height, width = self.x
        arguments: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("padding", "stride", "dilation", "groups", "padding_mode", "activation", "residual")
        }
        problem = Problem.make(
            kind, (n, c, height * larger, width * larger), self.w, bias=kind is not Pass.DGRAD, **arguments
        )
        if not self.channels_last:
            return problem
        strides = channels_last_strides
        return replace(problem, x_strides=strides(problem.x_shape), y_strides=strides(problem.y_shape))


CASES = {
    "3x3": Case((1, 16, 12, 14), (32, 16, 3, 3), padding=(1, 1, 1, 1)),
    "5x9": Case((1, 8, 14, 22), (16, 8, 5, 9)),
    "5x9, dilated": Case((1, 8, 17, 33), (16, 8, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "3x3, strided": Case((2, 8, 13, 15), (16, 8, 3, 3), padding=(1, 1, 1, 1), stride=(2, 2)),
    "1x1": Case((1, 32, 8, 12), (32, 32, 1, 1)),
    "3x3, groups": Case((1, 12, 9, 11), (8, 6, 3, 3), padding=(1, 1, 1, 1), groups=2),
    "3x3, depthwise": Case((2, 8, 14, 17), (8, 1, 3, 3), padding=(1, 1, 1, 1), groups=8),
    "5x3, depthwise, dilated": Case((1, 6, 15, 12), (12, 1, 5, 3), padding=(2, 3, 1, 0), dilation=(2, 1), groups=6),
    "3x4, reflected border": Case((1, 5, 8, 9), (6, 5, 3, 4), padding=(2, 1, 3, 2), padding_mode="reflect"),
    "3x3, channels last": Case((1, 16, 11, 10), (16, 16, 3, 3), padding=(1, 1, 1, 1), channels_last=True),
    "3x3, residual and relu": Case((1, 16, 9, 12), (16, 16, 3, 3), (1, 1, 1, 1), activation="relu", residual=True),
    "3x3, depthwise, silu": Case((1, 8, 10, 13), (8, 1, 3, 3), (1, 1, 1, 1), groups=8, activation="silu"),
}


def problems(larger: int = 1) -> dict[str, Problem]:
    """Every case in all its passes."""
    return {f"{name}, {kind}": case.problem(kind, larger) for name, case in CASES.items() for kind in case.passes}
