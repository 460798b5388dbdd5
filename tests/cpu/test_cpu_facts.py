"""Facts that the native kernels report and the planner relies on: correct, and understood by Python."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from commands import python
from cpu_passes import load_native
from polyconv.activation import ACTIVATIONS, Activation
from polyconv.cpu import native
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines import channel_lanes, depthwise, pointwise, tile_lanes
from polyconv.cpu.engines.schemes import KernelScheme
from polyconv.problem import PaddingMode, Pass, Problem

load_native()

DIRECT = KernelScheme(1, 1, 1, 1)
ASKED = """
import sys
import polyconv
from polyconv.cpu import backend
from polyconv.cpu.engines import tile_lanes
assert "polyconv.cpu._native" not in sys.modules
assert tile_lanes.schemes()
assert "polyconv.cpu._native" in sys.modules
"""


def test_every_name_has_a_number() -> None:
    """The same names as Python has, in any order; the kernels have more activations than ``polyconv.conv2d``."""
    facts = native.facts()
    assert sorted(facts["borders"]) == sorted(mode.value for mode in PaddingMode)
    assert {Activation(name).kernel for name in ACTIVATIONS} == set(facts["activations"])
    assert len(set(facts["activations"])) == len(facts["activations"])
    assert set(facts["lanes"]) == {tile_lanes.NAME, channel_lanes.NAME, pointwise.NAME}


@pytest.mark.parametrize("kind", Pass, ids=str)
def test_schemes_differ_and_one_is_direct(kind: Pass) -> None:
    lists = [channel_lanes.schemes(kind)] if kind is Pass.WGRAD else [tile_lanes.schemes(), channel_lanes.schemes(kind)]
    for schemes in lists:
        assert len(set(schemes)) == len(set(map(str, schemes))) == len(schemes) > 1
        assert schemes.count(DIRECT) == 1


def test_a_number_without_a_scheme_is_refused() -> None:
    x, w, y = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 4, 4)
    geometry = [1, 1, 0, 0, 1, 1, 1, 0]
    for plan in (
        [0, len(tile_lanes.schemes()), 0, 0, 0],
        [1, len(channel_lanes.schemes(Pass.FPROP)), 0, 0, 0],
        [2, 1, 0, 0, 0],
    ):
        with pytest.raises(RuntimeError, match="no such algorithm"):
            torch.ops.polyconv_cpu.convolve(x, w, None, y, geometry, plan, None)
    with pytest.raises(RuntimeError, match="no such engine"):
        torch.ops.polyconv_cpu.convolve(x, w, None, y, geometry, [3, 0, 0, 0, 0], None)
    with pytest.raises(RuntimeError, match="no such algorithm"):
        torch.ops.polyconv_cpu.weight_gradient(x, y, w, None, geometry, [len(channel_lanes.schemes(Pass.WGRAD))])


@pytest.mark.parametrize(
    ("engine", "channels"),
    [
        (tile_lanes.NAME, 64),
        (tile_lanes.NAME, 512),
        (tile_lanes.NAME, 1056),
        (channel_lanes.NAME, 144),
        (channel_lanes.NAME, 576),
        (pointwise.NAME, 512),
        (pointwise.NAME, 1056),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_sums_begin_anew_where_the_error_model_is_told(engine: str, channels: int, instruction_set: str) -> None:
    """One term so large that later terms of the same float32 sum are lost; the next sum counts them again."""
    assert native.instruction_set() == instruction_set
    schemes = {tile_lanes.NAME: tile_lanes.schemes(), channel_lanes.NAME: channel_lanes.schemes(Pass.FPROP)}
    index = schemes.get(engine, (DIRECT,)).index(DIRECT)
    length = native.longest_sum(engine, index, channels)
    assert length % 2 == 0, "an odd number of ones would be rounded beside so large a sum"
    large = 2.0**24
    x = torch.ones(1, channels, 8, 8).to(memory_format=torch.channels_last)
    x[:, 0] = large
    y = torch.full((1, 4, 8, 8), float("nan")).to(memory_format=torch.channels_last)
    plan = native.plan_numbers(engine, index)
    torch.ops.polyconv_cpu.convolve(x, torch.ones(4, channels, 1, 1), None, y, [1, 1, 0, 0, 1, 1, 1, 0], plan, None)
    assert torch.equal(y, torch.full_like(y, large + channels - length))


def test_depthwise_sums_begin_anew_where_the_error_model_is_told(instruction_set: str) -> None:
    """Likewise for the weight gradient of one tap: one of the two layouts has sums of the reported length."""
    assert native.instruction_set() == instruction_set
    channels, height, width, large = 16, 16, 1024, 2.0**24
    geometry = [1, 1, 0, 0, 1, 1, channels, 0]
    longest = torch.ops.polyconv_cpu.depthwise_longest_sum(
        [1, channels, height, width, channels, 1, 1, 1, height, width], geometry
    )
    lost = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.ones(1, channels, height, width).to(memory_format=layout)
        x[..., 0, 0] = large
        dw = torch.full((channels, 1, 1, 1), float("nan"))
        torch.ops.polyconv_cpu.depthwise_wgrad(x, torch.ones_like(x), dw, None, geometry)
        assert (dw == dw[0]).all()
        lost.append(large + height * width - dw[0].item())
    assert max(lost) == longest


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_long_rows_of_a_depthwise_gradient_are_predicted(layout: torch.memory_format, instruction_set: str) -> None:
    """A lane sums to the end of its row, however long, before it continues in double."""
    assert native.instruction_set() == instruction_set
    channels, width = 16, 2**16
    problem = Problem.make("wgrad", (1, channels, 3, width + 2), (channels, 1, 3, 3), groups=channels)
    direct, _ = depthwise.candidates(problem, CpuDevice(instruction_set))
    predicted = direct.error
    x = torch.randn(problem.x_shape).to(memory_format=layout)
    dy = torch.randn(problem.y_shape).to(memory_format=layout)
    dw = torch.full(problem.w_shape, float("nan"))
    torch.ops.polyconv_cpu.depthwise_wgrad(x, dy, dw, None, native.geometry_numbers(problem))
    exact = torch.nn.functional.conv2d(x.double(), dy.double().transpose(0, 1), groups=channels)[0].unsqueeze(1)
    scale = sqrt(width) * x.double().square().mean().sqrt() * dy.double().square().mean().sqrt()
    assert (dw - exact).abs().max() <= predicted * scale


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    python(ASKED)
