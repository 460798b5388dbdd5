"""torch.export and AOTInductor: programs with polyconv's operator, saved to files for other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import polyconv
from commands import python
from nightly import nightly
from polyconv import dispatch


@dataclass(frozen=True)
class Kind:
    """torch or polyconv, and the number of axes."""

    package: Any
    axes: int = 2

    @property
    def ours(self) -> bool:
        return bool(self.package is polyconv)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Shapes of three inputs."""
        extents = ((2, 8, 9, 8), (3, 9, 11, 10), (5, 30, 7, 9))
        return [(batch, 3, *sides[: self.axes]) for batch, *sides in extents]

    @property
    def any_size(self) -> tuple[dict[int, Any]]:
        return (dict.fromkeys((0, *range(2, 2 + self.axes)), Dim.DYNAMIC),)

    def __str__(self) -> str:
        return f"{'polyconv' if self.ours else 'torch'}, {self.axes} axes"


BOTH = [Kind(nn), Kind(polyconv)]
both = pytest.mark.parametrize("kind", BOTH, ids=str)
every = pytest.mark.parametrize("kind", [*BOTH, Kind(polyconv, 1), Kind(polyconv, 3)], ids=str)


def network(kind: Kind) -> nn.Sequential:
    conv = getattr(kind.package, f"Conv{kind.axes}d")
    normalise = getattr(nn, f"BatchNorm{kind.axes}d")
    torch.manual_seed(1)
    return nn.Sequential(
        conv(3, 8, 3, padding=2, padding_mode="reflect"), normalise(8), nn.ReLU(), conv(8, 4, 3, stride=2)
    ).eval()


def calls(program: Any, op: Any) -> int:
    return sum(node.target is op for node in program.graph.nodes)


@every
@pytest.mark.parametrize("strict", [False, True])
def test_fixed_sizes(kind: Kind, strict: bool) -> None:
    model, x = network(kind), torch.randn(kind.sizes[0])
    program = export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), model(x))
    if kind.ours:
        assert calls(program, dispatch.fprop) == 2


@every
@pytest.mark.parametrize("strict", [False, True])
def test_any_size(kind: Kind, strict: bool) -> None:
    """Constraints on sizes are torch's: kernel and padding fit."""
    model = network(kind)
    program = export(model, (torch.randn(kind.sizes[0]),), dynamic_shapes=kind.any_size, strict=strict)
    for size in kind.sizes:
        x = torch.randn(size)
        torch.testing.assert_close(program.module()(x), model(x))
    ranges = sorted((int(bounds.lower), str(bounds.upper)) for bounds in program.range_constraints.values())
    assert ranges == [(2, "int_oo"), *[(3, "int_oo")] * kind.axes]


@every
def test_named_sizes_with_bounds(kind: Kind) -> None:
    model = network(kind)
    sides = {2 + axis: Dim(f"side{axis}", min=4, max=512) for axis in range(kind.axes)}
    sizes = ({0: Dim("batch", min=1, max=64), **sides},)
    program = export(model, (torch.randn(kind.sizes[0]),), dynamic_shapes=sizes)
    for size in [*kind.sizes, (1, *kind.sizes[1][1:])]:
        x = torch.randn(size)
        torch.testing.assert_close(program.module()(x), model(x))


@every
def test_saved_and_loaded(kind: Kind, tmp_path: Path) -> None:
    model = network(kind)
    program = export(model, (torch.randn(kind.sizes[0]),), dynamic_shapes=kind.any_size)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for size in kind.sizes:
        x = torch.randn(size)
        torch.testing.assert_close(loaded.module()(x), model(x))
    if kind.ours:
        assert calls(loaded, dispatch.fprop) == 2
        assert calls(loaded.run_decompositions(), dispatch.fprop) == 2


@every
def test_exported_for_training(kind: Kind) -> None:
    """The exported program's gradients equal the model's."""
    model, x = network(kind), torch.randn(kind.sizes[0])
    module = export(model, (x,), dynamic_shapes=kind.any_size).module()
    module(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert expected.keys() == {name for name, _ in module.named_parameters()}
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])


@every
def test_a_shape_that_does_not_fit_is_refused_when_the_program_runs(kind: Kind) -> None:
    program = export(network(kind), (torch.randn(kind.sizes[0]),), dynamic_shapes=kind.any_size)
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(torch.randn(2, 3, *(2 for _ in range(kind.axes))))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions_of_any_size(axes: int, tmp_path: Path) -> None:
    """They run an input gradient, whose size follows from the program's input."""
    kind = Kind(polyconv, axes)
    model = getattr(polyconv, f"ConvTranspose{axes}d")(3, 4, 4, stride=2, padding=1, output_padding=1).eval()
    program = export(model, (torch.randn(kind.sizes[0]),), dynamic_shapes=kind.any_size)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert calls(loaded, dispatch.dgrad) == 1
    for size in kind.sizes:
        x = torch.randn(size)
        torch.testing.assert_close(loaded.module()(x), model(x))


def test_a_tolerance_of_its_own_is_exported_and_an_open_one_stays_open() -> None:
    x = torch.randn(Kind(polyconv).sizes[0])

    def exported(conv: nn.Module) -> Any:
        (node,) = [node for node in export(conv, (x,)).graph.nodes if node.target is dispatch.fprop]
        return node.args[8] if len(node.args) > 8 else None

    assert exported(polyconv.Conv2d(3, 4, 3)) is None
    assert exported(polyconv.Conv2d(3, 4, 3, tolerance=1e-5)) == 1e-5
    with polyconv.tolerance(1e-6):
        assert exported(polyconv.Conv2d(3, 4, 3)) == 1e-6


IN_A_FRESH_PROCESS = """
import sys, torch, polyconv
torch.set_num_threads(1)
folder = sys.argv[1]
program = torch.export.load(folder + "/program.pt2")
package = torch._inductor.aoti_load_package(folder + "/package.pt2")
for x, y in torch.load(folder + "/examples.pt", weights_only=True):
    torch.testing.assert_close(program.module()(x), y)
    torch.testing.assert_close(package(x), y, rtol=1e-4, atol=1e-5)
print("agrees")
"""


COMPILED_ONCE = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
"""torch's precompiled headers cost more than one package saves, and the wrapper's speed does not matter here."""


@pytest.mark.parametrize("kind", [Kind(polyconv), pytest.param(Kind(nn), marks=nightly)], ids=str)
def test_an_ahead_of_time_package_in_a_fresh_process(kind: Kind, tmp_path: Path) -> None:
    """Compiled once for any size; the loading process has neither the model nor the compiler."""
    model = network(kind)
    program = export(model, (torch.randn(kind.sizes[0]),), dynamic_shapes=kind.any_size)
    torch.export.save(program, tmp_path / "program.pt2")
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "package.pt2"), inductor_configs=COMPILED_ONCE
    )
    package = torch._inductor.aoti_load_package(path)
    examples = []
    with torch.no_grad():
        for size in kind.sizes:
            x = torch.randn(size)
            examples.append((x, model(x)))
            torch.testing.assert_close(package(x), examples[-1][1], rtol=1e-4, atol=1e-5)
    torch.save(examples, tmp_path / "examples.pt")
    assert python(IN_A_FRESH_PROCESS, str(tmp_path)) == "agrees\n"
