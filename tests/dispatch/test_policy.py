"""``policy`` of ``replace`` and ``enable``: which passes run polyconv's kernels, in every surrounding.

CPU tensors on a backend that plans for an A100, and computes by PyTorch what kernels would.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv
from polyconv.backend import Run, override
from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.aten import AtenPlan, chosen
from polyconv.dispatch import prepare
from polyconv.lowering import aten
from polyconv.problem import Problem
from polyconv.runtime import warn_once
from polyconv.selection import Preference
from polyconv.tuning_key import Environment


class Planner:
    """Stands for a GPU: records the passes of its kernels and of PyTorch's convolution."""

    name = "cuda"
    caches_weights = False

    def __init__(self, gpu: str) -> None:
        self.device = DEVICES[gpu]
        self.ours: list[str] = []
        self.atens: list[str] = []
        self.dtypes: set[str] = set()
        """Of all problems that ran."""

    def plan(self, problem: Problem, *, prefer: Preference | None = None, **_: Any) -> Any:
        return chosen(problem, self.device, prefer=prefer)

    def prepare(self, plan: Any, *, trial: bool = False) -> Run:
        seen = self.atens if isinstance(plan, AtenPlan) else self.ours

        def run(tensors: MutableMapping[str, Tensor]) -> None:
            seen.append(str(plan.problem.kind))
            self.dtypes.add(plan.problem.dtype)
            aten.run(plan.problem, tensors)

        return run

    def environment(self) -> Environment:
        return Environment("cuda", self.device.name, "", "")

    def new_output(self, like: Tensor, shape: Any, strides: Any) -> Tensor:
        return like.new_empty_strided(shape, strides)


@pytest.fixture
def gpu() -> Iterator[Planner]:
    with override("cpu", Planner("a100")) as found:
        yield found


def dense() -> nn.Conv2d:
    """All passes are PyTorch's."""
    return nn.Conv2d(64, 64, 1)


def depthwise() -> nn.Conv2d:
    """All passes are polyconv's."""
    return nn.Conv2d(64, 64, 5, padding=2, groups=64)


def mixed() -> nn.Conv2d:
    """The weight gradient is PyTorch's, the others are polyconv's."""
    return nn.Conv2d(32, 64, (5, 9), padding=(2, 4))


SIZES = {dense: (8, 64, 40, 40), depthwise: (8, 64, 56, 56), mixed: (1, 32, 160, 160)}
OURS = {dense: [], depthwise: ["dgrad", "fprop", "wgrad"], mixed: ["dgrad", "fprop"]}


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *module.parameters()])]


def assert_equal(found: list[Tensor], exact: list[Tensor]) -> None:
    for one, other in zip(found, exact, strict=True):
        assert (one - other).abs().max() <= 1e-3 * other.abs().max()


@pytest.mark.parametrize("layer", SIZES)
@pytest.mark.parametrize("swap", ["replace", "enable", "own", "enable own", "written"])
def test_every_pass_is_decided(gpu: Planner, layer: Any, swap: str) -> None:
    torch.manual_seed(0)
    module, x = layer(), torch.randn(SIZES[layer])
    with override("cpu", Planner("v100")):
        exact = step(module, x)
    if swap in ("replace", "own"):
        polyconv.replace(module, policy="auto" if swap == "replace" else "own")
    if swap == "written":
        ours = polyconv.Conv2d(*_arguments(module))
        ours.load_state_dict(module.state_dict())
        module = ours
    if swap.startswith("enable"):
        with polyconv.enable("own" if "own" in swap else "auto"):
            found = step(module, x)
    else:
        found = step(module, x)
        step(module, x)  # the passthrough cache gives the same
    assert_equal(found, exact)
    wanted = OURS[layer] if swap in ("replace", "enable") else OURS[depthwise]
    assert sorted(set(gpu.ours)) == wanted


def _arguments(conv: nn.Conv2d) -> tuple[Any, ...]:
    moves = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return conv.in_channels, conv.out_channels, *moves, conv.groups


def test_a_dense_layer_is_a_passthrough(gpu: Planner) -> None:
    """Its derivative is PyTorch's, too: no backend is called."""
    module = dense()
    polyconv.replace(module)
    y = module(torch.randn(SIZES[dense]))
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    assert not gpu.ours
    assert not gpu.atens


