"""PyTorch's wrappers that distribute a model: each trains polyconv's convolutions as it trains torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyconv
from fresh import PROCESSES
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)
pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from PyTorch 2.5 on")

STEPS = 9
"""Later the training diverges, and amplifies roundings of bfloat16."""
IMAGES = 8
"""Batch of all ranks together."""
CHANNELS = 16
RATE = 3.0
"""Learning rate: high, so that nine steps make a difference."""


class Net(nn.Module):
    """A layer of each kind, in blocks that can be sharded separately. The last one is never a passthrough."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 5, padding=2)
        self.block = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, (3, 5), padding=(1, 2), bias=False), nn.Tanh())
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        y: Tensor = self.depthwise(self.down(x))
        return y


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(IMAGES, 3, 16, 16, generator=draw), torch.randn(IMAGES, CHANNELS, 8, 8, generator=draw)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Explicit, because in PyTorch 2.13 the gradient of ``mse_loss`` of DTensors is that of each rank's mean."""
    return (y - target).square().mean()


# ---- the wrappers


def shard(model: Net, *, layers: bool = True, afterwards: bool = False, ours: bool = True, **options: Any) -> nn.Module:
    """FSDP2 of each layer, or of the whole model. ``afterwards``: replace convolutions after wrapping."""
    from torch.distributed.fsdp import fully_shard

    if ours and not afterwards:
        assert polyconv.replace(model).count == 4
    for layer in (model.stem, model.block, model.down, model.depthwise) if layers else ():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if ours and afterwards:
        assert polyconv.replace(model).count == 4
    return model


def hybrid(model: Net, *, ours: bool) -> nn.Module:
    """FSDP2 within pairs of ranks, replicated across pairs (HSDP)."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "parts"))
    return shard(model, mesh=mesh, ours=ours)


def checkpointed(model: Net, *, ours: bool) -> nn.Module:
    model.checkpointed = True
    return shard(model, ours=ours)


def in_bfloat16(model: Net, *, ours: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return shard(model, mp_policy=policy, ours=ours)


def replicated(model: Net, *, ours: bool) -> nn.Module:
    """DistributedDataParallel."""
    if ours:
        polyconv.replace(model)
    return nn.parallel.DistributedDataParallel(model)


def flat(model: Net, *, ours: bool) -> nn.Module:
    """FSDP, version 1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if ours:
        polyconv.replace(model)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def of_dtensors(model: Net, *, ours: bool) -> nn.Module:
    """Parameters replicated on every rank, images sharded by batch: no wrapper."""
    from torch.distributed.tensor import distribute_module

    if ours:
        polyconv.replace(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_module(model, mesh)


WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "DistributedDataParallel": replicated,
    "FullyShardedDataParallel": flat,
    "fully_shard, the whole model": lambda model, ours: shard(model, layers=False, ours=ours),
    "fully_shard, layer by layer": shard,
    "fully_shard, weights kept after forward": lambda model, ours: shard(model, reshard_after_forward=False, ours=ours),
    "fully_shard, before replace": lambda model, ours: shard(model, afterwards=True, ours=ours),
    "fully_shard, gradients accumulated": shard,
    "fully_shard, checkpointed": checkpointed,
    "fully_shard, bfloat16": in_bfloat16,
    "fully_shard, on a mesh of two dimensions": hybrid,
    "DTensors": of_dtensors,
}
TESTED = {
    2: [name for name, wrap in WRAPPERS.items() if wrap is not hybrid],
    4: [
        "DistributedDataParallel",
        "fully_shard, layer by layer",
        "fully_shard, on a mesh of two dimensions",
        "DTensors",
    ],
}
"""Wrappers by number of ranks; variants that do not depend on it run with two."""


# ---- one rank


def mine(tensor: Tensor) -> Tensor:
    """This rank's images."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def step_of(name: str, model: nn.Module) -> Tensor:
    """Gradients of one step; returns the loss of this rank's images, or of all."""
    x, target = data()
    if name == "DTensors":
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = next(model.parameters()).device_mesh
        x, target = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, target))
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach().full_tensor()
    x, target = mine(x), mine(target)
    if "accumulated" not in name:
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach()
    losses = []
    for last, part in enumerate(zip(x.chunk(2), target.chunk(2), strict=True)):
        model.set_requires_gradient_sync(bool(last))
        loss = loss_of(model(part[0]), part[1]) / 2
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def evaluate(name: str, model: nn.Module) -> float:
    """The loss without gradients, with the weight cache allowed."""
    with torch.no_grad():
        if name != "DTensors":
            return loss_of(model(mine(data()[0])), mine(data()[1])).item()
        from torch.distributed.tensor import Shard, distribute_tensor

        x = distribute_tensor(data()[0], next(model.parameters()).device_mesh, [Shard(0)])
        return loss_of(model(x).full_tensor(), data()[1]).item()


