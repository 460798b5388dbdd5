"""The epilogue of the native CPU kernels, at every store of every engine, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, product
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyconv
from cpu_passes import BORDERS, OUT_LAYOUTS, Layer, close, layers, load_native, placed, poisoned
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.cpu.engines.tile_lanes import schemes
from polyconv.cpu.planner import plan_cpu
from polyconv.numerics import reference
from polyconv.numerics.prediction import reduction_of
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Problem

load_native()

APPLIED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "clamp": lambda y: F.hardtanh(y, *PARAMETERS["clamp"]),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "leaky_relu": lambda y: F.leaky_relu(y, *PARAMETERS["leaky_relu"]),
    "sigmoid": F.sigmoid,
}
PARAMETERS = {"clamp": (-0.5, 1.75), "leaky_relu": (0.1875,)}
"""Exact in float32."""
BOUNDED = {"clamp", "hardsigmoid", "sigmoid"}
"""Errors are relative to the sums: larger than the results."""
KERNEL_EPILOGUES = [(activation, residual) for activation in APPLIED for residual in (False, True)][1:]
EPILOGUES_IN_LAYOUTS = list(
    product(KERNEL_EPILOGUES, OUT_LAYOUTS) if NIGHTLY else zip(KERNEL_EPILOGUES, cycle(OUT_LAYOUTS), strict=False)
)
"""Every epilogue, the output layouts in turn; nightly every epilogue in every layout."""
PUBLIC = ("none", "relu", "silu", "hardtanh(-0.5, 1.75)", "leaky_relu(1.5)", "hardswish", "gelu", "gelu_tanh")
EPILOGUES = [(activation, residual) for activation in PUBLIC for residual in (False, True)][1:]
"""Of ``polyconv.conv2d``."""
FUSED, GROUPED, PHASED = 1, 2, 3
"""Stage orders of the tile-lanes engine."""

Run = Callable[[Layer, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, str], None]


def arguments(activation: str) -> tuple[float, ...]:
    """Trailing arguments of a forward operator: number and parameters of the activation."""
    return native.facts()["activations"].index(activation), *PARAMETERS.get(activation, ())


def by_plan(numbers: list[int]) -> Run:
    def run(
        layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, residual: Tensor | None, activation: str
    ) -> None:
        kept = None if bias is None else bias.contiguous()
        torch.ops.polyconv_cpu.convolve(x, w, kept, y, layer.geometry, numbers, None, residual, *arguments(activation))

    return run


def by_family(family: str) -> Run:
    def run(
        layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, residual: Tensor | None, activation: str
    ) -> None:
        op = getattr(torch.ops.polyconv_cpu, f"{family}_fprop")
        op(x, w, bias, y, layer.geometry, residual, *arguments(activation))

    return run


TILES = {
    f"tile lanes, {scheme}, {name}": by_plan([0, index, mode, 0, 0])
    for index, scheme in enumerate(schemes())
    for name, mode in (("fused", FUSED), ("grouped", GROUPED), ("phased", PHASED))
}
CHANNELS = {f"channel lanes, algorithm {index}": by_plan([1, index, 0, 0, 0]) for index in range(4)}
DEPTHWISE, PLAIN = by_family("depthwise"), by_family("plain")
ENGINES = {**TILES, **CHANNELS, "plain": PLAIN}

LAYERS = {
    "one pixel": Layer((1, 1, 1, 1), 1, (1, 1)),
    "channels that fill no vector": Layer((1, 5, 17, 41), 13, (3, 3), padding=(1, 1, 1, 1)),
    "W1 in small": Layer((2, 8, 40, 60), 16, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "groups and a stride": Layer((2, 12, 15, 33), 18, (3, 5), (1, 1, 2, 2), stride=(2, 1), groups=3),
    "sums in several blocks": Layer((2, 150, 7, 7), 40, (3, 3), padding=(1, 1, 1, 1)),
    "rows joined": Layer((2, 70, 7, 23), 20, (1, 1)),
    "mirrored": Layer((1, 6, 9, 40), 8, (3, 3), padding=(2, 2, 3, 3), border="reflect"),
}
DEPTHWISE_LAYERS = {
    "a vector and a few channels": Layer((2, 19, 20, 40), 19, (3, 3), padding=(1, 1, 1, 1), groups=19),
    "several outputs per channel": Layer((1, 5, 13, 37), 15, (3, 5), padding=(1, 1, 2, 2), groups=5),
    "strided": Layer((2, 32, 15, 33), 32, (5, 5), (2, 2, 2, 2), stride=(2, 2), groups=32),
    "dilated": Layer((1, 9, 30, 50), 9, (3, 3), padding=(2, 2, 3, 3), dilation=(2, 3), groups=9),
    "mirrored": Layer((1, 16, 9, 21), 16, (3, 3), padding=(1, 1, 1, 1), groups=16, border="reflect"),
}


def operands(layer: Layer, x_layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = placed(layer.x, x_layout, dtype), torch.randn(layer.w, dtype=dtype)
    return x, w, torch.randn(layer.out_channels, dtype=dtype)


@lru_cache(maxsize=8)
def exact(layer: Layer, x_layout: str, dtype: torch.dtype) -> Tensor:
    """Float64 result without an epilogue, computed once for all engines because it is slow."""
    x, w, bias = operands(layer, x_layout, dtype)
    return reference.fprop(layer.moves, x, w, bias)


def check(
    run: Run,
    layer: Layer,
    activation: str,
    residual: bool,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    x_layout: str = "contiguous",
) -> None:
    """Against float64; unwritten elements stay NaN, and inputs must not change."""
    expected = exact(layer, x_layout, dtype)
    x, w, bias = operands(layer, x_layout, dtype)
    y, added = poisoned(layer.y, layout, dtype), None
    if residual:
        added = torch.randn(layer.y, dtype=dtype).mul_(sqrt(w[0].numel()))
        added = poisoned(layer.y, layout, dtype).copy_(added)
        assert added.stride() == y.stride()
    inputs = [t for t in (x, w, bias, added) if t is not None]
    before = [t.clone() for t in inputs]
    run(layer, x, w, bias, y, added, activation)
    sums = expected if added is None else expected + added.double()
    expected, tolerance = APPLIED[activation](sums), 1e-4 if dtype is torch.float32 else 1e-12
    if activation in BOUNDED:
        tolerance *= max(1.0, sums.square().mean().sqrt().item())
    close(y, expected, tolerance)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("activation", "residual"), KERNEL_EPILOGUES)
def test_every_engine(layer: Layer, activation: str, residual: bool) -> None:
    for run in ENGINES.values():
        check(run, layer, activation, residual)


@pytest.mark.parametrize("layer", DEPTHWISE_LAYERS.values(), ids=DEPTHWISE_LAYERS)
@pytest.mark.parametrize(("activation", "residual"), KERNEL_EPILOGUES)
def test_depthwise(layer: Layer, activation: str, residual: bool, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for layout in OUT_LAYOUTS:
        check(DEPTHWISE, layer, activation, residual, layout, x_layout=layout)


@pytest.mark.parametrize(("epilogue", "layout"), EPILOGUES_IN_LAYOUTS, ids=str)
def test_every_instruction_set(epilogue: tuple[str, bool], layout: str, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    for name in ("channels that fill no vector", "W1 in small", "groups and a stride", "rows joined"):
        for engine, run in ENGINES.items():
            if "tile" not in engine or "F(4,3) x F(4,3)" in engine or "direct" in engine or "nested" in engine:
                check(run, LAYERS[name], *epilogue, layout, x_layout=layout)


@pytest.mark.parametrize(("activation", "residual"), KERNEL_EPILOGUES)
def test_float64(activation: str, residual: bool) -> None:
    for layer in (*LAYERS.values(), *DEPTHWISE_LAYERS.values()):
        check(PLAIN, layer, activation, residual, "channels_last", torch.float64)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_outputs_are_written_past_the_caches(layout: str) -> None:
    """Streaming stores: over 8 MiB, with rows that start anywhere in a vector."""
    wide = Layer((1, 3, 385, 389), 16, (3, 3), padding=(1, 1, 1, 1))
    check(TILES["tile lanes, F(4,3) x F(4,3), fused"], wide, "silu", True, layout, x_layout=layout)
    check(CHANNELS["channel lanes, algorithm 1"], wide, "silu", True, layout, x_layout=layout)
    each = Layer((1, 16, 385, 389), 16, (3, 3), padding=(1, 1, 1, 1), groups=16)
    check(DEPTHWISE, each, "silu", True, layout, x_layout=layout)


@settings(max_examples=100)
@given(
    layer=layers(),
    engine=st.sampled_from(list(ENGINES)),
    epilogue=st.sampled_from(KERNEL_EPILOGUES),
    layout=st.sampled_from(OUT_LAYOUTS),
    x_layout=st.sampled_from(["contiguous", "channels_last", "sliced"]),
)
def test_any_geometry(layer: Layer, engine: str, epilogue: tuple[str, bool], layout: str, x_layout: str) -> None:
    check(ENGINES[engine], layer, *epilogue, layout, x_layout=x_layout)


@settings(max_examples=60)
@given(
    layer=layers(depthwise=True),
    epilogue=st.sampled_from(KERNEL_EPILOGUES),
    layout=st.sampled_from(OUT_LAYOUTS),
    x_layout=st.sampled_from(["contiguous", "channels_last", "sliced"]),
)
def test_any_depthwise_geometry(layer: Layer, epilogue: tuple[str, bool], layout: str, x_layout: str) -> None:
    check(DEPTHWISE, layer, *epilogue, layout, x_layout=x_layout)


@pytest.mark.parametrize("engine", [*ENGINES, "depthwise"])
def test_relu_has_the_bits_of_torch(engine: str) -> None:
    """The sums equal those of a pass without an epilogue, bit by bit."""
    layer = DEPTHWISE_LAYERS["strided"] if engine == "depthwise" else LAYERS["W1 in small"]
    run = {**ENGINES, "depthwise": DEPTHWISE}[engine]
    x, w, bias = torch.randn(layer.x), torch.randn(layer.w), torch.randn(layer.out_channels)
    plain, fused = poisoned(layer.y), poisoned(layer.y)
    run(layer, x, w, bias, plain, None, "none")
    run(layer, x, w, bias, fused, None, "relu")
    assert torch.equal(fused, F.relu(plain))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_nothing_is_written_or_read_beside_the_rows(layout: str) -> None:
    """The residual is NaN wherever it must not be read."""
    layer = Layer((1, 4, 12, 30), 20, (3, 3), padding=(1, 1, 1, 1))
    x, w = torch.randn(layer.x), torch.randn(layer.w)
    last = layout == "channels_last"
    shape = (1, 12, 41, 27) if last else (1, 20, 12, 41)

    def inside(tensor: Tensor) -> Tensor:
        return tensor[:, :, 3:33, 5:25].permute(0, 3, 1, 2) if last else tensor[..., 3:33]

    values = torch.randn(layer.y)
    for run in ENGINES.values():
        y, residual = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        inside(residual).copy_(values)
        run(layer, x, w, None, inside(y), inside(residual), "silu")
        close(inside(y), reference.with_epilogue(layer.moves, x, w, None, values, "silu"), 1e-4)
        assert y.isnan().sum() == y.numel() - values.numel()


ULPS = {"none": 0.5, "relu": 0.5, "clamp": 0.5, "leaky_relu": 0.5, "silu": 2.5, "gelu": 6}
"""Largest error [ulp] for inputs above -1; 5 for those not listed."""


@pytest.mark.parametrize("activation", APPLIED)
def test_activations_are_within_a_few_ulp(activation: str, instruction_set: str) -> None:
    """Over all exponents, and of what is not finite. Below -1, errors are relative to 1: there torch's GELU cancels.
    SiLU is as exact down to -87; below, where it is less than 2e-36, the result may be -0."""
    assert native.instruction_set() == instruction_set
    some = torch.randint(-(2**31), 2**31, (400_000,)).to(torch.int32).view(torch.float32)
    # Hardswish multiplies by 6 before it divides. Denormal numbers count as zero.
    some = some[(some.abs() < 5e37) & (some.abs() > 1e-36)]
    x = torch.cat([some, torch.linspace(-110, 110, 400_001), torch.linspace(-1, 1, 100_001)])
    x = x[: x.numel() // 16 * 16].reshape(1, 1, 16, -1)

    def applied(x: Tensor, engine: str = "tile lanes, direct, fused") -> Tensor:
        layer = Layer(tuple(x.shape), 1, (1, 1))  # type: ignore[arg-type]
        y = poisoned(layer.y)
        ENGINES[engine](layer, x, torch.ones(layer.w), None, y, None, activation)
        return y

    y, exact = applied(x), APPLIED[activation](x.double())
    error = (y - exact).abs()
    ulp = torch.exp2((exact.frexp().exponent.clamp(min=-125) - 24).double())
    tail = x <= (-87 if activation == "silu" else -1)
    assert float((error / ulp)[~tail].max()) <= ULPS.get(activation, 5)
    assert float((error[tail] / exact[tail].abs().clamp(min=1)).max()) <= (1.5e-36 if activation == "silu" else 1.5e-7)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 100.0, -100.0]).reshape(1, 1, 1, -1)
    for engine in ("tile lanes, direct, fused", "channel lanes, algorithm 0", "plain"):
        torch.testing.assert_close(
            applied(special, engine), APPLIED[activation](special.double()).float(), equal_nan=True
        )


@pytest.mark.parametrize(("activation", "residual"), EPILOGUES)
def test_pytorchs_convolution_is_followed_by_the_rest(activation: str, residual: bool) -> None:
    problem = fused_problem((2, 3, 9, 9), (4, 3, 3, 3), activation=activation, residual=residual)
    x, w, bias = torch.randn(problem.x_shape), torch.randn(problem.w_shape), torch.randn(4)
    added = torch.randn(problem.y_shape) if residual else None
    sums = F.conv2d(x, w, bias)
    expected = Activation(activation)(sums if added is None else sums + added)
    tensors = {"x": x, "w": w, "bias": bias, "y": torch.full(problem.y_shape, torch.nan)}
    tensors |= {} if added is None else {"residual": added}
    aten.run(problem, tensors)
    assert torch.equal(tensors["y"], expected)


# ---- refusals of the operators


def test_a_residual_of_another_layout_is_refused() -> None:
    layer = LAYERS["channels that fill no vector"]
    x, w, y = torch.randn(layer.x), torch.randn(layer.w), torch.empty(layer.y)
    for run in (ENGINES["tile lanes, direct, fused"], CHANNELS["channel lanes, algorithm 0"], PLAIN):
        with pytest.raises(RuntimeError, match="differ in their strides"):
            run(layer, x, w, None, y, torch.randn(layer.y).to(memory_format=torch.channels_last), "none")
        with pytest.raises(RuntimeError, match="differ in size"):
            run(layer, x, w, None, y, torch.randn(2, 13, 17, 41), "none")
        with pytest.raises(RuntimeError, match="element types"):
            run(layer, x, w, None, y, torch.randn(layer.y).double(), "none")
    with pytest.raises(RuntimeError, match="no such activation"):
        torch.ops.polyconv_cpu.plain_fprop(x, w, None, y, layer.geometry, None, len(APPLIED))


# ---- the planner


def fused_problem(x: tuple[int, int, int, int], w: tuple[int, int, int, int], **kwargs: object) -> Problem:
    return Problem.make("fprop", x, w, bias=True, **kwargs)  # type: ignore[arg-type]


def test_explain_says_what_is_not_fused() -> None:
    plan = plan_cpu(fused_problem((1, 8, 12, 12), (8, 8, 3, 3), residual=True, activation="relu"))
    assert "PyTorch's convolution, residual and relu not fused, ATen" in [c.name for c in plan.candidates]
    assert "bias, residual, relu" in plan.explain()
    half = plan_cpu(fused_problem((1, 8, 12, 12), (8, 8, 3, 3), activation="silu", dtype="bfloat16"))
    assert "PyTorch's convolution, silu not fused in float32, ATen" in [c.name for c in half.candidates]


@pytest.mark.parametrize(
    ("x", "w", "geometry"),
    [
        ((1, 64, 56, 56), (64, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
        ((1, 64, 56, 56), (256, 64, 1, 1), {}),
        ((1, 3, 112, 112), (64, 3, 7, 7), {"padding": (3, 3, 3, 3), "stride": (2, 2)}),
        ((1, 96, 56, 56), (96, 1, 3, 3), {"padding": (1, 1, 1, 1), "groups": 96}),
        ((1, 32, 96, 128), (64, 32, 5, 9), {"padding": (2, 2, 4, 4), "dilation": (2, 3)}),
        ((2, 512, 7, 7), (512, 512, 3, 3), {"padding": (1, 1, 1, 1)}),
    ],
    ids=["3x3", "1x1", "7x7 strided", "depthwise", "W1", "small map"],
)
@pytest.mark.parametrize(("activation", "residual"), EPILOGUES)
def test_the_predicted_error_holds(
    x: tuple[int, int, int, int],
    w: tuple[int, int, int, int],
    geometry: dict[str, tuple[int, ...]],
    activation: str,
    residual: bool,
) -> None:
    problem = fused_problem(x, w, activation=activation, residual=residual, **geometry)
    scale = sqrt(reduction_of(problem))
    data, weight = torch.randn(x), torch.randn(w) / scale
    bias, added = torch.randn(w[0]) / scale, torch.randn(problem.y_shape) if residual else None
    arguments = {**geometry, "activation": activation, "residual": added}
    with torch.no_grad():
        y = polyconv.conv2d(data, weight, bias, **arguments)  # type: ignore[arg-type]
        arguments["residual"] = None if added is None else added.double()
        exact = polyconv.conv2d(data.double(), weight.double(), bias.double(), **arguments)  # type: ignore[arg-type]
    tensors = {"x": data, "w": weight} if added is None else {"x": data, "w": weight, "residual": added}
    observed = largest((y - exact).abs(), scales(problem, tensors)["y"])
    plan = plan_cpu(problem, inference=True)
    assert observed <= plan.predicted_error, f"{observed:.1e} by {plan.name}, predicted {plan.predicted_error:.1e}"


def test_every_border_reaches_the_epilogue() -> None:
    for border in BORDERS:
        layer = replace(LAYERS["mirrored"], border=border)
        for run in ENGINES.values():
            check(run, layer, "relu", True)
