"""What a fused epilogue saves on the CPU: one call against the convolution followed by passes over its output.

    python benchmarks/cpu/fused_epilogue.py                     # resnet50-2b,resnet50-1x1,mobilenet-dw3,W1, one image
    python benchmarks/cpu/fused_epilogue.py edsr-64 --batch 4 --threads 2

Both sides run polyconv's kernels and take turns, so that their ratio holds on a busy machine as well; the unfused side
adds and activates in place, which is the least that PyTorch needs. Workloads are named as in ``polyconv bench --list``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from polyconv.cpu.planner import plan_cpu
from polyconv.measure.timing import interleaved, threads
from polyconv.measure.workloads import Workload, find

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "silu": lambda y: F.silu(y, inplace=True),
}
EPILOGUES = (("relu", False), ("relu", True), ("silu", False), ("none", True))


def compare(workload: Workload, batch: int, activation: str, residual: bool, repeats: int) -> str:
    """One line: time of the unfused calls over that of the fused one."""
    shape = (batch, *workload.input[1:])
    reads = workload.input[1] // workload.groups
    x, w = torch.randn(shape), torch.randn(workload.out_channels, reads, *workload.kernel)
    w /= sqrt(w[0].numel())
    bias = torch.randn(workload.out_channels)
    moves = (workload.stride, workload.padding, workload.dilation, workload.groups)
    added = torch.randn_like(polyconv.conv2d(x, w, bias, *moves)) if residual else None

    def unfused() -> Tensor:
        y = polyconv.conv2d(x, w, bias, *moves)
        return IN_PLACE[activation](y if added is None else y.add_(added))

    def fused() -> Tensor:
        return polyconv.conv2d(x, w, bias, *moves, activation=activation, residual=added)

    torch.testing.assert_close(fused(), unfused(), rtol=1e-4, atol=1e-4)
    found = interleaved({"unfused": unfused, "fused": fused}, repeats)
    best = found["unfused"].best / found["fused"].best
    median = found["unfused"].median / found["fused"].median
    epilogue = " + ".join(["residual"] * residual + [activation] * (activation != "none"))
    plan = plan_cpu(workload.problem("fprop"), inference=True)
    return f"{workload.name:16} {epilogue:16} {best:6.2f} {median:8.2f}   {plan.choice}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="?", default="resnet50-2b,resnet50-1x1,mobilenet-dw3,W1")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"{'workload':16} {'epilogue':16} {'best':>6} {'median':>8}   unfused / fused, convolution by")
    with threads(options.threads), torch.no_grad():
        for workload in find(options.workloads):
            for activation, residual in EPILOGUES:
                print(compare(workload, options.batch, activation, residual, options.repeats), flush=True)


if __name__ == "__main__":
    main()
