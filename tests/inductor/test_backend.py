"""``torch.compile(model, backend="polyconv")``: results, changed parameters, changing sizes, choices."""

from __future__ import annotations

import copy
import functools
import random
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import polyconv
from polyconv import settings
from polyconv.autotune import preferences
from polyconv.autotune.tuning_file import Entry, load
from polyconv.cpu import native
from polyconv.cpu.plan import CpuCandidate
from polyconv.dispatch.op import TRANSPOSED
from polyconv.inductor import aoti, backend, choice, graph_pass, private, shuffles, swap
from polyconv.inductor import layer as layers
from polyconv.inductor.layer import LAYER, NORMALISATION, RESIDUAL, operator, overwrites_residual

pytestmark = [
    pytest.mark.usefixtures("_fresh"),
    pytest.mark.skipif(private.missing() is not None or not native.is_available(), reason="needs Inductor"),
]

QUICK = {"cpp_wrapper": False}
"""The Python wrapper, which compiles faster."""


class Block(nn.Module):
    """Two convolutions with batch normalisation, an activation, and a residual."""

    def __init__(self, activation: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.activation = activation
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norms[0](self.first(x)))
        return self.activation(self.norms[1](self.second(y)) + x)


@pytest.fixture
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model's first candidate runs, without trials."""

    def first(self: Any, layer: Any, able: dict[str, Any]) -> Entry:
        name = next(iter(able))
        return Entry(name, {name: 1.0, choice.ONEDNN: 2.0}, 2.0)

    monkeypatch.setattr(choice.Chooser, "_trials", first)
    for trials in ("_trials", "_step_trials"):
        monkeypatch.setattr(swap, trials, lambda call: Entry(swap.POLYCONV, {swap.POLYCONV: 1.0}, 2.0))
    monkeypatch.setattr(swap, "_phase_trials", lambda call: Entry(swap.PYTORCH, {swap.PYTORCH: 1.0}, 1.0))
    monkeypatch.setattr(swap, "_has_kernels", lambda call: True)


def agree(compiled: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
        torch.testing.assert_close(compiled(x).double(), wanted, atol=1e-4, rtol=1e-4)


def test_it_is_found_by_name() -> None:
    assert "polyconv" in torch._dynamo.list_backends()


@pytest.mark.usefixtures("_ours")
def test_epilogues_are_fused() -> None:
    activations = {
        "relu": nn.ReLU(),
        "hardtanh(0.0, 6.0)": nn.ReLU6(),
        "silu": nn.SiLU(),
        "hardswish": nn.Hardswish(),
        "gelu": nn.GELU(),
        "leaky_relu(0.2)": nn.LeakyReLU(0.2),
        "sigmoid": nn.Sigmoid(),
        "hardsigmoid": nn.Hardsigmoid(),
    }
    model = nn.Sequential(*(Block(activation) for activation in activations.values())).eval()
    compiled, x = torch.compile(model, backend="polyconv", options=QUICK), torch.randn(1, 16, 8, 8)
    agree(compiled, model, x)
    layers = str(polyconv.explain(compiled, x))
    for name in activations:
        assert f"with {name}\n" in layers
        assert f"with residual and {name}\n" in layers
    assert "oneDNN" not in layers.replace("oneDNN 2000.000 ms", "")


class Inverted(nn.Module):
    """MobileNet's block: a wide depthwise convolution between two 1x1 convolutions; with a gate, EfficientNet's."""

    def __init__(self, width: int, outputs: int, stride: int, activation: nn.Module, gate: bool = False) -> None:
        super().__init__()
        wide = 6 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), activation)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide)
        self.activation, self.project = activation, nn.Conv2d(wide, outputs, 1)
        self.residual, self.gate = stride == 1 and width == outputs, gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.depthwise(self.expand(x)))
        y = self.project(y * y.mean((2, 3), keepdim=True).sigmoid() if self.gate else y)
        return y + x if self.residual else y


@pytest.mark.usefixtures("_ours")
def test_inverted_residuals_run_as_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {choice.CHAIN: 1.0, choice.SEPARATE: 2.0}
    monkeypatch.setattr(choice.Chooser, "_chain_trials", lambda self, chain: Entry(choice.CHAIN, times, 2.0))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, 1, 1, groups=16),
        Inverted(16, 24, 2, nn.ReLU6()),
        Inverted(24, 24, 1, nn.SiLU()),
        Inverted(24, 20, 1, nn.Hardswish(), gate=True),
    ).eval()
    compiled = torch.compile(model, backend="polyconv", dynamic=True, options=QUICK)
    for shape in [(1, 3, 33, 30), (2, 3, 16, 41)]:
        agree(compiled, model, torch.randn(shape))
    layers = str(polyconv.explain(compiled, torch.randn(2, 3, 16, 41)))
    assert layers.count("in a chain of 3 layers") == 6
    assert layers.count("in a chain of 2 layers") == 4


