"""Every 2-D workload on the CPU, all channels, all passes: within 1e-4 of float64 and within the predicted error."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor

from nightly import NIGHTLY
from polyconv import dispatch
from polyconv.arguments import Geometry
from polyconv.cpu.planner import plan_cpu
from polyconv.measure.workloads import Workload, find
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass

LARGEST = 512 if NIGHTLY else 72
"""Rows and columns kept of larger images, besides the kernel's extent."""


def cut(workload: Workload) -> Workload:
    """One image of a workload, cut to a bounded size; the plan may differ from that at full size."""
    _, c, *size = workload.input
    reach = [d * (r - 1) for d, r in zip(workload.dilation, workload.kernel, strict=True)]
    h, w = (min(extent, LARGEST + over) for extent, over in zip(size, reach, strict=True))
    return replace(workload, input=(1, c, h, w))


@pytest.mark.parametrize("name", [w.name for w in find("all")])
def test_workload(name: str) -> None:
    workload = cut(find(name)[0])
    fan_in = workload.input[1] // workload.groups * workload.kernel[0] * workload.kernel[1]
    x = torch.randn(workload.input)
    w = (torch.rand(workload.out_channels, workload.input[1] // workload.groups, *workload.kernel) * 2 - 1) / sqrt(
        fan_in
    )
    bias = (torch.rand(workload.out_channels) * 2 - 1) / sqrt(fan_in) if workload.bias else None
    (top, left), mode = workload.padding, "zeros"
    geometry = Geometry(workload.stride, (top, top, left, left), workload.dilation, workload.groups, mode)
    dy = torch.randn(workload.problem("fprop").y_shape)

    with torch.no_grad():
        y = dispatch.fprop(x, w, bias, *geometry)
        dx = dispatch.dgrad(dy, w, x.shape, False, *geometry)
        dw, db = dispatch.wgrad(dy, x, w.shape, False, bias is not None, *geometry)
        expected_y = reference.fprop(geometry, x, w, bias)
        expected_dx = reference.dgrad(geometry, dy, w, x.shape)
        expected_dw, expected_db = reference.wgrad(geometry, x, dy, w.shape)

    def check(kind: Pass, name: str, found: Tensor, expected: Tensor) -> None:
        problem = workload.problem(kind)
        scale = scales(problem, {"x": x, "w": w, "y": dy})[name]
        off = (found.double() - expected).abs()
        plan = plan_cpu(problem, inference=kind is Pass.FPROP)
        observed = largest(off, scale)
        assert bool((off <= 1e-4 * scale + 1e-4 * expected.abs()).all()), f"{kind}: {observed:.1e}"
        assert observed <= plan.predicted_error, f"{kind}: {observed:.1e} by {plan.name}, {plan.predicted_error:.1e}"

    check(Pass.FPROP, "y", y, expected_y)
    check(Pass.DGRAD, "x", dx, expected_dx)
    check(Pass.WGRAD, "dw", dw, expected_dw)
    if bias is not None:
        torch.testing.assert_close(db.double(), expected_db, rtol=1e-4, atol=1e-4 * sqrt(dy.numel() / dy.shape[1]))
