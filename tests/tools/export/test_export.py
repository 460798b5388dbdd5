"""Texts of exported files: imports, readability, nothing unused."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import kernelbench_rules
from exported_files import EVERY, V100, any_convolution, check_format, text_of, with_activation
from nightly import nightly, sampled
from polyconv.cuda.planner import DEVICES
from polyconv.tools.export import convolution_model, exported_file, named_model
from polyconv.tools.export.partial_eval.scanning import definitions, name_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_example_is_current() -> None:
    written = (ROOT / "examples" / "model.py").read_text()
    assert written == text_of("kb80"), "write it again: polyconv export kb80 -o examples/model.py"


@pytest.mark.parametrize("name", EVERY)
def test_imports_nothing_but_torch_and_the_standard_library(name: str) -> None:
    tree = ast.parse(text_of(name), feature_version=(3, 8))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add((node.module or "").partition(".")[0])
    assert roots <= {*sys.stdlib_module_names, "torch"}
    own = {layer.attribute for layer in named_model(name).layers}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} - own
    computing = "conv2d_forward _conv_forward convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    assert not called & {*computing.split(), "cudnn", "functional"}


def test_takes_short_names() -> None:
    assert named_model("W1") == named_model("kb80")


MOST_LINES = {"kb80": 1915, "kb82": 650}


@pytest.mark.parametrize("name", MOST_LINES)
def test_is_short(name: str) -> None:
    assert len(text_of(name).splitlines()) <= MOST_LINES[name]


@pytest.mark.parametrize(("device", "mma"), [pytest.param("v100", 884, marks=nightly), ("a100", 16816)])
def test_tensor_cores_replace_other_kernels(device: str, mma: int) -> None:
    """Of the GPU that a file is for. They are the default but for a V100, whose instruction no other GPU has."""
    options = {"tensor_cores": True} if device == "v100" else {}
    text = exported_file(named_model("kb80"), DEVICES[device], **options)
    (source,) = cuda_texts(text)
    assert not unused(source)
    assert f"Mma{mma}" in text
    assert "winograd_nonfused" not in text
    assert text.count("on_tensor_cores(") == 3, "its definition and two calls"
    assert len(text.splitlines()) <= 2210
    assert ("#if __CUDA_ARCH__ >= 800" in text) == (device == "a100")
    assert not kernelbench_rules.found(text, kernelbench_rules.REFUSED | kernelbench_rules.WARNED)


def test_is_half_as_short_without_gradients() -> None:
    text = exported_file(named_model("kb80"), V100, forward_only=True)
    assert len(text.splitlines()) <= 1090
    assert not re.search(r"weight_gradient|input_gradient|kGradientH|winograd_wgrad|direct_weights", text)


@pytest.mark.parametrize("name", ["kb80", "kb82", "kb86"])
def test_has_a_map(name: str) -> None:
    """A line for each part of the file, with the number of the part's first line."""
    lines = text_of(name).splitlines()
    listed = {int(number): part for number, part in re.findall(r"^ +(\d+)  (\S.*)$", text_of(name), re.MULTILINE)}
    starts = {at for at, line in enumerate(lines, 1) if re.match(r"// ---- |class |\w+_DIRECT = |def _compiled", line)}
    launches = {at for at, part in listed.items() if part == "launches of these kernels"}
    assert listed.keys() == starts | launches
    assert all(lines[at - 1].startswith("static ") for at in launches)
    assert all(part.split()[0] in lines[at - 1] for at, part in listed.items() if "/" in part.split()[0])


@pytest.mark.parametrize("name", EVERY)
def test_is_formatted(name: str, tmp_path: Path) -> None:
    check_format(text_of(name), tmp_path / "model.py")


# ---- nothing unused


def cuda_texts(text: str) -> list[str]:
    """The CUDA texts of a file that are compiled together, with the callers of their functions."""
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            exec(compile(ast.Module([node], []), "<exported>", "exec"), values)
    sources = [value for value in values.values() if isinstance(value, tuple)]
    return [direct + planned + "\n".join(calls.values()) for direct, planned, _, calls, *_ in sources]