class Separable(nn.Module):
    """Xception's block: depthwise and 1x1 convolutions, added to those of a shortcut, or to one convolution."""

    def __init__(self, width: int, shortcut: str) -> None:
        super().__init__()
        self.main, self.shortcut = self._separable(width), self._separable(width)
        if shortcut == "convolution":
            self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1))

    @staticmethod
    def _separable(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


@pytest.mark.parametrize("shortcut", ["convolution", "separable"])
@pytest.mark.parametrize("seed", range(2))
def test_additions_of_two_convolutions(shortcut: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two layers takes the addition, alone or as the end of a chain."""
    chance = random.Random(seed)

    def any_of(self: Any, layer: Any, able: dict[str, Any]) -> Entry:
        name = chance.choice([choice.ONEDNN, *able])
        return Entry(name, {name: 1.0, choice.ONEDNN: 2.0}, 2.0)

    def chain_or_not(self: Any, chain: Any) -> Entry:
        return Entry(chance.choice([choice.CHAIN, choice.CHAIN, choice.SEPARATE]), {choice.CHAIN: 1.0}, 2.0)

    monkeypatch.setattr(choice.Chooser, "_trials", any_of)
    monkeypatch.setattr(choice.Chooser, "_chain_trials", chain_or_not)
    # Of different widths, because equal layers have one entry.
    parts: list[nn.Module] = []
    for last, width in pairwise((3, 8, 16, 24, 40)):
        parts += [nn.Conv2d(last, width, 1), Separable(width, shortcut)]
    model = nn.Sequential(*parts).eval()
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, torch.randn(1, 3, 9, 11))


def test_a_graph_that_the_pass_cannot_change_is_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, graph: Any) -> None:
        raise IndexError("no such node\nin this graph")

    monkeypatch.setattr(graph_pass.LayerPass, "__call__", fails)
    model = Block(nn.ReLU()).eval()
    with pytest.warns(RuntimeWarning, match="with Inductor alone: .*no such node"):
        agree(torch.compile(model, backend="polyconv", options=QUICK), model, torch.randn(1, 16, 9, 9))


@pytest.mark.usefixtures("_ours")
def test_chains_are_measured(tmp_path: Path) -> None:
    model, x = Inverted(16, 16, 1, nn.ReLU()).eval(), torch.randn(1, 16, 9, 9)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)
    (section,) = load(tmp_path / "tuning.json").sections
    (chain,) = (entry for key, entry in section.entries.items() if key.startswith("chain"))
    assert set(chain["seconds"]) == {choice.CHAIN, choice.SEPARATE}


@pytest.mark.usefixtures("_ours")
def test_a_value_that_is_read_twice_is_not_fused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.relu(y) * y.mean() + (y + 1.0) + torch.sigmoid(self.conv(torch.relu(y)) + y)

    model = Twice().eval()
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, torch.randn(1, 8, 8, 8))


class Branches(nn.Module):
    """1x1 convolutions with residuals. The residual of the first may also be read elsewhere."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(6))
        self.read = read

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d, e, f = self.layers
        first = a(x)
        second = c(b(first.relu() if self.read == "simple operator" else first)) + first
        third = e(d(second)) + second
        others = {"later layer": lambda: [f(first)], "output": lambda: [first], "itself": lambda: [f(third) + third]}
        return third, *others.get(self.read, list)()


@pytest.mark.usefixtures("_ours")
def test_a_residual_that_is_read_no_more_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By generated C++. Tiny weights are not multiplied in place."""
    overwritten: list[bool] = []
    decide = graph_pass._overwrite_residuals

    def noting(graph: torch.fx.Graph) -> None:
        decide(graph)
        calls: Any = graph.find_nodes(op="call_function", target=operator())
        overwritten.extend(overwrites_residual(each.args[LAYER]) for each in calls if each.args[RESIDUAL] is not None)

    tried = choice._candidates
    monkeypatch.setattr(graph_pass, "_overwrite_residuals", noting)
    monkeypatch.setattr(choice, "_candidates", lambda of, _: [one for one in tried(of, _) if "pointwise" in one.name])
    expected = {
        "": [True, True],
        "tiny weights": [True, True],
        "later layer": [False, True],
        "output": [False, True],
        "simple operator": [False, True],
        "itself": [True, True, False],
    }
    for read, found in expected.items():
        overwritten.clear()
        model, x = Branches(read).eval(), torch.randn(2, 16, 9, 7)
        if read == "tiny weights":
            model.layers[2].weight.data *= 1e-30
        compiled = torch.compile(model, backend="polyconv")
        with torch.no_grad():
            wanted = copy.deepcopy(model).double()(x.double())
            for _ in range(2):
                torch.testing.assert_close(compiled(x), wanted, atol=1e-4, rtol=1e-4, check_dtype=False)
        assert overwritten == found, read


@pytest.mark.parametrize("factors", [(2, 2), (3, 1)])
@pytest.mark.usefixtures("_ours")
def test_pixels_are_shuffled_in_channels_last(factors: tuple[int, int]) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows, columns = factors
            self.first, self.last = nn.Conv2d(8, 5 * rows * columns, 3, padding=1), nn.Conv2d(5, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            (n, _, h, w), (rows, columns) = y.shape, factors
            blocks = y.reshape(n, 5, rows, columns, h, w).permute(0, 1, 4, 2, 5, 3)
            return self.last(blocks.reshape(n, 5, h * rows, w * columns))

    model, x = Shuffled().eval(), torch.randn(2, 8, 9, 7)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(compiled, x)
    assert "_polyconv_bias_1" in code
    agree(compiled, model, x)


@pytest.mark.usefixtures("_ours")
def test_a_shuffle_of_images_and_channels_is_no_pixel_shuffle() -> None:
    """Its reshape counts images as channels. The pass then failed, and Inductor compiled alone."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.convolution(x).reshape(1, 2, 2, 2, 8, 8)
            return y.permute(0, 1, 4, 2, 5, 3).reshape(1, 2, 16, 16)

    model, x = Mixed().eval(), torch.randn(2, 4, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)


@pytest.mark.usefixtures("_ours")
def test_pixels_are_shuffled_behind_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {choice.CHAIN: 1.0, choice.SEPARATE: 2.0}
    monkeypatch.setattr(choice.Chooser, "_chain_trials", lambda self, chain: Entry(choice.CHAIN, times, 2.0))
    layers = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 12, 1), nn.PixelShuffle(2)
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 8, 9, 7)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)
    assert "in a chain of 3 layers" in str(polyconv.explain(compiled, x))


