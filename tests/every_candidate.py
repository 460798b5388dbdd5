"""One pass by every kernel that the CPU planner can choose, on operands in any memory layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from polyconv import dispatch
from polyconv.arguments import Geometry
from polyconv.autotune import preferences
from polyconv.cpu import native
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import offered, plan_cpu
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem
from polyconv.tuning_key import problem_key

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

ANY = 1e30
"""A tolerance that accepts every candidate."""
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Layer:
    """A unit-stride convolution with ``pad`` zeros on every side."""

    batch: int
    channels: int
    filters: int
    size: int
    kernel: tuple[int, int] = (3, 3)
    pad: int = 1

    @property
    def x(self) -> Shape:
        return (self.batch, self.channels, self.size, self.size)

    @property
    def w(self) -> Shape:
        return (self.filters, self.channels, *self.kernel)

    @property
    def y(self) -> Shape:
        height, width = (self.size + 2 * self.pad - taps + 1 for taps in self.kernel)
        return (self.batch, self.filters, height, width)

    def operands(self, kind: Pass) -> tuple[Shape, Shape]:
        """Shapes of the two operands of a pass: first the one that B^T transforms."""
        return {Pass.FPROP: (self.x, self.w), Pass.DGRAD: (self.y, self.w), Pass.WGRAD: (self.x, self.y)}[kind]


@dataclass(frozen=True)
class Trial:
    """A pass on given operands."""

    layer: Layer
    kind: Pass
    one: Tensor
    other: Tensor

    @property
    def problem(self) -> Problem:
        strides = {
            Pass.FPROP: {"x_strides": self.one.stride(), "w_strides": self.other.stride()},
            Pass.DGRAD: {"y_strides": self.one.stride(), "w_strides": self.other.stride()},
            Pass.WGRAD: {"x_strides": self.one.stride(), "y_strides": self.other.stride()},
        }[self.kind]
        padding = (self.layer.pad,) * 4
        return Problem.make(self.kind, self.layer.x, self.layer.w, padding=padding, tolerance=ANY, **strides)  # type: ignore[arg-type]

    @property
    def geometry(self) -> Geometry:
        pad = self.layer.pad
        return Geometry(padding=(pad, pad, pad, pad), tolerance=ANY)

    @property
    def exact(self) -> Tensor:
        if self.kind is Pass.FPROP:
            return reference.fprop(self.geometry, self.one, self.other, None)
        if self.kind is Pass.DGRAD:
            return reference.dgrad(self.geometry, self.one, self.other, self.layer.x)
        return reference.wgrad(self.geometry, self.one, self.other, self.layer.w)[0]

    @property
    def scale(self) -> Tensor:
        """Scale of each output map."""
        names, output = {Pass.FPROP: ("xw", "y"), Pass.DGRAD: ("yw", "x"), Pass.WGRAD: ("xy", "dw")}[self.kind]
        return scales(self.problem, dict(zip(names, (self.one, self.other), strict=True)))[output]

    def errors(self, scale: Tensor) -> Iterator[tuple[CpuCandidate, float]]:
        """Every kernel, with its largest output error relative to this scale."""
        exact, problem = self.exact, self.problem
        keys = [problem_key(problem, kept_weights=kept) for kept in (False, True)]
        for candidate in offered(problem, plan_cpu(problem).device):
            if candidate.refusal is None:
                with preferences.Forced(dict.fromkeys(keys, candidate.name)), torch.no_grad():
                    deviation = (self._run().double() - exact).abs()
                assert not deviation.isnan().any()
                yield candidate, largest(deviation, scale)

    def _run(self) -> Tensor:
        if self.kind is Pass.FPROP:
            return dispatch.fprop(self.one, self.other, None, *self.geometry)
        if self.kind is Pass.DGRAD:
            return dispatch.dgrad(self.one, self.other, self.layer.x, False, *self.geometry)
        return dispatch.wgrad(self.other, self.one, self.layer.w, False, False, *self.geometry)[0]
