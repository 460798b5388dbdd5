"""``polyconv_cpu::compiled_convolution``: one layer of a compiled graph, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyconv import activation
from polyconv.activation import Activation
from polyconv.cpu import native, planner
from polyconv.cpu.engines import pointwise
from polyconv.cpu.plan import CpuCandidate
from polyconv.inductor import chain, choice
from polyconv.inductor import layer as layers
from polyconv.inductor.epilogues import Epilogue
from polyconv.inductor.layer import Layer
from polyconv.inductor.prologues import Prologue

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native CPU kernels")

ACTIVATIONS = [Activation(name) for name in (*activation.ACTIVATIONS, "leaky_relu(-0.25)", "hardtanh(-0.25, 0.5)")]


def a_layer(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: bool,
    applied: Activation,
    groups: int,
    **geometry: tuple[int, int],
) -> Layer:
    node = torch.fx.Graph().placeholder("x")
    epilogue = Epilogue(node, node if residual else None, applied)
    has_bias = None if bias is None else node
    moves = (geometry["padding"], geometry["stride"], geometry["dilation"])
    return Layer(node, node, w, has_bias, bias, w, tuple(x.shape), *moves, groups, epilogue)


def kernels(layer: Layer) -> list[CpuCandidate]:
    every = planner.offered(layer.problem, planner.here())
    return [one for one in every if one.refusal is None and layers.has_compiled_form(one)]


def channels_last(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


UNIT = {"padding": (0, 0), "stride": (1, 1), "dilation": (1, 1)}

pairs = st.tuples(st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 5, 3), (2, 16, 20), (1, 33, 8)]),
    st.sampled_from([(1, 1), (3, 3), (2, 5), (7, 7)]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    pairs,
    pairs,
    st.sampled_from(["one", "two", "depthwise"]),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.booleans(),
)
def test_every_kernel_agrees_with_float64(
    sizes: tuple[int, int, int],
    kernel: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    grouping: str,
    applied: Activation,
    residual: bool,
    with_bias: bool,
) -> None:
    batch, channels, outputs = sizes
    groups = {"one": 1, "two": 2, "depthwise": channels}[grouping]
    channels, outputs = (channels, channels) if grouping == "depthwise" else (channels * groups, outputs * groups)
    geometry = {"padding": padding, "stride": stride, "dilation": dilation}
    x, w = channels_last((batch, channels, 15, 14)), torch.randn(outputs, channels // groups, *kernel)
    bias = torch.randn(outputs) if with_bias else None
    y = F.conv2d(x.double(), w.double(), None if bias is None else bias.double(), groups=groups, **geometry)
    other = channels_last(tuple(y.shape)) if residual else None
    layer = a_layer(x, w, bias, residual, applied, groups, **geometry)
    wanted = applied(y if other is None else y + other)
    for one in kernels(layer):
        made = layers.operator()([x], layer.weights_for(one), bias, other, None, layer.numbers(one), *applied.ab)
        assert made.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(
            made.double(), wanted, atol=1e-3, rtol=1e-4, msg=lambda text, one=one: f"{one}: {text}"
        )


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 5, 24, 3), (2, 16, 40, 17), (1, 3, 260, 8)]),
    st.tuples(st.integers(1, 23), st.integers(1, 20)),
    st.sampled_from([3, 5, 7]),
    pairs,
    st.sampled_from([(1, 1), (3, 3), None]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([Activation.NONE, Activation.SILU, Activation("hardtanh(-0.25, 0.5)")]),
)
def test_chains_agree_with_float64(
    sizes: tuple[int, int, int, int],
    image: tuple[int, int],
    taps: int,
    stride: tuple[int, int],
    expansion: tuple[int, int] | None,
    projects: bool,
    residual: bool,
    applied: Activation,
) -> None:
    batch, channels, wide, outputs = sizes
    expand = [] if expansion is None else [(wide, channels, *expansion)]
    project = [(outputs, wide, 1, 1)] if projects or not expand else []
    shapes = [*expand, (wide, 1, taps, taps), *project]
    x = y = channels_last((batch, channels if expand else wide, *image))
    links, other = [], None
    for number, shape in enumerate(shapes):
        w, bias, last = torch.randn(shape), torch.randn(shape[0]) if number else None, number + 1 == len(shapes)
        groups, act = wide if shape[1] == 1 else 1, Activation.NONE if last else applied
        move = stride if groups > 1 else (1, 1)
        geometry = {"padding": (shape[2] // 2, shape[3] // 2), "stride": move, "dilation": (1, 1)}
        layer = a_layer(y, w, bias, last and residual, act, groups, **geometry)
        y = F.conv2d(y.double(), w.double(), None if bias is None else bias.double(), groups=groups, **geometry)
        other = channels_last(tuple(y.shape)) if last and residual else None
        y = act(y if other is None else y + other)
        link = chain.link_of(number, layer, layer.node, None)
        assert link is not None
        links.append(link)
    call, before = chain.chain_call(links), native.operator("l2_bytes")(0)
    try:
        native.operator("l2_bytes")(1)  # the least that there is: wide chains run in several strips
        made = layers.operator()([x], call.weights, call.bias, other, None, call.numbers, *call.ab)
    finally:
        native.operator("l2_bytes")(before)
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made.double(), y, atol=1e-3, rtol=1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layers.operator()([mode.from_tensor(x)], call.weights, call.bias, other, None, call.numbers, *call.ab)
    assert (fake.shape, fake.stride()) == (made.shape, made.stride())


def joined(layer: Layer, channels: list[int], scale: Tensor, shift: Tensor, clamped: bool) -> Layer:
    graph = torch.fx.Graph()
    parts = [graph.placeholder(f"x{i}") for i in range(len(channels))]
    return replace(layer, prologue=Prologue(parts, scale, shift, clamped))


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("channels", [[3], [64, 32, 32], [5, 1, 17, 40], [600, 424]], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-30])
def test_joined_inputs(channels: list[int], stride: tuple[int, int], clamped: bool, size: float) -> None:
    """Slices and tiny values are joined as well."""
    count = sum(channels)
    parts = [size * channels_last((2, 2 * c, 11, 13))[:, :c] for c in channels]
    w, bias = torch.randn(40, count, 1, 1), size * torch.randn(40)
    scale, shift = torch.randn(count).double(), size * torch.randn(count).double()
    x = torch.cat(parts, 1).double() * scale[:, None, None] + shift[:, None, None]
    y = F.conv2d(x.relu() if clamped else x, w.double(), bias.double(), stride).relu()
    layer = a_layer(x, w, bias, False, Activation.RELU, 1, padding=(0, 0), stride=stride, dilation=(1, 1))
    layer = joined(layer, channels, scale, shift, clamped)
    (one,) = filter(layer.joins, kernels(layer))
    assert layer.prologue is not None
    normalisation = layer.prologue.normalisation
    made = layers.operator()(parts, layer.weights_for(one), bias, None, normalisation, layer.numbers(one))
    torch.testing.assert_close(made.double() / size, y / size, atol=1e-3, rtol=1e-4)


def test_joined_inputs_that_do_not_fit_raise() -> None:
    w, scale = torch.randn(8, 8, 1, 1), torch.ones(8).double()
    x = [channels_last((1, 4, 9, 9)) for _ in range(3)]
    layer = a_layer(torch.cat(x[:2], 1), w, None, False, Activation.NONE, 1, **UNIT)
    layer = joined(layer, [4, 4], scale, scale, False)
    (one,) = filter(layer.joins, kernels(layer))
    run, rest = layers.operator(), layer.numbers(one)
    weights, normalisation = layer.weights_for(one), torch.ones(2, 8)
    for inputs, factors, said in (
        (x, normalisation, "do not fit the layer"),
        (x[:2], None, "joined normalised"),
        (x[:2], normalisation[:1], "a factor and a summand"),
        ([x[0], x[1][..., 1:]], normalisation, "differ in size"),
        ([x[0], x[1].contiguous()], normalisation, "in channels_last"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run(inputs, weights, None, None, factors, rest)


@pytest.mark.parametrize("channels", [1, 3, 4, 15, 16])
@pytest.mark.parametrize("padding", [(1, 1), (0, 2)])
def test_rows_of_few_channels_are_read_in_any_layout(channels: int, padding: tuple[int, int]) -> None:
    x, w, bias = torch.randn(2, channels, 9, 45), torch.randn(24, channels, 3, 3), torch.randn(24)
    geometry = {"padding": padding, "stride": (2, 1), "dilation": (1, 1)}
    layer = a_layer(channels_last(tuple(x.shape)), w, bias, False, Activation.RELU, 1, **geometry)
    one = next(each for each in kernels(layer) if each.engine == pointwise.NAME)
    weights, numbers = layer.weights_for(one), layer.numbers(one)
    wanted = F.conv2d(x.double(), w.double(), bias.double(), **geometry).relu()
    assert layers.reads_any_layout(numbers) == (channels < 16)
    rows = torch.randn(2, 9, channels, 45).transpose(1, 2).copy_(x)
    for each in (x, x.to(memory_format=torch.channels_last), rows):
        if channels < 16 or each.stride(1) == 1:
            made = layers.operator()([each], weights, bias, None, None, numbers)
            torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("taps", [1, 3])
def test_a_single_channel_has_any_stride(taps: int, dilation: int) -> None:
    """Inductor passes an image of one channel as it is: its layout says nothing."""
    x, w = torch.randn(2, 1, 9, 8), torch.randn(24, 1, taps, taps)
    geometry = {"padding": (1, 1), "stride": (1, 1), "dilation": (dilation, dilation)}
    layer = a_layer(x, w, None, False, Activation.NONE, 1, **geometry)
    wanted = F.conv2d(x.double(), w.double(), **geometry)
    for one in kernels(layer):
        for each in (x, x.as_strided(x.shape, (72, 1, 8, 1))):
            made = layers.operator()([each], layer.weights_for(one), None, None, None, layer.numbers(one))
            torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("pixels", [1, 2, 3])
@pytest.mark.parametrize(("channels", "outputs"), [(1100, 300), (7, 1000), (600, 5)])
def test_few_pixels(channels: int, outputs: int, pixels: int) -> None:
    x, w, bias = channels_last((1, channels, 1, pixels)), torch.randn(outputs, channels, 1, 1), torch.randn(outputs)
    layer = a_layer(x, w, bias, False, Activation.NONE, 1, **UNIT)
    one = next(each for each in kernels(layer) if each.engine == pointwise.NAME)
    made = layers.operator()([x], layer.weights_for(one), bias, None, None, layer.numbers(one))
    wanted = F.conv2d(x.double(), w.double(), bias.double())
    torch.testing.assert_close(made, wanted, atol=1e-3, rtol=1e-4, check_dtype=False)


def test_operators_return_new_tensors() -> None:
    """Only generated code lets a layer write over its residual."""
    x, w, other = channels_last((2, 40, 7, 5)), torch.randn(24, 40, 1, 1), channels_last((2, 24, 7, 5))
    layer = a_layer(x, w, None, True, Activation.RELU, 1, **UNIT)
    one = next(each for each in kernels(layer) if each.engine == pointwise.NAME)
    numbers = layer.numbers(one)
    numbers[layers.FLAGS] |= layers.OVERWRITES
    made = layers.operator()([x], layer.weights_for(one), None, other, None, numbers)
    assert made.data_ptr() != other.data_ptr()


def test_layers_write_parts_of_a_tensor() -> None:
    """Every kernel, into channels that do not begin on a vector."""
    x, w, bias = channels_last((2, 16, 9, 11)), torch.randn(16, 16, 3, 3), torch.randn(16)
    for groups in (1, 16):
        of = w[:, : 16 // groups]
        layer = a_layer(x, of, bias, False, Activation.RELU, groups, padding=(1, 1), stride=(1, 1), dilation=(1, 1))
        wanted = F.conv2d(x.double(), of.double(), bias.double(), padding=1, groups=groups).relu()
        for one in kernels(layer):
            numbers, weights, whole = layer.numbers(one), layer.weights_for(one), None
            numbers[layers.WHOLE] = 37
            for first in (0, 21):
                numbers[layers.FIRST] = first
                earlier = whole
                whole = layers.operator()([x], weights, bias, earlier, None, numbers)
                assert earlier is None or whole.data_ptr() != earlier.data_ptr()
            assert whole is not None
            for first in (0, 21):
                part = whole[:, first : first + 16]
                torch.testing.assert_close(part, wanted, atol=1e-3, rtol=1e-4, check_dtype=False)
            assert whole.is_contiguous(memory_format=torch.channels_last)
            for wrong in (22, -1):
                numbers[layers.FIRST] = wrong
                with pytest.raises(RuntimeError, match="does not fit into the tensor of several layers"):
                    layers.operator()([x], weights, bias, whole, None, numbers)


@settings(max_examples=30)
@given(
    st.sampled_from([(1, 20, 3), (2, 16, 20), (1, 33, 8)]),
    st.sampled_from([(1, 1), (4, 4), (2, 3), (5, 2)]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.sampled_from([(1, 1), (4, 5)]),
    st.booleans(),
    st.sampled_from([1.0, 1e-25]),
)
def test_transposed_layers_agree_with_float64(
    sizes: tuple[int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    image: tuple[int, int],
    with_bias: bool,
    size: float,
) -> None:
    batch, channels, outputs = sizes
    stride = (min(stride[0], kernel[0]), min(stride[1], kernel[1]))
    padding = (min(padding[0], (kernel[0] - 1) // 2), min(padding[1], (kernel[1] - 1) // 2))
    more = (stride[0] - 1, 0)
    x, w = channels_last((batch, channels, *image)), size * torch.randn(channels, outputs, *kernel)
    bias = size * torch.randn(outputs) if with_bias else None
    wide = None if bias is None else bias.double()
    wanted = F.conv_transpose2d(x.double(), w.double(), wide, stride, padding, more).relu()
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = wanted
    epilogue, has_bias = Epilogue(node, None, Activation.RELU), None if bias is None else node
    unit = (1, 1)
    layer = Layer(
        *(node, node, w, has_bias, bias, w.transpose(0, 1), tuple(x.shape), padding, stride, unit, 1, epilogue),
        output_padding=more,
    )
    (one,) = (each for each in kernels(layer) if layer.runs(each))
    arguments = ([x], layer.weights_for(one), bias, None, None, layer.numbers(one))
    made = layers.operator()(*arguments)
    assert made.is_contiguous(memory_format=torch.channels_last)
    limit = 1e-4 * size * (channels * kernel[0] * kernel[1]) ** 0.5
    torch.testing.assert_close(made.double(), wanted, atol=limit, rtol=1e-4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layers.operator()(*([mode.from_tensor(x)], *arguments[1:]))
        assert (fake.shape, fake.stride()) == (made.shape, made.stride())


def test_opcheck() -> None:
    x, w = channels_last((2, 8, 9, 9)), torch.randn(8, 8, 3, 3)
    layer = a_layer(x, w, None, False, Activation.RELU, 1, padding=(1, 1), stride=(2, 2), dilation=(1, 1))
    one = kernels(layer)[0]
    torch.library.opcheck(layers.operator(), ([x], layer.weights_for(one), None, None, None, layer.numbers(one)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": (1, 7, 9, 9)}, "does not fit"),
        ({"x": (1, 8, 1, 9)}, "larger than the padded image"),
        ({"numbers": 3}, "21 numbers"),
        ({"numbers": -1}, "another instruction set"),
    ],
)
def test_arguments_that_do_not_fit_raise(change: dict[str, object], said: str) -> None:
    x, w = channels_last((1, 8, 9, 9)), torch.randn(8, 8, 3, 3)
    layer = a_layer(x, w, None, False, Activation.NONE, 1, padding=(0, 0), stride=(1, 1), dilation=(1, 1))
    one = kernels(layer)[0]
    numbers = layer.numbers(one)
    x = channels_last(change["x"]) if "x" in change else x  # type: ignore[arg-type]
    numbers = {None: numbers, 3: numbers[:3], -1: [*numbers[:-1], -1]}[change.get("numbers")]  # type: ignore[index]
    with pytest.raises(RuntimeError, match=said):
        layers.operator()([x], layer.weights_for(one), None, None, None, numbers)


def test_only_kernels_with_a_compiled_form_are_tried() -> None:
    """A 1x1 layer also suits engines that are PyTorch's matrix product."""
    x, w = channels_last((1, 256, 14, 14)), torch.randn(64, 256, 1, 1)
    layer = a_layer(x, w, None, False, Activation.NONE, 1, padding=(0, 0), stride=(1, 1), dilation=(1, 1))
    tried = choice._candidates(layer)
    assert tried
    assert all(layer.numbers(one) for one in tried)


def test_few_candidates_of_large_weights_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = a_layer(channels_last((1, 32, 14, 14)), torch.randn(64, 32, 3, 3), None, False, Activation.NONE, 1, **UNIT)
    every, size = choice._candidates(layer), layer.w.nbytes
    assert len(every) > 2
    for limit, count in ((1, 1), (2 * size, 2)):
        monkeypatch.setattr(choice, "MOST_BYTES", limit)
        assert choice._candidates(layer) == every[:count]
