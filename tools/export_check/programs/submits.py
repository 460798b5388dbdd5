"""A submission to gpu-mode's board on a fake GPU, within the board's tolerance of PyTorch in float64.

submits.py SUBMISSION.PY SIZE TAPS CHANNELS BATCH
"""

from __future__ import annotations

import sys
from math import sqrt
from pathlib import Path

import torch
from comparison import load, report_kernels

from fake_cuda import PretendedGpu


def main(path: str, *numbers: str) -> None:
    size, taps, channels, batch = map(int, numbers)
    torch.manual_seed(0)
    x, w = torch.randn(batch, channels, size, size), torch.randn(channels, channels, taps, taps)
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    with PretendedGpu() as gpu:
        room = torch.full(exact.shape, float("nan")).cuda()
        y = load(Path(path)).custom_kernel((x.cuda(), w.cuda(), room)).cpu()
    error, scale = (y - exact).abs(), taps * sqrt(channels)
    rms, largest = float(error.square().mean().sqrt()), float(error.max())
    print(f"  y {tuple(y.shape)}: error rms {rms / scale:.1e}, largest {largest / scale:.1e} of the scale {scale:.0f}")
    print(f"  largest over what the board allows: {float((error / (1e-3 + 1e-3 * exact.abs())).max()):.2f}")
    assert y.shape == exact.shape
    assert bool((error <= 1e-3 + 1e-3 * exact.abs()).all())  # False for NaN
    report_kernels(gpu.launches)


main(*sys.argv[1:])
