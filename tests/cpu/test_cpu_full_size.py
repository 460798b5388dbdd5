"""W2 at full size on the CPU: 2.1e9 outputs in 8.6 GB, sampled rows against float64. Nightly: needs 10 GB."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import polyconv
from nightly import nightly
from polyconv.measure.workloads import find


@nightly
def test_w2_forward() -> None:
    (workload,) = find("W2")
    x = torch.randn(workload.input)
    w = torch.randn(workload.out_channels, workload.input[1], *workload.kernel) / 12
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            y = polyconv.conv2d(x, w)
    finally:
        torch.set_num_threads(threads)
    assert y.shape == workload.problem("fprop").y_shape
    n, _, height, _ = y.shape
    generator = torch.Generator().manual_seed(1)
    for image in (0, 7, n - 1):
        for row in (0, height - 1, *torch.randint(0, height, (6,), generator=generator).tolist()):
            rows = x[image : image + 1, :, row : row + workload.kernel[0]]
            expected = F.conv2d(rows.double(), w.double())
            found = y[image : image + 1, :, row : row + 1]
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