@pytest.mark.parametrize("bias", [torch.arange(32.0)[::2], torch.ones(1).expand(16)], ids=["gaps", "expanded"])
@pytest.mark.usefixtures("_ours")
def test_a_bias_may_have_any_stride(bias: Tensor) -> None:
    model, x = nn.Conv2d(16, 16, 3, padding=1).eval(), torch.randn(1, 16, 8, 8)
    model.bias = nn.Parameter(bias, requires_grad=False)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.usefixtures("_ours")
def test_geometry_that_depends_on_symbolic_sizes_is_inductors(training: bool) -> None:
    class Upsampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 4, 3, 2, 1)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.up(x, output_size=skip.shape[2:]) + skip

    model = Upsampled()
    compiled = torch.compile(model, backend="polyconv", dynamic=True, options=QUICK)
    for size in (16, 25):
        x, skip = torch.randn(1, 4, (size + 1) // 2, size // 2 + 2), torch.randn(1, 4, size, size // 2 * 2 + 3)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x, skip), model(x, skip), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_ours")
def test_the_largest_weights_are_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_BYTES", 4 * 8 * 8 * 9)
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 9, 3)).eval(), torch.randn(1, 8, 9, 7)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    with torch.no_grad(), backend.layers_that_run() as seen:
        compiled(x)
    assert len(seen) == 1
    agree(compiled, model, x)


@pytest.mark.usefixtures("_ours")
def test_the_image_that_a_network_reads_is_not_converted() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()).eval(), torch.randn(2, 3, 40, 40)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    with torch.no_grad(), backend.layers_that_run() as seen:
        _, (code, *_) = run_and_get_code(compiled, x)
    assert seen[0].choice.name != choice.ONEDNN
    assert ("compiled_convolution.default([arg" in code) == seen[0].choice.name.endswith("pointwise")
    agree(compiled, model, x)


@pytest.mark.parametrize(("parts", "groups"), [(2, 2), (3, 3), (2, 3)])
@pytest.mark.usefixtures("_ours")
def test_concatenated_channels_are_interleaved(parts: int, groups: int) -> None:
    """As in ShuffleNet. Without a division per element where each group is a concatenated tensor."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(6, 12, 1) for _ in range(parts))
            self.last = nn.Conv2d(6 * parts, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([layer(x).relu() for layer in self.layers], 1)
            n, c, h, w = y.shape
            kept, read = y.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w).chunk(2, 1)
            return torch.cat([kept, self.last(read)], 1)

    model, x = Shuffled().eval(), torch.randn(2, 6, 9, 7)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(compiled, x)
    assert ("c10::div_floor_integer" in code) == (parts != groups)
    agree(compiled, model, x)


class Ghost(nn.Module):
    """GhostNet's block: a layer, a cheap one that reads it, and both outputs concatenated. ``read``: what else reads
    the first one."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.primary, self.cheap = nn.Conv2d(6, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.last, self.other = nn.Conv2d(24, 5, 1), nn.Conv2d(12, 5, 1)
        self.read = read

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        primary = self.primary(x).relu()
        cheap = self.cheap(primary).relu()
        y = torch.cat([cheap, primary] if self.read == "first" else [primary, cheap], 1)
        others = {
            "a later layer": lambda: [self.other(primary)],
            "the output": lambda: [primary],
            "a layer of the last part": lambda: [self.other(cheap)],
            "itself": lambda: [torch.cat([primary, primary], 1)],
        }
        return self.last(y), *others.get(self.read, list)()


