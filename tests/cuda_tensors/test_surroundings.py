"""Training environments: autocast and a scaler, checkpointing, DataParallel, pinned memory, torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import polyconv
from fake_cuda import PretendedGpu, counts

from .comparing import assert_near, exact_step, ours, passes, replaced_on, step

X = (2, 3, 8, 9)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_followed(dtype: torch.dtype) -> None:
    model, x = replaced_on("cuda"), torch.randn(X)
    with torch.autocast("cuda", dtype):
        y = model(x.cuda())
    assert y.dtype == dtype
    assert_near({"y": y.float()}, {"y": exact_step(model, x)["y"]}, tolerance=8 * torch.finfo(dtype).eps)


def test_autocast_and_a_scaler() -> None:
    """The scaler multiplies the loss by 1024 and divides the gradients before the step."""
    model, x = replaced_on("cuda"), torch.randn(X)
    exact = exact_step(model, x)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with torch.autocast("cuda"):
        loss = model(x.cuda()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    found = {name: (before[name] - p.detach()) / 0.1 for name, p in model.named_parameters()}
    assert_near(found, {name: exact[name] for name in found}, tolerance=1e-2)


def test_a_step_with_an_infinite_gradient_is_left_out() -> None:
    model, x = replaced_on("cuda"), torch.randn(X)
    x[0, 0, 0, 0] = torch.inf
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    scaler.scale(model(x.cuda()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_passes_of_a_call_under_autocast(dtype: torch.dtype) -> None:
    """Inputs and outputs are rounded to the region's dtype, once each."""
    tensors, gradient = (torch.randn(2, 3, 6, 7), torch.randn(5, 3, 3, 3), torch.randn(5)), torch.randn(2, 5, 4, 5)
    exact = passes(polyconv.conv2d, tuple(tensor.double() for tensor in tensors), gradient.double())
    with torch.autocast("cuda", dtype):
        found = passes(polyconv.conv2d, tuple(tensor.cuda() for tensor in tensors), gradient.to("cuda", dtype))
    assert found.pop("y").dtype == dtype
    del exact["y"]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_near(found, exact, tolerance=8 * torch.finfo(dtype).eps)


# ---- checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(gpu: PretendedGpu, use_reentrant: bool) -> None:
    """The forward pass runs again in backward; all gradients are unchanged."""
    model, x = replaced_on("cuda"), torch.randn(X)
    found = step(model, x.cuda())
    plain = len(ours(gpu))
    gpu.launches.clear()
    again = step(model, x.cuda(), lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    assert len(ours(gpu)) > plain
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert_near(found, exact_step(model, x))


# ---- a profiler


def test_profiled() -> None:
    """A profiled call goes through the dispatcher, visible to the profiler, with the same results."""
    model, x = replaced_on("cuda"), torch.randn(X)
    plain = step(model, x.cuda())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = step(model, x.cuda())
    names = {event.key for event in profile.key_averages()}
    assert {f"polyconv::conv2d_{kind}" for kind in ("fprop", "dgrad", "wgrad")} <= names
    assert all(torch.equal(plain[name], found[name]) for name in plain)


# ---- several devices


def test_data_parallel(gpu: PretendedGpu) -> None:
    """Half of the batch per device and thread; gradients are summed on the first."""
    model, x = replaced_on("cuda:0"), torch.randn(X)
    found = step(model, x.cuda(), nn.DataParallel(model, [0, 1]))
    assert {launch.device for launch in ours(gpu)} == {0, 1}
    assert_near(found, exact_step(model, x))


# ---- pinned memory


def test_pinned_memory() -> None:
    model, x = replaced_on("cuda"), torch.randn(X)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    with torch.no_grad():
        model(x.cuda())
        waited = counts().synchronisations
        y = model(pinned.to("cuda", non_blocking=True))
        assert counts().synchronisations == waited, "the host waited for the GPU"
    assert_near({"y": y}, {"y": exact_step(model, x)["y"]})


def test_a_loader_that_pins() -> None:
    model, images = replaced_on("cuda"), torch.randn(4, *X[1:])
    exact = exact_step(model, images)["y"]
    loader = DataLoader(TensorDataset(images), batch_size=2, pin_memory=True)
    with torch.no_grad():
        found = torch.cat([model(batch.to("cuda", non_blocking=True)).cpu() for (batch,) in loader])
    assert_near({"y": found}, {"y": exact})


# ---- torch.compile


@pytest.fixture
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(gpu: PretendedGpu, backend: str) -> None:
    """As far as it works here: one graph, forward and backward, on CUDA tensors. Triton's code cannot run."""
    model, x = replaced_on("cuda"), torch.randn(X)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_near(step(model, x.cuda(), compiled), exact_step(model, x))
    assert ours(gpu)
    larger = torch.randn(3, 3, 10, 7)
    assert_near(step(model, larger.cuda(), compiled), exact_step(model, larger))
