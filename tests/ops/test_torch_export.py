"""torch.export and AOTInductor: programs that carry the operator, in files, for other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import polyconv
from polyconv import ops

both = pytest.mark.parametrize("Conv2d", [nn.Conv2d, polyconv.Conv2d], ids=["torch", "polyconv"])
Kind = type[nn.Conv2d]

SIZES = [(2, 3, 8, 9), (3, 3, 9, 11), (5, 3, 30, 7)]
ANY_SIZE = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},)


def network(Conv2d: Kind) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        Conv2d(3, 8, 3, padding=2, padding_mode="reflect"), nn.BatchNorm2d(8), nn.ReLU(), Conv2d(8, 4, 3, stride=2)
    ).eval()


def calls(program: Any, op: Any) -> int:
    return sum(node.target is op for node in program.graph.nodes)


@both
@pytest.mark.parametrize("strict", [False, True])
def test_fixed_sizes(Conv2d: Kind, strict: bool) -> None:
    model, x = network(Conv2d), torch.randn(SIZES[0])
    program = export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), model(x))
    if Conv2d is polyconv.Conv2d:
        assert calls(program, ops.fprop) == 2


@both
@pytest.mark.parametrize("strict", [False, True])
def test_any_size(Conv2d: Kind, strict: bool) -> None:
    """What is asked of the sizes is what torch asks: that the kernel and the padding fit."""
    model = network(Conv2d)
    program = export(model, (torch.randn(SIZES[0]),), dynamic_shapes=ANY_SIZE, strict=strict)
    for size in SIZES:
        x = torch.randn(size)
        torch.testing.assert_close(program.module()(x), model(x))
    ranges = sorted((int(bounds.lower), str(bounds.upper)) for bounds in program.range_constraints.values())
    assert ranges == [(2, "int_oo"), (3, "int_oo"), (3, "int_oo")]


@both
def test_named_sizes_with_bounds(Conv2d: Kind) -> None:
    model = network(Conv2d)
    sizes = ({0: Dim("batch", min=1, max=64), 2: Dim("height", min=8, max=512), 3: Dim("width", min=4, max=512)},)
    program = export(model, (torch.randn(SIZES[0]),), dynamic_shapes=sizes)
    for size in [*SIZES, (1, 3, 64, 65)]:
        x = torch.randn(size)
        torch.testing.assert_close(program.module()(x), model(x))


@both
def test_saved_and_loaded(Conv2d: Kind, tmp_path: Path) -> None:
    model = network(Conv2d)
    program = export(model, (torch.randn(SIZES[0]),), dynamic_shapes=ANY_SIZE)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for size in SIZES:
        x = torch.randn(size)
        torch.testing.assert_close(loaded.module()(x), model(x))
    if Conv2d is polyconv.Conv2d:
        assert calls(loaded, ops.fprop) == 2
        assert calls(loaded.run_decompositions(), ops.fprop) == 2


@both
def test_exported_for_training(Conv2d: Kind) -> None:
    """The program has gradients, and they are the model's."""
    model, x = network(Conv2d), torch.randn(SIZES[0])
    module = export(model, (x,), dynamic_shapes=ANY_SIZE).module()
    module(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert expected.keys() == {name for name, _ in module.named_parameters()}
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])


@both
def test_a_shape_that_does_not_fit_is_refused_when_the_program_runs(Conv2d: Kind) -> None:
    program = export(network(Conv2d), (torch.randn(SIZES[0]),), dynamic_shapes=ANY_SIZE)
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(torch.randn(2, 3, 2, 2))


def test_a_tolerance_of_its_own_is_exported_and_an_open_one_stays_open() -> None:
    x = torch.randn(SIZES[0])

    def exported(conv: nn.Module) -> Any:
        (node,) = [node for node in export(conv, (x,)).graph.nodes if node.target is ops.fprop]
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


@both
def test_an_ahead_of_time_package_in_a_fresh_process(Conv2d: Kind, tmp_path: Path) -> None:
    """Compiled once for any size; the process that loads it has seen neither the model nor the compiler."""
    model = network(Conv2d)
    program = export(model, (torch.randn(SIZES[0]),), dynamic_shapes=ANY_SIZE)
    torch.export.save(program, tmp_path / "program.pt2")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    package = torch._inductor.aoti_load_package(path)
    examples = []
    with torch.no_grad():
        for size in SIZES:
            x = torch.randn(size)
            examples.append((x, model(x)))
            torch.testing.assert_close(package(x), examples[-1][1], rtol=1e-4, atol=1e-5)
    torch.save(examples, tmp_path / "examples.pt")
    environ = {**os.environ, "PYTHONPATH": str(Path(polyconv.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "agrees\n", ran.stderr