@pytest.mark.usefixtures("_ours")
def test_layers_write_their_part_of_a_concatenation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reader of a part may come later than those of the whole, whose memory Inductor then uses again, it is
    copied."""
    in_place: list[int] = []
    write = graph_pass._write_parts_in_place

    def noting(graph: torch.fx.Graph) -> None:
        write(graph)
        calls: Any = graph.find_nodes(op="call_function", target=operator())
        in_place.append(sum(each.args[LAYER][layers.WHOLE] > 0 for each in calls))

    monkeypatch.setattr(graph_pass, "_write_parts_in_place", noting)
    expected = {"": 2, "first": 2, "a layer of the last part": 0, "a later layer": 0, "the output": 0, "itself": 0}
    for read, count in expected.items():
        in_place.clear()
        model, x = Ghost(read).eval(), torch.randn(2, 6, 9, 7)
        wanted = copy.deepcopy(model).double()(x.double())
        for options in ({}, QUICK):
            compiled = torch.compile(model, backend="polyconv", options=options)
            with torch.no_grad():
                for _ in range(2):
                    torch.testing.assert_close(compiled(x), wanted, atol=1e-4, rtol=1e-4, check_dtype=False)
            torch._dynamo.reset()
        assert in_place == [count, count], read


@pytest.mark.usefixtures("_ours")
def test_transposed_convolutions_run_on_packed_weights() -> None:
    """As in a generator: the first one reads a single pixel."""
    model = nn.Sequential(
        *(nn.ConvTranspose2d(20, 18, 4, bias=False), nn.BatchNorm2d(18), nn.ReLU()),
        *(nn.ConvTranspose2d(18, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 3, 2, 1, 1), nn.Tanh()),
    ).eval()
    compiled, x = torch.compile(model, backend="polyconv"), torch.randn(2, 20, 1, 1)
    with torch.no_grad(), backend.layers_that_run() as seen:
        compiled(x)
    assert [each.choice.name for each in seen] == ["direct, pointwise"] * 3
    agree(compiled, model, x)


@pytest.mark.usefixtures("_ours")
def test_constants_behind_transposed_convolutions() -> None:
    """Inductor would multiply the weight of the first one along its input channels, and not compile the other one."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ConvTranspose2d(8, 1, 4, 2, 1)
            self.norm = nn.BatchNorm2d(8)
            for values in (self.norm.running_mean, self.norm.weight, self.norm.bias):
                nn.init.normal_(values)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)).relu()) * 0.5 + 0.5

    model, x = Decoder().eval(), torch.randn(2, 8, 6, 5)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)


@pytest.mark.usefixtures("_ours")
def test_few_phases_of_a_transposed_convolution_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_phase_trials", lambda call: Entry(swap.PHASES, {swap.PHASES: 1.0}, 2.0))

    class Functional(nn.ConvTranspose2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.conv_transpose2d(x, self.weight, self.bias, 2, 1, 0, 1, 1)

    model = nn.Sequential(
        *(nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(3, 1, 7, 3, 2), nn.ReLU()),
        *(nn.ConvTranspose2d(1, 4, 3, 2, 1, 1, bias=False), nn.Tanh(), Functional(4, 3, 4)),
    ).eval()
    compiled, x = torch.compile(model, backend="polyconv", options=QUICK), torch.randn(2, 16, 3, 4)
    with torch.no_grad(), backend.layers_that_run() as seen:
        compiled(x)
    assert [each.choice.name == choice.ONEDNN for each in seen] == [False] * 4
    agree(compiled, model, x)


@pytest.mark.usefixtures("_ours")
def test_a_slice_of_channels_is_a_residual() -> None:
    """It is in channels_last, but not dense, as layers read residuals."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.layer = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            part = self.wide(x)[:, 9:]
            return self.layer(part) + part

    model, x = Sliced().eval(), torch.randn(2, 8, 9, 7)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)


def test_a_computed_weight_is_not_rearranged_for_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be done in every call, and trials take it for done before."""
    monkeypatch.setattr(swap, "_phase_trials", lambda call: pytest.fail("timed"))
    w = torch.randn(16, 3, 4, 4)
    compiled = torch.compile(
        lambda x, s: torch.nn.functional.conv_transpose2d(x, w * s, None, 2, 1), backend="polyconv", options=QUICK
    )
    x, s = torch.randn(2, 16, 3, 4), torch.tensor(2.0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, s), torch.nn.functional.conv_transpose2d(x, w * s, None, 2, 1))


