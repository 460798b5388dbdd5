"""The tables of docs/performance.md on PyTorch's convolution on GPUs: layers and whole networks.

    python benchmarks/gpu/tf32.py

polyconv's times are those of its cost model, PyTorch's those expected by ``polyconv.cuda.planner.aten``. The limit is
what PyTorch cannot beat in TF32: the multiplications of a direct convolution at the full rate of the tensor cores, or
the memory traffic, whichever takes longer. No GPU is needed, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.aten import ATEN, chosen, expected_us, own_us
from polyconv.cuda.planner.cost import moved_bytes
from polyconv.lowering.lower import lowered
from polyconv.measure.workloads import Workload, find, workload
from polyconv.problem import IMAGE_CHANNELS, TF32, Pass, Problem
from polyconv.util import gpu_arch

MEASURED = {"h100": (2.41, 7.11, 2.43), "l40s": (17.2, 25.8, 17.3)}
"""Milliseconds of PyTorch's forward pass, W1 to W3: KernelBench's baselines, not measured here."""
LAYERS = ("resnet50-2b", "unet-enc1", "vgg-conv1_2", "deeplab-aspp6", "mobilenet-dw3")
"""Layers of networks: in 3x3 kernels a fast algorithm saves less than in the headline's, so TF32 is hardest to beat."""
NO_TENSOR_CORES = "none before sm_80"


def limit_ms(problem: Problem, device: CudaDevice) -> float | None:
    """The least time in TF32; None on a GPU without it."""
    rate = gpu_arch.per_clock(device.arch, device.name)
    if not rate:
        return None
    arithmetic = problem.multiplications / (device.sms * device.clock_mhz * 1e3 * rate)
    return max(arithmetic, moved_bytes(problem) / (device.dram_gbs * 1e6))


def expected_ms(problem: Problem, device: CudaDevice) -> float:
    """The time expected of PyTorch under its default flags."""
    return expected_us(replace(problem, torch_format=TF32), device) / 1e3


