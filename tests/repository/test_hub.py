"""``tools/hub``: a build for the Hugging Face hub that the ``kernels`` library loads, beside the installed package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyconv
from polyconv.cpu import native

kernels: Any = pytest.importorskip("kernels")
if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
NAMES = "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"
TRAINING = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "polyconv"
    subprocess.run([sys.executable, ROOT / "tools" / "hub", "--output", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def variant(repository: Path) -> Path:
    (found,) = (repository / "build").iterdir()
    return found


@pytest.fixture(scope="module")
def kernel(repository: Path) -> Any:
    return kernels.get_local_kernel(repository)


@pytest.fixture
def mapped(repository: Path) -> Iterator[None]:
    """torch's modules are mapped to the layers of the repository."""
    classes = [getattr(nn, name) for name in NAMES]
    layers = {name: {"cpu": kernels.LocalLayerRepository(repository, layer_name=name)} for name in NAMES}
    for each in classes:
        kernels.replace_kernel_forward_from_hub(each, each.__name__, lambda module: type(module) in classes)
    with kernels.use_kernel_mapping(layers, inherit_mapping=False):
        yield
    for each in classes:
        del each.kernel_layer_name, each.kernel_condition


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    rank = int(name[-2])
    return getattr(nn, name)(8, 16, 3, padding=1, stride=2), torch.randn(2, 8, *(9, 12, 7)[:rank], requires_grad=True)


def test_metadata_and_digest(variant: Path) -> None:
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "polyconv"
    assert metadata.python_depends == []
    metadata.digest.validate(type(metadata.digest).hash_variant(metadata.digest.algorithm, variant))


def test_imports_are_relative_or_allowed(variant: Path) -> None:
    """Only the standard library and torch; and optional packages, inside functions."""
    for file in variant.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert not {name.partition(".")[0] for name in names} & {"polyconv", "cuda", "numpy"}, file


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("name", NAMES)
def test_kernelize(name: str, kernel: Any) -> None:
    model, x = case(name)
    expected = model(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *model.parameters()])
    kernels.kernelize(model, mode=TRAINING, device="cpu", use_fallback=False)
    assert model.forward.__func__ is getattr(kernel.layers, name).forward
    with torch.profiler.profile() as profile:
        found = model(x)
        gradients = torch.autograd.grad(found.square().sum(), [x, *model.parameters()])
    for one, other in zip([found, *gradients], [expected, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert not any(event.key.startswith("polyconv") for event in profile.key_averages())


@pytest.mark.usefixtures("mapped")
def test_output_size() -> None:
    model, x = case("ConvTranspose2d")
    expected = model(x, [18, 24])
    kernels.kernelize(model, mode=TRAINING, device="cpu")
    torch.testing.assert_close(model(x, [18, 24]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("mapped")
def test_compiles_to_one_graph_of_the_builds_operators(kernel: Any) -> None:
    model, x = case("Conv2d")
    expected = model(x)
    kernels.kernelize(model, mode=TRAINING, device="cpu")
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
    assert f"{kernel.__name__}.conv2d_fprop.default" in seen


def test_native_kernels_run_beside_the_installed_package(kernel: Any) -> None:
    """Both have operators, in namespaces of their own, and the build's are its own library."""
    x, w = torch.randn(1, 8, 32, 32, dtype=torch.float64), torch.randn(8, 8, 3, 3, dtype=torch.float64)
    with torch.profiler.profile() as profile:
        y = kernel.conv2d(x, w)
    torch.testing.assert_close(y, polyconv.conv2d(x, w))
    assert any(event.key.startswith(f"{kernel.__name__}::") for event in profile.key_averages())
    assert getattr(torch.ops, kernel.__name__).facts() == torch.ops.polyconv_cpu.facts()


def test_the_example_of_the_documentation(repository: Path) -> None:
    program = [sys.executable, ROOT / "examples" / "kernelize.py", repository]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert float(printed.removeprefix("largest difference ")) < 1e-3