@pytest.mark.parametrize("kernel", [(4, 2, 1, 0), (3, 2, 1, 1), (5, 2, 2, 1), (6, 2, 2, 0), (7, 3, 2, 0), (4, 4, 1, 2)])
def test_convolutions_of_all_phases_agree(kernel: tuple[int, int, int, int]) -> None:
    """Kernel, stride, padding, output padding."""
    taps, *moves = kernel
    x, w, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 5, 6, 4), (5, 1, taps, taps), (1,)))
    stride, padding, extra = ((each, each) for each in moves)
    call = swap._Call(
        TRANSPOSED[2], ((2, 5, 6, 4), tuple(w.shape), (1,)), (False,) * 3, (stride, padding, extra, 1, (1, 1))
    )
    assert call.has_few_phases
    wanted = torch.conv_transpose2d(x, w, bias, stride, padding, extra)
    torch.testing.assert_close(shuffles.by_phases(x, w, bias, stride, padding), wanted)


class Dense(nn.Module):
    """Layers that read all earlier ones: concatenation, batch normalisation and ReLU in front of a 1x1 convolution."""

    def __init__(self, width: int = 16, growth: int = 8) -> None:
        super().__init__()
        counts = [width + i * growth for i in range(3)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in counts)
        self.layers = nn.ModuleList(nn.Conv2d(c, growth, 1) for c in counts)
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 1.5)
            norm.bias.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            seen.append(layer(norm(torch.cat(seen, 1)).relu()))
        return torch.cat(seen, 1)


@pytest.mark.parametrize("options", [QUICK, {}], ids=["Python", "C++"])
@pytest.mark.usefixtures("_ours")
def test_prologues_are_fused(options: dict[str, Any]) -> None:
    model, x = Dense().eval(), torch.randn(2, 16, 9, 11)
    compiled = torch.compile(model, backend=backend.polyconv, options=options)
    with torch.no_grad(), backend.layers_that_run() as seen:
        _, codes = run_and_get_code(compiled, x)
    agree(compiled, model, x)
    assert all(f"of {n} normalised tensors" in str(each) for n, each in zip((1, 2, 3), seen, strict=True))
    assert not any("native_batch_norm" in code for code in codes)


@pytest.mark.usefixtures("_ours")
def test_a_prologue_of_integers_is_not_fused() -> None:
    """Kernels join tensors in float32, and normalisation also converts."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(3, 16, 1)
            self.register_buffer("mean", torch.rand(3, 1, 1))
            self.register_buffer("factor", torch.rand(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.last((x - self.mean) * self.factor)

    model, x = Normalised().eval(), torch.randint(0, 255, (1, 3, 9, 11), dtype=torch.uint8)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)


class Gated(nn.Module):
    """Squeeze-and-excitation in front of a 1x1 convolution with a residual."""

    def __init__(self, width: int = 24, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(width, width, size, padding=size // 2) for size in (3, 1))
        self.squeeze, self.excite = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 1)
        self.gate = nn.Sigmoid() if gate is None else gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        gate = self.gate(self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()))
        return (self.last(y * gate) + x).relu()


@pytest.mark.parametrize("options", [QUICK, {}], ids=["Python", "C++"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("_ours")
def test_gates_are_fused(options: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one image; the factors of several differ."""
    gates: list[bool] = []
    decide = graph_pass._overwrite_residuals

    def noting(graph: torch.fx.Graph) -> None:
        calls: Any = graph.find_nodes(op="call_function", target=operator())
        gates.extend(each.args[NORMALISATION] is not None for each in calls)
        decide(graph)

    monkeypatch.setattr(graph_pass, "_overwrite_residuals", noting)
    model, x = nn.Sequential(Gated(), Gated(gate=nn.Hardswish())).eval(), torch.randn(batch, 24, 13, 11)
    compiled = torch.compile(model, backend=backend.polyconv, options=options)
    agree(compiled, model, x)
    assert gates.count(True) == (2 if batch == 1 else 0)


def test_generated_calls_and_changing_sizes() -> None:
    """With the C++ wrapper, which is the default."""
    model = Block(nn.ReLU()).eval()
    compiled = torch.compile(model, backend="polyconv", dynamic=True)
    for shape in [(1, 16, 8, 8), (3, 16, 8, 8), (2, 16, 12, 9)]:
        agree(compiled, model, torch.randn(shape))
    best = native.instruction_set()
    try:
        native.instruction_set("sse4")
        with torch.no_grad(), pytest.raises(RuntimeError, match="packed for another instruction set"):
            compiled(torch.randn(2, 16, 8, 8))
    finally:
        native.instruction_set(best)


@pytest.mark.usefixtures("_ours")
def test_changed_parameters_are_seen() -> None:
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)
    with torch.no_grad():
        model.first.weight.mul_(2.0)
    agree(compiled, model, x)
    model.load_state_dict(Block(nn.ReLU()).state_dict(), assign=True)
    agree(compiled, model, x)
    model.norms[0].running_mean.add_(1.0)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="called with 4 states"):
        compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model.second.bias.add_(1.0)
        agree(compiled, model, x)


