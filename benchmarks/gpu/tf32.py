"""The tables of docs/performance.md: the modelled time of workloads beside the limit of TF32.

    python benchmarks/gpu/tf32.py

The limit is what PyTorch cannot beat in TF32: the multiplications of a direct convolution at the full rate of the
tensor cores, or the memory traffic, whichever takes longer. No GPU is needed, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.cost import moved_bytes
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem
from polyconv.util import gpu_arch

MEASURED = {"h100": (2.41, 7.11, 2.43), "l40s": (17.2, 25.8, 17.3)}
"""Milliseconds of PyTorch's forward pass, W1 to W3: KernelBench's baselines, not measured here."""
LAYERS = ("resnet50-2b", "unet-enc1", "vgg-conv1_2", "deeplab-aspp6")
"""Layers of networks: in 3x3 kernels a fast algorithm saves less than in the headline's, so TF32 is hardest to beat."""
NO_TENSOR_CORES = "none before sm_80"


def limit_ms(problem: Problem, device: CudaDevice) -> float | None:
    """The least time in TF32; None on a GPU without it."""
    rate = gpu_arch.per_clock(device.arch, device.name)
    if not rate:
        return None
    arithmetic = problem.multiplications / (device.sms * device.clock_mhz * 1e3 * rate)
    return max(arithmetic, moved_bytes(problem) / (device.dram_gbs * 1e6))


def verdict(device: CudaDevice, ours: list[float], limits: list[float]) -> str:
    """The model's expectation, from its times and the limits of TF32."""
    if not limits:
        return "expected to gain: PyTorch computes in float32, too"
    if gpu_arch.is_likely_faster(device.arch, device.name):
        return "PyTorch's TF32 is likely to be faster: `optimize`"
    share = min(limit / mine for limit, mine in zip(limits, ours, strict=True))
    if share >= 1:
        return "expected to gain: faster than direct TF32 can be"
    return f"open: as fast as PyTorch at {share:.0%} of the rate of TF32"


def table() -> str:
    """In Markdown."""
    problems = [workload.problem(Pass.FPROP) for workload in find("headline")]
    lines = [
        "| GPU | modelled, float32 | limit of TF32 | PyTorch, published | today |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, device in DEVICES.items():
        ours = [plan_cuda(problem, device).cost_us / 1e3 for problem in problems]
        limits = [limit for problem in problems if (limit := limit_ms(problem, device)) is not None]
        figures = _joined(ours), _joined(limits) or NO_TENSOR_CORES, _joined(MEASURED.get(key, ()))
        lines.append(f"| {' | '.join((device.name, *figures))} | {verdict(device, ours, limits)} |")
    return "\n".join(lines)


def layers_table() -> str:
    """Likewise for layers of networks, on GPUs with strong tensor cores: polyconv, the limit, and their ratio."""
    devices = DEVICES["a100"], DEVICES["h100"]
    lines = [
        f"| forward, ms | {' | '.join(f'{device.name}: modelled, limit of TF32' for device in devices)} |",
        f"| --- |{' --- |' * len(devices)}",
    ]
    for workload in find(",".join(LAYERS)):
        problem = workload.problem(Pass.FPROP)
        cells = []
        for device in devices:
            ours, limit = plan_cuda(problem, device).cost_us / 1e3, limit_ms(problem, device)
            assert limit is not None, "both have TF32"
            cells.append(f"{ours:.2f}, {limit:.2f} ({ours / limit:.1f} times)")
        lines.append(f"| {workload.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _joined(figures: Iterable[float]) -> str:
    return ", ".join(f"{figure:.1f}" for figure in figures)


if __name__ == "__main__":
    print(table(), layers_table(), sep="\n\n")
