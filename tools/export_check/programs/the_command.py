"""The command for which W1 was exported, in one process, at a smaller image.

the_command.py FOLDER_OF_MODEL_PY CONVOLUTION      its arguments as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

from comparison import Comparison, report_kernels

from fake_cuda import PretendedGpu

COMMAND = (
    "import torch; from model import ModelNew; model = ModelNew(); model = model.cuda(); "
    "x = torch.randn(8,32,512,512, device='cuda', requires_grad=True); y = model(x); y.sum().backward()"
)


def main(folder: str, arguments: str) -> None:
    sys.path.insert(0, folder)
    command = COMMAND.replace("8,32,512,512", "1,32,24,40")
    print(f'  python -c "{command}"')
    names: dict[str, Any] = {}
    with PretendedGpu() as gpu:
        exec(command, names)
    torch, x, y = names["torch"], names["x"], names["y"]
    comparison = Comparison(names["model"], json.loads(arguments))
    comparison.forward(x.detach().cpu(), y)
    comparison.backward(x.detach().cpu(), x.grad, torch.ones(y.shape))
    report_kernels(gpu.launches)


main(*sys.argv[1:])