@pytest.mark.parametrize("absent", [None, "not built"])
def test_a_change_of_any_parameter_is_seen(absent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By native code and in Python."""
    if absent is not None:
        monkeypatch.setattr(backend, "why_not_native", lambda: absent)
    elif backend.why_not_native() is not None:
        pytest.skip("the native module was built for another torch")
    constants = [nn.Parameter(torch.randn(3)) if number % 3 else torch.randn(3) for number in range(40)]
    with torch.inference_mode():
        constants.append(torch.randn(3))
    positions = list(range(1, 42))
    for number, changed in enumerate(constants[:-1]):
        holds = backend._unchanged(constants, positions, backend._versions(constants))
        assert isinstance(holds, functools.partial) == (absent is None)
        inputs = (7, *constants, None)
        assert holds(inputs)
        assert not holds((*inputs[: number + 1], torch.randn(3), *inputs[number + 2 :]))
        with torch.no_grad():
            changed.mul_(2)
        assert not holds(inputs)
    for changed in constants[::7] * 10:
        holds = backend._unchanged(constants, positions, backend._versions(constants))
        before, changed.data = changed.data, torch.randn(3)
        assert not holds((7, *constants, None))
        changed.data = before
        del before
        assert holds((7, *constants, None))
        changed.data = torch.randn(3)  # the next memory may have the address of what this frees
        changed.data = torch.randn(3)
        assert not holds((7, *constants, None))
    bank = torch.randn(2, 3)
    constants[0].data = bank[0]
    holds = backend._unchanged(constants[:1], [0], backend._versions(constants[:1]))
    assert holds((constants[0],))
    constants[0].data = bank[1]  # the same memory at another place
    assert not holds((constants[0],))
    if absent is None:
        holds = backend._unchanged(constants[:1], [0], backend._versions(constants[:1]))
        other = constants[0].clone().mul_(2)
        torch.utils.swap_tensors(constants[0], other)
        assert not holds((constants[0],))


class Stream(nn.Module):
    """A convolution over time, which keeps the last steps of its input for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 16, 3)
        self.register_buffer("last", torch.zeros(1, 16, 2, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.last, x], 2)
        self.last.copy_(x[:, :, -2:])
        return self.convolution(x).relu()


@pytest.mark.usefixtures("_ours")
def test_a_buffer_that_a_graph_writes_is_no_constant() -> None:
    model = Stream()
    original = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    with torch.no_grad(), warnings.catch_warnings(), backend.layers_that_run() as layers:
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(5):
            x = torch.randn(1, 16, 5, 10)
            torch.testing.assert_close(compiled(x).double(), original(x.double()), atol=1e-4, rtol=1e-4)
    assert len(layers) == 5
    assert all(layer.choice.candidate is not None for layer in layers)


@pytest.mark.usefixtures("_ours")
def test_threads() -> None:
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)

    def call(_: int) -> Tensor:
        with torch.no_grad():
            return compiled(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(16)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_choices_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    agree(torch.compile(model, backend="polyconv", options=QUICK), model, x)
    (section,) = load(tmp_path / "tuning.json").sections
    assert sum(key.startswith("compiled fprop") for key in section.entries) == 2
    assert all(choice.ONEDNN in entry["seconds"] for entry in section.entries.values())
    torch._dynamo.reset()
    monkeypatch.setattr(choice.Chooser, "_trials", None)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)
    assert "measured earlier, in tuning.json" in str(polyconv.explain(compiled, x))


@pytest.mark.usefixtures("_ours")
def test_outcomes_of_a_graph_that_is_compiled_again_are_kept(tmp_path: Path) -> None:
    model, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 8, 8)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)
    model.load_state_dict(nn.Conv2d(16, 16, 3).state_dict())
    with settings.use(tolerance=1e-3):  # another key in the tuning file
        agree(compiled, model, x)
    (section,) = load(tmp_path / "tuning.json").sections
    assert len(section.entries) == 2


def test_the_more_accurate_of_two_equals_is_chosen() -> None:
    able = {name: CpuCandidate("engine", name, error=error) for name, error in {"F(6,3)": 1e-5, "F(4,3)": 2e-6}.items()}
    for seconds, chosen in ((1.04, "F(4,3)"), (1.1, "F(6,3)")):
        best = {"F(6,3)": 1.0, "F(4,3)": seconds, choice.ONEDNN: 2.0}
        assert choice._most_accurate("F(6,3)", best, able) == chosen
    able["direct"] = CpuCandidate("engine", "direct", error=1e-5, direct=True)
    best = {"F(6,3)": 1.0, "F(4,3)": 1.0, "direct": 1.05, choice.ONEDNN: 2.0}
    assert choice._most_accurate("F(6,3)", best, able) == "direct"


