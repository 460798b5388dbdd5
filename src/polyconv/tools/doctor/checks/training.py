"""Training: losses equal to PyTorch's; deterministic mode, autocast, several GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from ....model.replace import replace
from ....util import tf32
from ..check import Result, failed, judged, passed
from ..device_under_test import GpuUnderTest
from .layer import ALLOWED, ALLOWED_IN_HALF, Layer, deviation

STEPS = 20
DIFFERENCE = 1e-3
"""Allowed relative difference from PyTorch's loss. Rounding errors grow from step to step."""


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.beside = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.beside(x))


def network(width: int) -> nn.Sequential:
    """Small ResNet with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1),
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


def batch(images: int, size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(images, 3, size, size, generator=random), torch.randint(10, (images,), generator=random)


def losses(model: nn.Module, x: Tensor, labels: Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def _sizes(subject: GpuUnderTest) -> tuple[int, int, int]:
    """Channels, batch and image size of the training."""
    return (4, 2, 6) if subject.quick else (64, 8, 32)


def like_torch(subject: GpuUnderTest) -> Result:
    """Compare the losses of some steps with those of PyTorch's convolutions, TF32 off."""
    return _trained(subject, nn.Sequential, len(subject.some(range(STEPS), 3)))


def data_parallel(subject: GpuUnderTest) -> Result:
    return _trained(subject, nn.DataParallel, 3)


def _trained(subject: GpuUnderTest, wrap: Callable[[nn.Module], nn.Module], steps: int) -> Result:
    width, images, size = _sizes(subject)
    x, labels = (tensor.to(subject.device) for tensor in batch(images, size))
    expected, ours = (network(width).to(subject.device) for _ in range(2))
    replace(ours, policy="own")
    with tf32.switched_off():
        by_torch = losses(wrap(expected), x, labels, steps)
        with subject.at_work():
            return _compared(losses(wrap(ours), x, labels, steps), by_torch)


def _compared(ours: list[float], torchs: list[float]) -> Result:
    apart = max(abs(one - other) / other for one, other in zip(ours, torchs, strict=True))
    words = f"losses of {len(ours)} steps differ from PyTorch's by up to {apart:.1e}"
    if not apart <= DIFFERENCE:
        return failed(f"{words}, allowed {DIFFERENCE:.0e}", difference=apart, ours=ours, torch=torchs)
    return passed(words, difference=apart, last_loss=ours[-1])


def deterministic(subject: GpuUnderTest) -> Result:
    layer = Layer.make()
    torch.use_deterministic_algorithms(True)
    try:
        with subject.at_work():
            runs = [layer.on(subject.device).run() for _ in range(2)]
            subject.wait()
    finally:
        torch.use_deterministic_algorithms(False)
    differing = [name for name, value in runs[0].items() if not torch.equal(value, runs[1][name])]
    return failed(f"two runs differ in {', '.join(differing)}") if differing else layer.judge(runs[0])


def autocast(subject: GpuUnderTest) -> Result:
    """A step under autocast with a scaled loss: finite gradients, no skipped step, sums in float32."""
    layer = Layer.make()
    placed = layer.on(subject.device)
    module = nn.Conv2d(16, 24, 3, padding=1).to(subject.device)
    with torch.no_grad():
        module.weight.copy_(placed.w)
        module.weight.mul_(0.1)
    model = nn.Sequential(module)
    replace(model, policy="own")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(subject.device.type, init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with subject.at_work():
        with torch.autocast(subject.device.type, dtype=torch.float16):
            y = model(placed.x.half())
            loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        subject.wait()
    with torch.no_grad():
        exact = nn.functional.conv2d(placed.x.half().cpu().double(), before[0].cpu().double(), None, padding=1)
        exact += before[1].cpu().double()[:, None, None]
    if all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)):
        return failed("the scaled step was left out: a gradient was not finite")
    return judged(deviation(y, exact), ALLOWED if y.dtype is torch.float32 else ALLOWED_IN_HALF)


def two_ranks(subject: GpuUnderTest) -> Result:
    """Two processes under DistributedDataParallel: both must have equal losses, close to PyTorch's."""
    width, images, size = _sizes(subject)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, subject.device.type == "cuda", width, images, size), nprocs=2)
        (ours, torchs), (others, _) = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in (0, 1))
    if ours != others:
        return failed(f"the ranks' weights drift apart: losses {ours} and {others}")
    return _compared(ours, torchs)


def _rank(rank: int, folder: str, on_gpu: bool, width: int, images: int, size: int) -> None:
    """One of two ranks. Both train on the same images, so different losses mean different weights."""
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store, backend = f"file://{folder}/store", "nccl" if on_gpu else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    x, labels = (tensor.to(device) for tensor in batch(images, size))
    found = []
    with tf32.switched_off():
        for replaced in (True, False):
            model = network(width).to(device)
            if replaced:
                replace(model, policy="own")
            parallel = nn.parallel.DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
            found.append(losses(parallel, x, labels, 3))
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
