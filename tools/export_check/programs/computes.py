"""Results of an exported file on a fake GPU, against PyTorch in float64.

computes.py MODEL.PY CASE      as JSON: see Case in tools/export_check/cases.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from comparison import Comparison, load, report_kernels

from fake_cuda import PretendedGpu


def main(path: str, text: str) -> None:
    case = json.loads(text)
    arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in case["arguments"].items()}
    torch.manual_seed(0)
    with PretendedGpu() as gpu:
        model = load(Path(path)).ModelNew(**arguments).cuda()
        comparison = Comparison(model, case["convolution"], case["module"], case["activation"])
        x = torch.randn(case["shape"])
        x_cuda = x.cuda().requires_grad_(not case["forward_only"])
        y = model(x_cuda)
        comparison.forward(x, y)
        if case["activation"]:  # the kernels apply it if there is no gradient
            with torch.no_grad():
                comparison.forward(x, model(x_cuda))
        if not case["forward_only"]:
            gradient = torch.randn(() if case["expanded"] else y.shape)
            y.backward(gradient.cuda().expand(y.shape))
            comparison.backward(x, x_cuda.grad, gradient.expand(y.shape))
    report_kernels(gpu.launches)


main(*sys.argv[1:])
