"""DTensors as operator arguments: sharded by batch, each rank computes its own images; otherwise they are gathered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv
from commands import python
from entered import entered
from fresh import PROCESSES
from polyconv.runtime import warn_once
from polyconv.tools.optimize.optimizer import _convolutions

tensor = pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from PyTorch 2.5 on")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import implicit_replication  # noqa: E402

BY_BATCH, WHOLE, SUMMANDS = (Shard(0),), (Replicate(),), (Partial(),)
GEOMETRY: dict[str, Any] = {"padding": 1, "groups": 2}


def tensors(batch: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    sizes = {"x": (batch, 8, 12, 10), "w": (6, 4, 3, 3), "bias": (6,), "residual": (batch, 6, 12, 10)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def torchs(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, w, bias, **GEOMETRY) + residual)


def polyconvs(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return polyconv.conv2d(x, w, bias, **GEOMETRY, residual=residual, activation="relu")


def gradients(y: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), leaves)


# ---- several ranks

PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "batch": (Shard(0), Replicate(), Replicate(), Shard(0)),
    "batch, and a whole residual": (Shard(0), Replicate(), Replicate(), Replicate()),
    "whole": (Replicate(), Replicate(), Replicate(), Replicate()),
    "channels": (Shard(1), Replicate(), Replicate(), Shard(1)),
    "width": (Shard(3), Replicate(), Replicate(), Shard(3)),
    "weights": (Shard(0), Shard(0), Shard(0), Shard(0)),
}
"""Placements of x, weight, bias and residual."""


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        for batch in (3, 1):  # ranks with fewer images, or none
            plain = [each.requires_grad_() for each in tensors(batch).values()]
            expected = torchs(*plain)
            for placements in PLACEMENTS.values():
                pairs = zip(tensors(batch).values(), placements, strict=True)
                leaves = [distribute_tensor(each, mesh, [place]).requires_grad_() for each, place in pairs]
                y = polyconvs(*leaves)
                torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-4)
                for mine, theirs in zip(gradients(y, leaves), gradients(torchs(*plain), plain), strict=True):
                    torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-3, atol=1e-3)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_the_parts_make_the_whole(tmp_path: Path) -> None:
    """Raises a rank's exception."""
    mp.start_processes(worker, (2, str(tmp_path)), nprocs=2, start_method=PROCESSES.get_start_method())


# ---- one rank: placements and messages


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def spread(mesh: DeviceMesh, *placements: Placement) -> list[DTensor]:
    pairs = zip(tensors(2).values(), placements, strict=True)
    return [distribute_tensor(each, mesh, [place]).requires_grad_() for each, place in pairs]


def test_what_has_a_batch_stays_sharded_and_sums_are_left_to_autograd(mesh: DeviceMesh) -> None:
    leaves = spread(mesh, *PLACEMENTS["batch"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = polyconvs(*leaves)
        dx, dw, db, dr = torch.autograd.grad(y, leaves, distribute_tensor(torch.ones(y.shape), mesh, [Shard(0)]))
    assert y.placements == dx.placements == dr.placements == BY_BATCH
    assert dw.placements == db.placements == SUMMANDS
    assert (y.shape, dx.shape, dw.shape) == (dr.shape, leaves[0].shape, leaves[1].shape)


def test_what_is_whole_stays_whole(mesh: DeviceMesh) -> None:
    leaves = spread(mesh, *PLACEMENTS["whole"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = polyconvs(*leaves)
        found = gradients(y, leaves)
    assert all(each.placements == WHOLE for each in (y, *found))


@pytest.mark.parametrize(
    ("how", "name", "given"), [("channels", "input", "1"), ("width", "residual", "3"), ("weights", "weight", "0")]
)
def test_what_is_gathered_is_said(how: str, name: str, given: str, mesh: DeviceMesh) -> None:
    warn_once._said.clear()
    leaves = spread(mesh, *PLACEMENTS[how])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            polyconvs(*leaves)
    words = [str(each.message) for each in said if f"its {name}, a DTensor" in str(each.message)]
    assert len(words) == 1
    assert f"Shard(dim={given})" in words[0]
    assert "over its batch alone" in words[0]


def test_layouts_are_those_of_plain_tensors(mesh: DeviceMesh) -> None:
    x, w, *_ = tensors(2).values()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    expected = polyconv.conv2d(x, w, **GEOMETRY)
    spread_x = DTensor.from_local(x.detach(), mesh, [Shard(0)]).requires_grad_()
    y = polyconv.conv2d(spread_x, distribute_tensor(w, mesh, [Replicate()]), **GEOMETRY)
    assert y.stride() == y.to_local().stride() == expected.stride()
    (dx,) = gradients(y, [spread_x])
    assert dx.stride() == dx.to_local().stride() == x.stride()


def test_plain_tensors_beside_them_are_refused_as_torch_does(mesh: DeviceMesh) -> None:
    x, w, *_ = spread(mesh, *PLACEMENTS["batch"])
    with pytest.raises(RuntimeError, match=r"as its weight, a plain tensor. Distribute that one, too"):
        polyconv.conv2d(x, w.to_local(), **GEOMETRY)
    with pytest.raises(RuntimeError, match=r"as its input, a plain tensor"), torch.inference_mode():
        polyconv.conv2d(x.to_local(), w, **GEOMETRY)
    with implicit_replication():
        assert polyconv.conv2d(x, w.to_local(), **GEOMETRY).placements == BY_BATCH
        assert polyconv.conv2d(x.to_local(), w, **GEOMETRY).placements == WHOLE


def test_two_meshes_are_refused(mesh: DeviceMesh) -> None:
    x, *_ = spread(mesh, *PLACEMENTS["batch"])
    square = init_device_mesh("cpu", (1, 1))
    with pytest.raises(RuntimeError, match=r"DTensors of two meshes: .* and, as its weight, "):
        polyconv.conv2d(x, distribute_tensor(tensors(2)["w"], square, [Replicate(), Replicate()]), **GEOMETRY)


def test_shapes_that_do_not_fit_are_named_as_the_caller_knows_them(mesh: DeviceMesh) -> None:
    x, w, *_ = spread(mesh, *PLACEMENTS["batch"])
    with pytest.raises(RuntimeError, match=r"expected an input with 4 channels, but got 8"):
        polyconv.conv2d(x, w)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, mesh: DeviceMesh) -> None:
    x, w, bias, residual = spread(mesh, *PLACEMENTS["batch"])
    with mode():
        y = polyconvs(x, w, bias, residual)
        torch.testing.assert_close(y.to_local(), torchs(*tensors(2).values()), rtol=1e-4, atol=1e-4)


def test_double_backward(mesh: DeviceMesh) -> None:
    plain = [each.requires_grad_() for each in list(tensors(2).values())[:2]]
    leaves = spread(mesh, *PLACEMENTS["batch"])[:2]
    found = []
    for x, w in (plain, leaves):
        (dx,) = torch.autograd.grad(polyconv.conv2d(x, w, **GEOMETRY).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, w]))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-2)


