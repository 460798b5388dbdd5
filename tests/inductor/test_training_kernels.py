"""Kernels in place of polyconv's operators in the graphs of a training step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import polyconv
from polyconv import settings
from polyconv.autotune import preferences
from polyconv.cpu import native
from polyconv.dispatch.op import FORWARD
from polyconv.inductor import private, swap
from polyconv.inductor.training import kernel_calls
from polyconv.selection import Preference

pytestmark = [
    pytest.mark.usefixtures("_fresh"),
    pytest.mark.skipif(private.missing() is not None or not native.is_available(), reason="needs Inductor"),
]

Geometry = tuple[int, int, int, int]
"""Stride, padding, dilation and groups."""
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Geometry]] = {
    "square": ((2, 16, 14, 13), (24, 16, 3, 3), (1, 1, 1, 1)),
    "strided": ((2, 16, 14, 13), (24, 16, 3, 3), (2, 1, 1, 1)),
    "dilated": ((2, 8, 14, 13), (16, 8, 3, 3), (1, 2, 2, 1)),
    "single": ((2, 16, 9, 9), (24, 16, 1, 1), (1, 0, 1, 1)),
    "grouped": ((2, 16, 9, 9), (32, 8, 3, 3), (1, 1, 1, 2)),
    "depthwise": ((2, 16, 14, 13), (16, 1, 3, 3), (2, 1, 1, 16)),
    "wide depthwise": ((1, 32, 20, 20), (32, 1, 11, 11), (1, 5, 1, 32)),
}
ENGINES = ("tile lanes", "channel lanes", "pointwise", "depthwise", "in segments", "ATen")
OPERATORS = {"polyconv::conv2d_fprop", "polyconv::conv2d_dgrad", "polyconv::conv2d_wgrad"}


@pytest.fixture
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polyconv's operator runs, in the layout of the graph."""
    for constant in ("MARGIN", "COLD", "COLD_OPERATORS"):
        monkeypatch.setattr(swap, constant, 0.0)


