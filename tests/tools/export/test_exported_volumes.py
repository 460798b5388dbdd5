"""Volumes in an exported file: stacked slices, whose 2-D convolutions torch computes here, in float64.

``python tools/export_check`` executes the kernels.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from exported_files import Builds
from polyconv.tools.export import convolution_model, named_model


class Kernels:
    """Replaces the library of a geometry: torch computes its functions, and their tensors are checked."""

    def __init__(self, source: Any, geometry: tuple[Any, ...]) -> None:
        self.geometry = geometry
        self.forward, self.input_gradient, self.weight_gradient = (
            SimpleNamespace(kernels=self, name=name) for name in ("y", "x", "w")
        )

    def convolved(self, x: Tensor, w: Tensor, bias: Tensor | None, size: torch.Size) -> Tensor:
        inputs, outputs, groups, kernel, stride, dilation, sides = self._arguments()
        assert x.shape[1] == inputs
        assert w.shape == (outputs, inputs // groups, *kernel)
        top, bottom, left, right = sides
        y = conv2d(pad(x, (left, right, top, bottom)), w, bias, stride, 0, dilation, groups)
        return y[:, :, : size[0], : size[1]]

    def _arguments(self) -> tuple[int, int, int, Any, Any, Any, Any]:
        g = self.geometry
        return g[0], g[1], g[2], g[3:5], g[5:7], g[7:9], g[9:13]


def computed(function: Any, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
    """Replaces the file's own ``_call``. Outputs have dense rows, which kernels rely on."""
    written = {"x": x, "w": w, "y": y}[function.name]
    assert w.is_contiguous()
    assert written.stride()[2:] == (written.shape[3], 1)
    read = [torch.zeros_like(tensor) if tensor is written else tensor.detach().clone() for tensor in (x, w)]
    with torch.enable_grad():
        convolution = function.kernels.convolved(*(tensor.requires_grad_() for tensor in read), bias, y.shape[2:])
        if function.name == "y":
            y.copy_(convolution.detach())
        else:
            assert bias is None
            written.copy_(torch.autograd.grad(convolution, read[function.name == "w"], y)[0])


@pytest.fixture(autouse=True)
def _new_memory_has_no_numbers() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def file(imported: Any) -> Any:
    """The module of a problem, with torch as its kernels."""

    def make(name: str) -> Any:
        module = imported(name)
        module._kernels, module._call = Kernels, computed
        return module

    return make


def any_volume(seed: int, *, transposed: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Arguments of a module, and the shape of an input."""
    choose = random.Random(seed)
    groups = choose.choice([1, 1, 2, 3])
    three = [tuple(choose.choice(values) for _ in range(3)) for values in ((1, 2, 3, 4), (1, 1, 2, 3), (1, 1, 2, 3))]
    kernel, stride, dilation = three
    arguments: dict[str, Any] = {
        "in_channels": groups * choose.choice([1, 2]),
        "out_channels": groups * choose.choice([1, 3]),
        "kernel_size": kernel,
        "stride": stride,
        "padding": tuple(choose.choice([0, 1, 2]) for _ in range(3)),
        "dilation": dilation,
        "groups": groups,
        "bias": choose.random() < 0.5,
    }
    if transposed:
        arguments["output_padding"] = tuple(choose.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = [
        1 + 2 * p + choose.randrange(4) if transposed else max(1, n) + choose.randrange(5)
        for n, p in zip(least, arguments["padding"], strict=True)
    ]
    return arguments, (choose.choice([1, 2, 3]), arguments["in_channels"], *size)


def check(module: Any, kind: str, arguments: dict[str, Any], shape: tuple[int, ...], seed: int) -> None:
    """Compare a module of a file with torch's, including all gradients."""
    torch.manual_seed(seed)
    theirs = getattr(torch.nn, kind)(**arguments, dtype=torch.float64)
    ours = getattr(module, kind)(None, **arguments, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, dtype=torch.float64)
    x_theirs, x_ours = (x.clone().requires_grad_() for _ in range(2))
    expected, y = theirs(x_theirs), ours(x_ours)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    y.backward(gradient)
    pairs = [(y, expected), (x_ours.grad, x_theirs.grad)]
    pairs += [(own.grad, one.grad) for own, one in zip(ours.parameters(), theirs.parameters(), strict=True)]
    for own, exact in pairs:
        torch.testing.assert_close(own, exact, msg=lambda text: f"seed {seed}, {kind}({arguments}): {text}")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("name", "kind"), [("kb54", "Conv3d"), ("kb72", "ConvTranspose3d")])