def unused(text: str) -> list[str]:
    """Names that are defined and appear nowhere else: functions, types, constants, members, methods."""
    code = re.sub(r"//.*", "", text)
    names = {name for name in map(name_of, definitions(code)) if name is not None}
    for declared in re.findall(r"\bconstexpr \w+ ([^;]*);", code):
        names |= set(re.findall(r"\b(k[A-Z]\w*)(?:\[\])? = ", declared))
    for struct in re.findall(r"^struct \w+[^;]*?\{\n(.*?)^\};", code, re.MULTILINE | re.DOTALL):
        names |= set(re.findall(r"^  (?:static )?(?:__device__|DEVICE)[^;{(]* (\w+)\(", struct, re.MULTILINE))
        names |= set(
            re.findall(r"\b(\w+)(?=[,;])", "\n".join(re.findall(r"^  (?:const )?\w+\*? [\w*, ]+;", struct, re.M)))
        )
    return sorted(name for name in names if len(re.findall(rf"\b{name}\b", code)) < 2)


@pytest.mark.parametrize("name", EVERY)
def test_defines_nothing_that_it_does_not_use(name: str) -> None:
    for text in cuda_texts(text_of(name)):
        assert not unused(text)


def test_finds_what_is_unused() -> None:
    text = """\
constexpr int kUsed = 3, kUnused = 4;
struct F45 {
  static constexpr int kM = 4, kSpan = 5;
  static __device__ __forceinline__ void input(const float* x, float* y) {
  }
  static __device__ __forceinline__ void spread(const float* x, float* y) {
  }
};
struct Params {
  const float* x;
  int rows, columns;
};
// helper is what it is called
__device__ __forceinline__ int helper(int i) {
  return i;
}
__global__ void kernel(const Params p) {
  F45::input(p.x, p.x + kUsed * p.rows * F45::kM);
}
static const char* launch(const Call& c) {
  kernel<<<1, 1>>>(p);
}
launch(*call)
"""
    assert unused(text) == ["columns", "helper", "kSpan", "kUnused", "spread"]


def test_passes_may_use_different_algorithms() -> None:
    """Along H and W: their tables then fit both, and what is otherwise fixed is a parameter."""
    text = exported_file(convolution_model((1, 4, 24, 96), in_channels=4, out_channels=128, kernel_size=9), V100)
    assert "separable<F23, F45, 32, 4, 2, 1>(*call, kForward)" in text
    assert "separable<F45, F23, 64, 2, 4, 2>(exchanged(*call), kGradient)" in text
    assert "kMaxParts = 4;" in text
    assert "f.outputs_w = " in text


@pytest.mark.parametrize(
    ("name", "activation", "options"),
    [
        ("kb80", "gelu", {}),
        ("kb80", "hardswish", {"forward_only": True}),
        ("kb82", "leaky_relu(0.2)", {}),
        ("kb54", "relu6", {}),
    ],
)
def test_an_activation_is_written(name: str, activation: str, options: dict[str, Any], tmp_path: Path) -> None:
    text = exported_file(with_activation(named_model(name), activation), V100, **options)
    check_format(text, tmp_path / "model.py")
    for source in cuda_texts(text):
        assert not unused(source)
        assert not re.search(r"EpilogueOf|residual|finished\(p,", source)
        assert ("activates" in source) != ("forward_only" in options)
    assert "torch.ops.aten" in text or "forward_only" in options


@pytest.mark.parametrize("seed", sampled(range(25), 8, "any convolution"))
def test_any_convolution_is_written(seed: int) -> None:
    shape, arguments = any_convolution(seed)
    text = exported_file(convolution_model(shape, **arguments), V100)
    ast.parse(text, feature_version=(3, 8))
    assert [line for line in text.splitlines() if len(line) > 120] == []
    for source in cuda_texts(text):
        assert not unused(source)
        for opening, closing in ("()", "{}", "[]"):
            assert source.count(opening) == source.count(closing)
        assert not re.search(r"\bp\.\w+\.quotient\(\)|;;|\(\)\s*\?|static_assert", source)