def curve(name: str, *, ours: bool) -> dict[str, Any]:
    """Results of one rank in a training with one of the wrappers."""
    model = WRAPPERS[name](network(), ours=ours)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, evaluated = [], []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = step_of(name, model)
        if name != "DTensors":
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        optimiser.step()
        losses.append(loss.item())
        evaluated.append(evaluate(name, model))
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1]
    seen: list[str] = []
    last.register_forward_hook(lambda _, __, y: seen.append(y.grad_fn.name()))
    step_of(name, model)
    return {"losses": losses, "evaluated": evaluated, "by": seen[0], "state": state_of(model)}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The full state dict, with the names of the bare model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def round_trip() -> bool:
    """A state dict is loaded from a sharded polyconv model into one of torch's, shard by shard."""
    one, other = shard(network()), shard(network(), ours=False)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(one.state_dict())
    x = data()[0]
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-4)
    return True


def keep_and_change(reshard: bool) -> dict[str, Any]:
    """Evaluate a layer with cached weights between training steps."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    conv = polyconv.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
    fully_shard(conv, reshard_after_forward=reshard)
    optimiser = torch.optim.SGD(conv.parameters(), lr=0.5)
    x = torch.randn(1, CHANNELS, 128, 128)
    backend = backend_for(x.device)
    assert isinstance(backend, CpuBackend)
    kept, errors, frozen = 0, [], ""
    for _ in range(3):
        with torch.no_grad():
            y = conv(x)
            kept += len(backend.weights._kept)
            frozen = str(polyconv.freeze(conv))
            y = conv(x)
            conv.reshard()
            expected = F.conv2d(x, conv.weight.full_tensor(), padding=1)
        errors.append((y - expected).abs().max().item() / expected.abs().max().item())
        conv(x[..., :24, :24]).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return {"kept": kept, "error": max(errors), "frozen": frozen}


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        report: dict[str, Any] = {
            name: {kind: curve(name, ours=kind == "ours") for kind in ("torch's", "ours")} for name in TESTED[world]
        }
        report["round trip"] = round_trip()
        report["kept"] = {reshard: keep_and_change(reshard) for reshard in (True, False)}
        torch.save(report, f"{folder}/report{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def alone() -> list[float]:
    """Losses of one process with all images and torch's convolutions."""
    model, (x, target) = network(), data()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", TESTED)
def test_the_same_loss_curve_as_torchs_convolutions(world: int, tmp_path: Path) -> None:
    mp.start_processes(worker, (world, str(tmp_path)), nprocs=world, start_method=PROCESSES.get_start_method())
    reports = [torch.load(tmp_path / f"report{rank}.pt") for rank in range(world)]
    expected = alone()
    assert expected[-1] < 0.9 * expected[0], "there is something to learn"
    for name in TESTED[world]:
        exact = {"rtol": 2e-2 if "bfloat16" in name else 1e-4, "atol": 0}
        for report in reports:
            theirs, ours = report[name]["torch's"], report[name]["ours"]
            for what in ("losses", "evaluated"):
                torch.testing.assert_close(ours[what], theirs[what], **exact, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(ours["losses"], expected, **exact, msg=lambda m, n=name: f"{n}: {m}")
            assert ours["state"].keys() == theirs["state"].keys()
            assert "bfloat16" in name or ours["by"] != theirs["by"], "polyconv's kernels must have run"
        one = reports[0][name]["ours"]["state"]
        for parameter, value in reports[0][name]["torch's"]["state"].items():
            torch.testing.assert_close(one[parameter], value, rtol=5e-2, atol=5e-3)
    for report in reports:
        assert report["round trip"]
        for kept in report["kept"].values():
            assert kept["kept"] > 0, "transformed weights must have been kept"
            assert kept["error"] < 1e-4, "and be those of the weights as they are"
            assert "FSDP writes to its weight before each call" in kept["frozen"]


# ---- one rank


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_replace_and_restore_keep_the_sharding() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 8, 3)
    )
    for layer in model:
        fully_shard(layer)
    x, names = torch.randn(1, 3, 12, 12), [type(layer).__name__ for layer in model]
    expected = model(x)
    for swap, kind in ((polyconv.replace, polyconv.Conv2d), (polyconv.restore, nn.Conv2d)):
        assert str(swap(model)).endswith("3 of 3 convolutions")
        assert all(isinstance(layer, FSDPModule) and isinstance(layer, kind) for layer in model)
        assert [type(layer).__name__ for layer in model] == names
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(layer, polyconv.Conv2d) for layer in model)


@pytest.mark.usefixtures("_one_rank")
def test_a_weight_that_fsdp_has_just_gathered_is_not_frozen() -> None:
    """It looks like an ordinary weight, but the next call writes to it."""
    from torch.distributed.fsdp import fully_shard

    conv = fully_shard(polyconv.Conv2d(3, 8, 3), reshard_after_forward=False)
    with torch.no_grad():
        conv(torch.randn(1, 3, 12, 12))
    assert type(conv.weight) is nn.Parameter
    done = polyconv.freeze(conv)
    assert done.count == 0
    assert "left alone: (the model itself): FSDP writes to its weight before each call" in str(done)