def table() -> str:
    """The headline workloads, in Markdown."""
    problems = [workload.problem(Pass.FPROP) for workload in find("headline")]
    lines = [
        "| GPU | polyconv, float32 | expected of PyTorch | limit of TF32 | PyTorch, published |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, device in DEVICES.items():
        ours = [plan_cuda(problem, device).cost_us / 1e3 for problem in problems]
        theirs = [expected_ms(problem, device) for problem in problems]
        limits = [limit for problem in problems if (limit := limit_ms(problem, device)) is not None]
        figures = _joined(ours), _joined(theirs), _joined(limits) or NO_TENSOR_CORES, _joined(MEASURED.get(key, ()))
        lines.append(f"| {' | '.join((device.name, *figures))} |")
    return "\n".join(lines)


def layers_table() -> str:
    """Likewise for layers of networks, on GPUs with strong tensor cores."""
    devices = DEVICES["a100"], DEVICES["h100"]
    lines = [
        f"| forward, ms | {' | '.join(f'{device.name}: polyconv, expected of PyTorch, limit' for device in devices)} |",
        f"| --- |{' --- |' * len(devices)}",
    ]
    for one in find(",".join(LAYERS)):
        problem = one.problem(Pass.FPROP)
        cells = []
        for device in devices:
            ours, limit = plan_cuda(problem, device).cost_us / 1e3, limit_ms(problem, device)
            cells.append(f"{ours:.2f}, {expected_ms(problem, device):.2f}, {limit:.2f}")
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _joined(figures: Iterable[float]) -> str:
    return ", ".join(f"{figure:.1f}" for figure in figures)


# ---- networks


class Net:
    """Records the convolutions of a network, each with the number of times that it occurs."""

    def __init__(self, batch: int, channels: int, *size: int) -> None:
        self.batch, self.channels, self.size = batch, channels, size
        self.layers: dict[Workload, int] = {}

    def conv(self, k: int, kernel: int = 3, stride: int = 1, dilation: int = 1, groups: int = 1, times: int = 1) -> Net:
        """Append a layer with "same" padding and go on from its output."""
        numbers = {
            "stride": stride,
            "padding": dilation * (kernel // 2) * (kernel % 2),
            "dilation": dilation,
            "groups": groups,
        }
        self._add(times, out_channels=k, kernel_size=kernel, **numbers)
        self.channels, self.size = k, tuple(-(-extent // stride) for extent in self.size)
        return self

    def up(self, k: int) -> Net:
        """Append a transposed layer that doubles the extents."""
        self._add(1, out_channels=k, kernel_size=2, stride=2, output_padding=0)
        self.channels, self.size = k, tuple(2 * extent for extent in self.size)
        return self

    def to(self, channels: int, shrink: int = 1) -> Net:
        """Go on from other channels, and from extents divided by ``shrink``."""
        self.channels, self.size = channels, tuple(-(-extent // shrink) for extent in self.size)
        return self

    def _add(self, times: int, **arguments: Any) -> None:
        layer = workload({"id": "", "input": (self.batch, self.channels, *self.size), **arguments}, "layers")
        self.layers[layer] = self.layers.get(layer, 0) + times


def resnet50(net: Net, dilations: Sequence[int] = (1, 1, 1, 1)) -> Net:
    net.conv(64, 7, 2).to(64, 2)
    for width, blocks, (before, dilation) in zip(
        (64, 128, 256, 512), (3, 4, 6, 3), pairwise((1, *dilations)), strict=True
    ):
        stride = 2 if width > 64 and dilation == 1 else 1
        c, size = net.channels, net.size
        net.conv(4 * width, 1, stride)
        net.channels, net.size = c, size
        net.conv(width, 1).conv(width, 3, stride, before if dilation > 1 else 1).conv(4 * width, 1)
        for _ in range(blocks - 1):
            net.conv(width, 1).conv(width, 3, 1, dilation).conv(4 * width, 1)
    return net


def deeplab(net: Net) -> Net:
    """torchvision's DeepLabv3: ResNet-50 at an eighth of the resolution, and the pyramid."""
    resnet50(net, (1, 1, 2, 4)).conv(256, 1)
    for rate in (12, 24, 36):
        net.to(2048).conv(256, 3, 1, rate)
    return net.to(1280).conv(256, 1).conv(256).conv(21, 1)


def unet(net: Net, width: int = 64, levels: int = 4) -> Net:
    for level in range(levels):
        net.conv(width << level).conv(width << level).to(width << level, 2)
    net.conv(width << levels).conv(width << levels)
    for level in reversed(range(levels)):
        net.up(width << level).to(2 * width << level).conv(width << level).conv(width << level)
    return net.conv(2, 1)


def edsr(net: Net) -> Net:
    """The baseline: 16 blocks of 64 channels, twice the resolution."""
    net.conv(64).conv(64, times=33).conv(256)
    net.channels, net.size = 64, tuple(2 * extent for extent in net.size)
    return net.conv(3)


def convnext(net: Net) -> Net:
    """ConvNeXt-T. Its 1x1 layers are linear."""
    net.conv(96, 4, 4)
    for width, blocks in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width > 96:
            net.conv(width, 2, 2)
        net.conv(width, 7, groups=width, times=blocks)
    return net


def mobilenet(net: Net) -> Net:
    """MobileNetV2."""
    net.conv(32, 3, 2).conv(32, 3, groups=32).conv(16, 1)
    for k, blocks, stride in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)):
        for block in range(blocks):
            wide = 6 * net.channels
            net.conv(wide, 1).conv(wide, 3, 1 if block else stride, groups=wide).conv(k, 1)
    return net.conv(1280, 1)


NETWORKS = {
    "ResNet-50": lambda: resnet50(Net(64, 3, 224, 224)),
    "U-Net": lambda: unet(Net(4, 3, 512, 512)),
    "DeepLabv3": lambda: deeplab(Net(8, 3, 512, 512)),
    "EDSR": lambda: edsr(Net(16, 3, 96, 96)),
    "ConvNeXt-T": lambda: convnext(Net(64, 3, 224, 224)),
    "MobileNetV2": lambda: mobilenet(Net(64, 3, 224, 224)),
    "3-D U-Net": lambda: unet(Net(2, 1, 128, 128, 128), 32),
}
GPUS = "v100", "a100", "h100", "rtx4090"


class Sum(NamedTuple):
    """The convolutions of a training step on a GPU."""

    ours: int
    """Passes that run polyconv's kernels."""
    passes: int
    theirs_us: float
    """Expected of PyTorch alone."""
    us: float
    """Under ``policy="auto"``."""

    def __str__(self) -> str:
        return f"{self.ours} of {self.passes}, {self.theirs_us / self.us:.2f}"


def step(network: str, device: CudaDevice, dtype: str = "float32", channels_last: bool = False) -> Sum:
    """A training step under PyTorch's default flags, or under autocast to half precision."""
    ours, passes, theirs_us, us = 0, 0, 0.0, 0.0
    for problem, times in _problems(NETWORKS[network](), channels_last):
        form = TF32 if dtype == "float32" else dtype
        (runs,) = lowered(replace(problem, dtype=dtype, torch_format=form), "cuda")
        theirs, plan = expected_us(runs, device), chosen(runs, device)
        own = plan.choice != ATEN
        ours, passes = ours + own * times, passes + times
        theirs_us += times * theirs
        us += times * (own_us(plan, runs, device) if own else theirs)
    return Sum(ours, passes, theirs_us, us)


def _problems(net: Net, channels_last: bool) -> Iterator[tuple[Problem, int]]:
    for layer, times in net.layers.items():
        for kind in Pass:
            if kind is not Pass.DGRAD or layer.input[1] > IMAGE_CHANNELS:  # the network's input needs no gradient
                problem = layer.problem(kind)
                yield problem.channels_last() if channels_last else problem, times


def network_row(network: str) -> str:
    """One network on all GPUs."""
    cells = []
    for device in map(DEVICES.__getitem__, GPUS):
        half = "float16" if device.arch == "sm_70" else "bfloat16"
        cells.append("; ".join(str(step(network, device, *how)) for how in (("float32",), (half,), (half, True))))
    return f"| {network} | {' | '.join(cells)} |"


def networks_table() -> str:
    head = [f"| | {' | '.join(DEVICES[name].name for name in GPUS)} |", f"| --- |{' --- |' * len(GPUS)}"]
    return "\n".join([*head, *map(network_row, NETWORKS)])


if __name__ == "__main__":
    print(table(), layers_table(), networks_table(), sep="\n\n")