@pytest.mark.usefixtures("_ours")
def test_the_last_layer_is_about_as_accurate_as_direct_summation() -> None:
    """Its errors reach the output as they are; those of layers before it are averaged."""
    first, last = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    model, x = nn.Sequential(first, nn.ReLU(), last, nn.Sigmoid()).eval(), torch.randn(1, 64, 32, 32)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    agree(compiled, model, x)
    with torch.no_grad(), backend.layers_that_run() as layers:
        compiled(x)
    fast, accurate = (layer.choice.candidate.error for layer in layers)
    assert accurate < fast / 4


def test_deterministic_mode_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.Chooser, "_trials", None)
    monkeypatch.setattr(swap, "_trials", None)
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    compiled = torch.compile(model, backend="polyconv", options=QUICK)
    torch.use_deterministic_algorithms(True)
    try:
        agree(compiled, model, x)
        assert "deterministic" in str(polyconv.explain(compiled, x))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_ours")
def test_other_convolutions_run_as_operators() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1)
    ).eval()
    compiled, x = torch.compile(model, backend="polyconv", options=QUICK), torch.randn(2, 4, 32)
    agree(compiled, model, x)
    layers = str(polyconv.explain(compiled, x))
    assert layers.count(f"runs {swap.POLYCONV}") == 2


def test_kernels_of_operators_are_autotuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcomes are kept for later processes, beside the choice that relies on them."""
    preferences.forget_outcomes()
    given: list[str] = []
    trials = swap._trials

    def noted(call: Any) -> Entry:
        with preferences.watched(alone=True) as seen:
            swap._timed(swap.PUBLIC[call.op], call.tensors(training=False, channels_last=False), call.rest, False)()
        given.extend(decision.choice for decision in seen)
        return trials(call)

    monkeypatch.setattr(swap, "_trials", noted)
    monkeypatch.setattr(swap, "_has_kernels", lambda call: True)
    model = nn.Conv1d(16, 24, 5, padding=2).eval()
    compiled, x = torch.compile(model, backend="polyconv", options=QUICK), torch.randn(1, 16, 100)
    agree(compiled, model, x)
    (section,) = load(tmp_path / "tuning.json").sections
    compiled_key, key = sorted(section.entries, key=lambda key: not key.startswith("compiled inference conv1d"))
    assert section.entries[compiled_key]["choice"] in (swap.PYTORCH, swap.POLYCONV)
    assert given == [section.entries[key]["choice"]]


NAMES = swap.PYTORCH, swap.POLYCONV, swap.PYTORCH + swap.LAST, swap.POLYCONV + swap.LAST


def steps(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Times of the trials of every training step, in the order of :data:`NAMES`."""
    entry = Entry(swap.PYTORCH, dict(zip(NAMES, times, strict=False)), min(times))
    monkeypatch.setattr(swap, "_step_trials", lambda call: entry)


@pytest.mark.parametrize(
    ("times", "runs"),
    [
        ((3.0, 1.0, 3.0, 2.0), swap.POLYCONV),
        ((3.0, 2.0, 3.0, 1.0), swap.POLYCONV + swap.LAST),
        ((1.0, 2.0, 3.0, 4.0), swap.PYTORCH),
        ((4.0, 3.0, 1.0, 2.0), swap.PYTORCH + swap.LAST),
        ((1.04, 1.0, 1.05, 1.04), swap.PYTORCH + swap.LAST),  # leads within the margin
        ((2.0, 1.0), swap.POLYCONV),
        ((2e-3, 1.4e-3), swap.POLYCONV),
        ((1e-4, 0.9e-4), swap.PYTORCH),  # cold calls take more than is gained
        ((1e-3, 0.6e-3), swap.POLYCONV),
    ],
)
def test_training(times: tuple[float, ...], runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph runs in the layout that its convolutions are faster in, with the faster operator."""
    steps(monkeypatch, *times)
    given: list[Mapping[str, Any]] = []
    compile_graph = private.compile_graph

    def noted(gm: Any, inputs: Any, options: Mapping[str, Any]) -> Any:
        given.append(options)
        return compile_graph(gm, inputs, options)

    monkeypatch.setattr(private, "compile_graph", noted)
    model, x = Block(nn.ReLU()), torch.randn(2, 16, 8, 8, requires_grad=True)
    twin, z = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    compiled = torch.compile(model, backend="polyconv")
    with backend.layers_that_run() as layers:
        y = compiled(x)
    y.square().sum().backward()
    twin(z).square().sum().backward()
    assert {layer.choice.name for layer in layers} == {runs}
    keeps = len(times) == 4 and not runs.endswith(swap.LAST)
    layout = private.in_layout_of_graph()
    assert [options.items() >= layout.items() for options in given] == [keeps]
    assert y.is_contiguous()
    torch.testing.assert_close(x.grad.double(), z.grad, atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad.stride() == ours.stride()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("transposed", [False, True])
def test_arguments_may_have_names(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions; modules pass all by position."""
    steps(monkeypatch, 2.0, 1.0)
    w, x = torch.randn(4, 8 if transposed else 2, 3, 3, requires_grad=True), torch.randn(2, 4, 12, 12)

    def named(x: Tensor) -> Tensor:
        if transposed:
            return nn.functional.conv_transpose2d(x, weight=w, output_padding=1, stride=(2, 2)).cos()
        return nn.functional.conv2d(input=x, weight=w, groups=2) + torch.conv2d(x, w, groups=2, stride=1)

    compiled = torch.compile(named, backend="polyconv")
    with backend.layers_that_run() as layers:
        y = compiled(x)
    assert {layer.choice.name for layer in layers} == {swap.POLYCONV}
    y.sum().backward()
    gradient, w.grad = w.grad, None
    right = named(x)
    right.sum().backward()
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradient, w.grad, atol=1e-3, rtol=1e-3)


