"""The layers of a hundred networks: the file's contents, samples, and classes."""

from __future__ import annotations

import torch

from polyconv.measure import layers
from polyconv.problem import Pass


def test_layers_are_many_and_distinct() -> None:
    every = layers.every()
    assert len(every) > 2000
    assert len({layer.name.partition("/")[0] for layer in every}) > 90  # a network may have no layer of its own
    assert len({layer.problem(Pass.FPROP) for layer in every}) == len(every)
    assert sum(layer.uses for layer in every) > 8000


def test_a_layer_is_the_convolution_of_its_network() -> None:
    found = {(layer.input, layer.out_channels, layer.kernel, layer.stride) for layer in layers.every()}
    assert ((1, 64, 56, 56), 64, (3, 3), (1, 1)) in found  # ResNet's
    assert ((1, 3, 224, 224), 64, (7, 7), (2, 2)) in found
    for layer in layers.sample(layers.every(), 40):
        problem = layer.problem(Pass.FPROP)
        w = torch.empty(problem.w_shape, device="meta")
        x = torch.empty(layer.input, device="meta")
        y = torch.nn.functional.conv2d(x, w, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        assert y.shape == problem.y_shape


def test_samples_are_the_same_every_time_and_grow() -> None:
    every = layers.every()
    few, more = layers.sample(every, 10), layers.sample(every, 30)
    assert more[:10] == few
    assert layers.sample(every, 10, seed=1) != few
    assert len(set(layers.sample(every, 10**6))) == len(every)


def test_classes() -> None:
    classes = {layers.class_of(layer) for layer in layers.every()}
    assert {"1×1, one pixel", "depthwise 5×5 stride 2, up to 20×20", "grouped 3×3, larger maps"} <= classes
    assert {"stem 7×7 stride 2", "3×3 dilated, larger maps"} <= classes