def test_any_volume(name: str, kind: str, part: int, file: Any) -> None:
    module = file(name)
    for seed in range(part, 80, 4):
        check(module, kind, *any_volume(seed, transposed=kind != "Conv3d"), seed)


def test_taps_that_meet_the_volume_nowhere(file: Any) -> None:
    """Slices in the padding only, and output slices that no tap reaches."""
    thin = {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 1, 1), "padding": (4, 0, 0), "dilation": (4, 1, 1)}
    check(file("kb54"), "Conv3d", thin, (1, 2, 2, 3, 3), 0)
    apart = {"in_channels": 2, "out_channels": 3, "kernel_size": (2, 1, 1), "stride": (5, 1, 1), "bias": False}
    check(file("kb72"), "ConvTranspose3d", apart, (2, 2, 3, 2, 2), 0)


def test_what_is_not_wanted_is_not_computed(file: Any) -> None:
    module, calls = file("kb54"), list[str]()

    def called(function: Any, *tensors: Any) -> None:
        calls.append(function.name)
        computed(function, *tensors)

    module._call = called
    conv = module.Conv3d(None, 2, 3, 2, bias=True, dtype=torch.float64).requires_grad_(False)
    x = torch.zeros(2, 2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    conv(x).sum().backward()
    assert calls == ["y", "y", "x", "x"]
    calls.clear()
    conv.bias.requires_grad_()
    conv(x.detach()).sum().backward()
    assert calls == ["y", "y"]
    assert conv.bias.grad.tolist() == [2 * 27.0] * 3
    assert conv(x[0]).shape == (3, 3, 3, 3), "a volume without a batch"
    assert conv(x[:0]).shape == (0, 3, 3, 3, 3)


def test_a_volume_by_its_arguments(imported: Any, builds: Builds) -> None:
    arguments: Any = {"in_channels": 4, "out_channels": 6, "kernel_size": (2, 3, 3), "padding": (1, 0, 2, 1, -1, 0)}
    model = convolution_model((2, 4, 5, 8, 9), **arguments)
    module = imported(model)
    conv = module.ModelNew().conv3d
    assert conv.sides == (1, 0, 2, 1, -1, 0)
    assert len(builds) == 1, "what it was exported for is what it is built for"
    assert "kInChannels = 8, kOutChannels = 6, kGroups = 1, kKernelH = 3, kKernelW = 3" in builds.sources[0]
    module._kernels, module._call = Kernels, computed
    assert module.ModelNew().double()(torch.zeros(2, 4, 5, 8, 9, dtype=torch.float64)).shape == (2, 6, 5, 9, 6)


def test_forward_only_has_no_sums(imported: Any) -> None:
    module = imported("kb72", forward_only=True)
    assert not hasattr(module, "_add_unstacked")
    assert hasattr(module, "_stacked")


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("kb54", "fprop 62x9x64x64, 64 channels, kernel 3x3"),
        ("kb61", "dgrad 66x48x66x66, 144 channels, kernel 3x3"),
        ("kb73", "dgrad 32x32x127x255, 64 channels, kernel 3x3, stride 2x2, padding 1x1"),
        ("kb77", "dgrad 17x64x65x65, 96 channels, kernel 3x3, stride 2x2, padding 1x1, dilation 2x2"),
    ],
)
def test_what_is_planned(name: str, picture: str) -> None:
    (layer,) = named_model(name).layers
    assert str(layer.picture) == picture