def test_modules_of_dtensors_and_compiled_ones(mesh: DeviceMesh) -> None:
    conv = distribute_module(polyconv.Conv2d(8, 6, 3), mesh)
    x = distribute_tensor(tensors(2)["x"], mesh, [Shard(0)])
    y = torch.compile(conv, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    torch.testing.assert_close(y.to_local(), conv(x).to_local())
    assert conv.weight.grad.placements == SUMMANDS
    assert "its weight is a DTensor" in str(polyconv.freeze(conv))


def test_plain_calls_enter_nothing_of_it(mesh: DeviceMesh) -> None:
    conv, x = polyconv.Conv2d(16, 16, 3, groups=16), torch.randn(1, 16, 24, 24)
    conv(x)
    assert not [name for name in entered(lambda: conv(x)) if "dtensor" in name]


def test_who_has_no_dtensors_imports_nothing_of_them() -> None:
    program = (
        "import sys, torch, polyconv\n"
        "conv = polyconv.Conv2d(3, 4, 3)\n"
        "conv(torch.randn(1, 3, 8, 8, requires_grad=True)).sum().backward()\n"
        "with torch.autograd.forward_ad.dual_level():\n"  # through the operators
        "    conv(torch.randn(1, 3, 8, 8))\n"
        "polyconv.restore(conv), polyconv.replace(conv), polyconv.freeze(conv)\n"
        "rules = 'polyconv.dispatch.transforms.dtensor'\n"
        "print([name for name in ('torch.distributed.tensor', rules) if name in sys.modules])\n"
    )
    assert python(program).strip() == "[]"


# ---- tensor parallelism


def test_a_module_that_is_split_otherwise_is_left_alone(mesh: DeviceMesh) -> None:
    def split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    distribute_module(model[0], mesh, split)
    distribute_module(model[1], mesh)
    done = polyconv.replace(model)
    assert done.count == 1
    assert done.left_alone["0"].startswith("its weight is a DTensor with the placements (Shard(dim=0),)")
    replicated = distribute_module(nn.Sequential(nn.Conv2d(4, 4, 3)), mesh)
    assert _convolutions(model[:1]) == ({}, done.left_alone)
    assert "spread over ranks" in _convolutions(replicated)[1]["0"]


def test_torchs_tensor_parallel_styles_do_not_take_convolutions(mesh: DeviceMesh) -> None:
    """So `replace` needs no rule for them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for kind in (nn.Conv2d, polyconv.Conv2d):
        for style in (ColwiseParallel(), RowwiseParallel()):
            with pytest.raises(NotImplementedError, match=r"only support nn\.Linear and nn\.Embedding"):
                parallelize_module(nn.Sequential(kind(3, 4, 3)), mesh, {"0": style})
