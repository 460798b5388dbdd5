"""Exported files under KernelBench's rules: accepted without a warning, loaded in three ways, built when loaded."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

import kernelbench_rules
from exported_files import EVERY, Builds, original_of, text_of, weights

# ---- the rules themselves


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("    try:", "a fallback"),
        ("except ValueError:", "a fallback"),
        ('"""All taps except the last."""', "a fallback"),
        ("        pass", "a body that does nothing"),
        ('"""The backward pass."""', "a body that does nothing"),
        ("time.perf_counter = lambda: 0", "a clock that is replaced"),
        ("torch.cuda.Event.record = nothing", "a clock that is replaced"),
        ("import threading", "threads and processes"),
        ("from concurrent.futures import ThreadPoolExecutor", "threads and processes"),
        ("class Lazy(torch.Tensor):", "a tensor that is none"),
    ],
)
def test_what_is_refused(line: str, rule: str) -> None:
    (reason,) = {reason.partition(":")[0] for reason in kernelbench_rules.found(line, kernelbench_rules.REFUSED)}
    assert reason == rule


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("self.conv2d = torch.nn.Conv2d(3, 4, 5)", "a layer of torch"),
        ("from torch.nn.modules.utils import _pair", "a layer of torch"),
        ("y = torch.conv2d(x, w)", "an operation of torch"),
        ("y = F.conv2d(x, w)", "an operation of torch"),
        ("s = torch.cuda.Stream()", "a stream"),
        ("x.record_stream(s)", "a stream"),
        ("h = __float2half(x);", "half precision"),
        ("x = x.half()", "half precision"),
    ],
)
def test_what_is_warned_about(line: str, rule: str) -> None:
    assert not kernelbench_rules.found(line, kernelbench_rules.REFUSED)
    assert [reason.partition(":")[0] for reason in kernelbench_rules.found(line, kernelbench_rules.WARNED)] == [rule]


@pytest.mark.parametrize(
    "line",
    [
        "# the backward pass, except the last",
        "  // one pass over the tile",
        "passes passed bypass a_pass",
        "try { launch(); } catch (...) {}",
        "import torch.nn as nn",
        "class ModelNew(torch.nn.Module):",
        "self.weight = torch.nn.Parameter(w)",
        "self.conv2d = nn.Conv2d(3, 4, 5)",
        "at::cuda::getCurrentCUDAStream()",
        "half_gemm(x); y.half_rows(3)",
        "F(4,5) and F(2,3)",
    ],
)
def test_what_is_no_matter(line: str) -> None:
    assert not kernelbench_rules.found(line, kernelbench_rules.REFUSED | kernelbench_rules.WARNED)


def test_comments_do_not_count_as_kernels() -> None:
    assert kernelbench_rules.missing("# __global__ void kernel();  load_inline") == ["a kernel", "a build by torch"]
    assert not kernelbench_rules.missing("__global__ void kernel(); load_inline(name)")


# ---- exported files


@pytest.mark.parametrize("name", EVERY)
def test_is_accepted_without_a_warning(name: str) -> None:
    text = text_of(name)
    assert not kernelbench_rules.found(text, kernelbench_rules.REFUSED)
    assert not kernelbench_rules.found(text, kernelbench_rules.WARNED)
    assert not kernelbench_rules.missing(text)


@pytest.mark.parametrize("load", kernelbench_rules.LOADERS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("name", EVERY)
def test_is_loaded_and_built_by_every_loader(name: str, load: kernelbench_rules.Loader, builds: Builds) -> None:
    """Loading builds; constructing the exported model builds nothing more."""
    problem = {variable: object() for variable in kernelbench_rules.VARIABLES}
    context = load(text_of(name), dict(problem))
    built = list(builds)
    assert built
    model = context["ModelNew"](*context["get_init_inputs"]())
    assert callable(model.forward)
    assert builds == built
    changed = [variable for variable, value in problem.items() if context[variable] is not value]
    assert not changed, "the problem's own functions read these afterwards"


@pytest.mark.parametrize("name", ["kb80", "kb82", "kb86"])
def test_is_built_where_output_is_captured(name: str, builds: Builds) -> None:
    """Precompiling collects the output: the streams have no file behind them."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        kernelbench_rules.executed_with_folder(text_of(name), {})
    assert builds


@pytest.mark.parametrize("name", EVERY)
def test_weights_are_those_of_the_seed(name: str, builds: Builds) -> None:
    """The original and the submitted model are each constructed right after the same seed."""
    torch.manual_seed(42)
    before = torch.get_rng_state()
    context = kernelbench_rules.executed(text_of(name), {})
    assert torch.equal(torch.get_rng_state(), before), "loading draws random numbers"
    arguments = context["get_init_inputs"]()
    with torch.no_grad():
        models = []
        for _ in range(2):
            torch.manual_seed(42)
            models.append(context["ModelNew"](*arguments).state_dict())
        torch.manual_seed(42)
        originals = [original_of(weight) for weight in weights(models[0])]
    for first, second in zip(models[0].values(), models[1].values(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(weights(models[0])[0], originals[0].weight)