def test_a_view_of_a_result_keeps_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, 3.0, 2.0, 3.0, 1.0)  # polyconv's operator in channels_last is the fastest
    w, x = torch.randn(8, 4, 3, 3, requires_grad=True), torch.randn(2, 4, 12, 12)

    def viewed(x: Tensor) -> Tensor:
        return torch.conv2d(x, w, None, 1, 1).view(2, -1).cos()

    y = torch.compile(viewed, backend="polyconv")(x)
    y.sum().backward()
    torch.testing.assert_close(y, viewed(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_training_under_autocast_and_another_default_dtype(
    default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, 3.0, 1.0, 3.0, 2.0)
    model, x = Block(nn.ReLU()), torch.randn(2, 16, 8, 8)
    torch.set_default_dtype(default)
    try:
        for enabled in (False, True):
            torch._dynamo.reset()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y, right = torch.compile(model, backend="polyconv")(x), model(x)
            assert y.dtype == right.dtype
            y.float().square().sum().backward()
            torch.testing.assert_close(y.float(), right.float(), atol=5e-2 if enabled else 1e-4, rtol=1e-2)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_are_timed_in_the_layouts_that_the_graph_may_have(channels_last: bool) -> None:
    """A channels_last graph stays so; Inductor would move a contiguous one."""
    model, x = nn.Conv2d(8, 8, 3), torch.randn(2, 8, 9, 9)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="polyconv")
    with backend.layers_that_run() as layers:
        compiled(x).sum().backward()
    assert set(layers[0].choice.seconds) == set(NAMES[2:] if channels_last else NAMES)


@pytest.mark.parametrize("channels_last", [False, True])
def test_volumes_are_timed_in_their_own_layout(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Conv3d(4, 4, 3), torch.randn(1, 4, 5, 5, 5)
    if channels_last:
        x = x.to(memory_format=torch.channels_last_3d)
    for constant in ("MARGIN", "COLD_OPERATORS"):
        monkeypatch.setattr(swap, constant, 0.0)  # polyconv's operator runs
    compiled = torch.compile(model, backend="polyconv")
    with backend.layers_that_run() as layers:
        y = compiled(x)
    y.sum().backward()
    assert set(layers[0].choice.seconds) == set(NAMES[2:] if channels_last else NAMES[:2])
    assert layers[0].choice.name.startswith(swap.POLYCONV)
    torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)


def test_without_the_private_names_inductor_compiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "missing", lambda: "torch 9.9 differs")
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    with pytest.warns(RuntimeWarning, match="Inductor alone: torch 9.9 differs"):
        agree(torch.compile(model, backend="polyconv"), model, x)


def test_tensors_elsewhere_are_named() -> None:
    assert backend._why_not_here([torch.empty(1), 3]) is None
    assert backend._why_not_here([torch.empty(1, device="meta")]) == "it has tensors on meta, not on the CPU alone"


def test_what_runs_is_collected_only_inside_of_the_block() -> None:
    with backend.layers_that_run() as layers:
        pass
    assert layers == []


COMPILED_ONCE = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
"""torch's precompiled headers cost more than one package saves."""
_LOAD = """
import sys, torch
from polyconv.inductor import aoti
x, wanted = torch.load(sys.argv[2])
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(x), wanted, atol=1e-4, rtol=1e-4)
"""


@pytest.mark.usefixtures("_ours")
def test_a_package_of_aotinductor_runs_in_a_fresh_process(tmp_path: Path) -> None:
    """Parameters of submodules have names with dots there."""
    layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2))
    model, x = nn.Sequential(layers).eval(), torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs={**aoti.options(), **COMPILED_ONCE}
        )
        torch.save((x, model(x)), tmp_path / "pair.pt")
    subprocess.run([sys.executable, "-c", _LOAD, path, tmp_path / "pair.pt"], check=True)