def prefer(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the first candidate whose name has this text, where there is one."""
    plan = preferences.plan

    def preferred(backend: Any, problem: Any, **how: Any) -> Any:
        found = plan(backend, problem, **how)
        able = [each.name for each in found.candidates if each.cost is not None and engine in each.name]
        return backend.plan(problem, prefer=Preference(able[0])) if able else found

    monkeypatch.setattr(preferences, "plan", preferred)


def operators(gm: GraphModule) -> list[str]:
    return [node.target.name() for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def traced(leaves: list[Tensor], wanted: list[bool], geometry: Geometry) -> GraphModule:
    """The graph of a training step that returns the output and the wanted gradients of input, weight and bias."""

    def step(*tensors: Tensor) -> list[Tensor]:
        asked = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
        for tensor in asked:
            tensor.requires_grad_()
        with torch.enable_grad():
            y = polyconv.conv2d(*tensors, *geometry)
            return [y, *torch.autograd.grad(y, asked, torch.cos(y.detach()))]

    return make_fx(step, tracing_mode="fake")(*leaves)


ALL = "input weight bias"
CASES = [
    *((engine, False, ALL) for engine in ENGINES),
    ("channel lanes", True, "input"),
    ("depthwise", True, "weight bias"),
    *((engine, True, ALL) for engine in ("pointwise", "in segments")),
    *(("ATen", True, wanted) for wanted in ("input", "weight bias")),
]


@pytest.mark.parametrize(("engine", "channels_last", "wanted"), CASES)
def test_every_engine(engine: str, channels_last: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(engine, monkeypatch)
    ran = set()
    for x_shape, w_shape, geometry in LAYERS.values():
        generator = torch.Generator().manual_seed(0)
        x, w, bias = (torch.randn(shape, generator=generator) for shape in (x_shape, w_shape, w_shape[:1]))
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        flags = [name in wanted for name in ("input", "weight", "bias")]
        gm = traced([x, w, bias], flags, geometry)
        layout = [value.stride() for value in gm(x, w, bias)]
        kernel_calls.call_kernels(gm.graph)
        gm.recompile()
        gm.graph.lint()
        assert OPERATORS.isdisjoint(operators(gm))
        ran.update(operators(gm))
        results = gm(x, w, bias)
        exact = [value.double().requires_grad_() for value in (x, w, bias)]
        y = nn.functional.conv2d(*exact, *geometry)
        asked = [value for value, flag in zip(exact, flags, strict=True) if flag]
        gradients = torch.autograd.grad(y, asked, torch.cos(y.detach()))
        for ours, theirs, strides in zip(results, [y, *gradients], layout, strict=True):
            if engine != "ATen":
                assert ours.stride() == strides
            torch.testing.assert_close(ours.double(), theirs, atol=2e-3, rtol=2e-3)
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.convolution_backward.default:
                assert node.args[-1] == flags
    if engine == "ATen":
        assert {"aten::convolution", "aten::convolution_backward"} <= ran
    elif engine in ("channel lanes", "depthwise"):
        assert {"polyconv_cpu::planned_fprop", "polyconv_cpu::planned_gradients"} <= ran


def test_gradients_of_a_layer_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer("channel lanes", monkeypatch)
    x_shape, w_shape, geometry = LAYERS["square"]
    gm = traced([torch.randn(shape) for shape in (x_shape, w_shape, w_shape[:1])], [True] * 3, geometry)
    kernel_calls.call_kernels(gm.graph)
    assert [name for name in operators(gm) if "polyconv" in name] == [
        "polyconv_cpu::planned_fprop",
        "polyconv_cpu::planned_gradients",
    ]


@pytest.mark.parametrize("needs_grad", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("engine", ["lanes", "ATen"])
def test_what_is_timed_is_the_step(engine: str, needs_grad: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(engine, monkeypatch)
    x_shape, w_shape, (stride, padding, dilation, groups) = LAYERS["square"]
    rest = tuple((each, each) for each in (stride, padding, dilation))
    call = swap._Call(FORWARD[2], (x_shape, w_shape, w_shape[:1]), needs_grad, (*rest, groups))
    assert call.calls_kernels
    steps = dict(swap._steps(call))
    assert len(steps) == 4
    tensors = call.tensors(training=True, channels_last=False)
    y = nn.functional.conv2d(*tensors, stride, padding)
    leaves = [each for each in tensors if each.requires_grad]
    wanted = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for step in steps.values():
        result, gradients = step()
        for ours, theirs in zip((result, *gradients), (y, *wanted), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


class Block(nn.Module):
    """Layers whose inputs Inductor computes again in the backward graph, between the gradients of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.norm, self.deep = nn.BatchNorm2d(24), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.last = nn.Conv2d(24, 8, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.second(self.first(x).relu())).relu()
        return self.last(self.deep(y).sigmoid())


def agree(compiled: Any, model: nn.Module, x: Tensor) -> None:
    """Compare outputs and gradients of a training step."""
    twin, z = copy.deepcopy(model).double(), x.double().requires_grad_()
    x = x.clone().requires_grad_()
    model.zero_grad()
    twin.zero_grad()
    y, exact = compiled(x), twin(z)
    y.square().sum().backward()
    exact.square().sum().backward()
    torch.testing.assert_close(y.double(), exact, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(x.grad.double(), z.grad, atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-2, rtol=1e-3)


@pytest.mark.usefixtures("_ours")
@pytest.mark.parametrize("engine", ["lanes", "pointwise"])
def test_a_compiled_step(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(engine, monkeypatch)
    model, x = Block(), torch.randn(2, 3, 16, 16)
    if engine == "pointwise":
        model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    compiled = torch.compile(model, backend="polyconv")
    _, codes = run_and_get_code(agree, compiled, model, x)
    forward, backward = codes
    assert forward.count("planned_fprop.default(") > 2
    assert backward.count("planned_gradients.default(") > 2
    assert "polyconv.conv2d" not in forward + backward
    agree(compiled, model, x)


@pytest.mark.usefixtures("_ours")
def test_operators_stay_where_sizes_may_change() -> None:
    model = nn.Conv2d(4, 8, 3, padding=1)
    compiled = torch.compile(model, backend="polyconv", dynamic=True)
    _, codes = run_and_get_code(agree, compiled, model, torch.randn(2, 4, 9, 9))
    assert "polyconv.conv2d_fprop" in codes[0]
    agree(compiled, model, torch.randn(3, 4, 12, 12))


CHANGES: tuple[dict[str, Any], ...] = {"tolerance": 0.0}, {"instruction_set": "sse4"}, {"profile": None}


@pytest.mark.usefixtures("_ours")
@pytest.mark.parametrize("training", [False, True])
def test_a_graph_is_compiled_again_after_a_change_of_settings(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 9, 9)
    compiled = torch.compile(model, backend="polyconv", options={"cpp_wrapper": False})
    graphs: list[Any] = []
    compile_graph = private.compile_graph

    def noted(*given: Any) -> Any:
        graphs.append(given)
        return compile_graph(*given)

    def run(count: int) -> None:
        for _ in range(2):
            with torch.set_grad_enabled(training):
                y = compiled(x)
            if training:
                y.sum().backward()
            torch.testing.assert_close(y.double(), exact, atol=1e-3, rtol=1e-3)
        assert len(graphs) == count

    monkeypatch.setattr(private, "compile_graph", noted)
    exact = copy.deepcopy(model).double()(x.double())
    run(1)
    for count, change in enumerate(CHANGES, 2):
        with settings.use(**change), preferences.watched() as seen:
            run(count)
            wanted = change.get("tolerance", settings.current().tolerance)
            assert {decision.problem.tolerance for decision in seen} <= {wanted}
        run(count)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run(2 + len(CHANGES))
    finally:
        torch.set_num_threads(threads)
    run(2 + len(CHANGES))


def test_candidates_that_are_timed_in_turn_stay_with_the_operator() -> None:
    preferences.forget_outcomes()
    x_shape, w_shape, geometry = LAYERS["square"]
    gm = traced([torch.randn(shape) for shape in (x_shape, w_shape, w_shape[:1])], [True] * 3, geometry)
    with settings.use(benchmark=True):
        kernel_calls.call_kernels(gm.graph)
    assert set(operators(gm)) >= OPERATORS