def test_the_flags_are_followed(gpu: Planner) -> None:
    """In float32 the weight gradient of a long kernel is polyconv's. The flags may change between two calls."""
    module, x = mixed(), torch.randn(SIZES[mixed])
    polyconv.replace(module)
    for allowed in (True, False, True):
        gpu.ours.clear()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            step(module, x)
        assert ("wgrad" in gpu.ours) is not allowed
    with polyconv.enable():
        gpu.ours.clear()
        module = mixed()
        for allowed in (True, False):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
                step(module, x)
            assert ("wgrad" in gpu.ours) is not allowed


@pytest.mark.parametrize("layer", SIZES)
def test_half_precision_is_compared_in_half_precision(gpu: Planner, layer: Any) -> None:
    """No layer is widened to float32. PyTorch's weight gradient is the expected winner in bfloat16."""
    module, x = layer().bfloat16(), torch.randn(SIZES[layer], dtype=torch.bfloat16)
    polyconv.replace(module)
    y = module(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert "wgrad" not in gpu.ours
    assert gpu.dtypes <= {"bfloat16"}


def test_the_operators_decide_in_compiled_graphs_too(gpu: Planner) -> None:
    module, x = nn.Sequential(dense(), depthwise()), torch.randn(SIZES[dense])
    polyconv.replace(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_equal(step(compiled, x), step(module, x))
    gpu.ours.clear()
    gpu.atens.clear()
    step(compiled, x)
    assert sorted(gpu.ours) == sorted(gpu.atens) == ["dgrad", "fprop", "wgrad"]


def test_a_transposed_layer(gpu: Planner) -> None:
    torch.manual_seed(0)
    layers = nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.ConvTranspose2d(32, 64, 3, stride=5, dilation=2)
    for module, ours in zip(layers, (False, True), strict=True):
        x = torch.randn(4, module.in_channels, 40, 40)
        exact = step(module, x)
        gpu.ours.clear()
        polyconv.replace(module)
        assert_equal(step(module, x), exact)
        assert ("dgrad" in gpu.ours) is ours


def test_autotuning_times_pytorchs_too(gpu: Planner) -> None:
    module, x = depthwise(), torch.randn(2, 64, 8, 8)
    polyconv.replace(module)
    with torch.no_grad(), polyconv.benchmark():
        for _ in range(4):
            module(x)
    assert {"fprop"} == set(gpu.ours) == set(gpu.atens)
    polyconv.autotune.preferences.forget_outcomes()


def test_it_stays_with_the_module(gpu: Planner) -> None:
    """In copies and pickles, until it is restored. Replacing again changes it."""
    module, x = dense(), torch.randn(SIZES[dense])
    polyconv.replace(module)
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        one(x)
    assert not gpu.ours
    assert polyconv.replace(module, policy="own").count == 0
    module(x)
    assert gpu.ours == ["fprop"]
    polyconv.restore(module)
    assert "policy" not in vars(module)


def test_explain_shows_both_estimates() -> None:
    module = nn.Sequential(dense(), depthwise())
    polyconv.replace(module)
    text = str(polyconv.explain(module, SIZES[depthwise], device="h100"))
    assert text.count("runs PyTorch's convolution on H100, in TF32") == 3
    assert text.count("is not ahead by 1.3: modelled") == 3
    assert text.count("is ahead by 1.3: modelled") == 3
    assert "PyTorch" not in str(polyconv.explain(polyconv.Conv2d(64, 64, 1), SIZES[dense], device="h100"))


def test_a_wrong_policy_is_named() -> None:
    for call in (lambda: polyconv.replace(dense(), policy="fast"), lambda: polyconv.enable("fast")):  # type: ignore
        with pytest.raises(ValueError, match=r'policy must be "auto" .* or "own" .*; got \'fast\''):
            call()


@pytest.mark.parametrize(
    ("name", "allowed", "layer", "layer_class"),
    [
        ("h100", True, dense, "1x1 layers"),
        ("h100", True, depthwise, ""),
        ("h100", False, dense, ""),
        ("v100", True, dense, ""),
    ],
)
def test_a_warning_names_the_class_of_layers_where_tf32_is_faster(
    name: str, allowed: bool, layer: Any, layer_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warn_once, "_said", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: DEVICES[name])
    with (
        override("cpu", Planner(name)) as gpu,
        torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        module = layer()
        problem = Problem.make(
            "fprop", SIZES[layer], tuple(module.weight.shape), padding=(*module.padding,) * 2, groups=module.groups
        )
        for _ in range(2):
            prepare.tell_if_behind(problem, torch.device("cpu"))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == bool(layer_class)
    assert all(layer_class in text and gpu.device.name in text and "TF32" in text for text in messages)
