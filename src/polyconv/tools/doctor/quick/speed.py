"""Speed of the headline workloads next to PyTorch's convolution on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ....measure.accuracy import scale
from ....measure.batch_limits import available_memory, with_batch
from ....measure.operands import NCHW, OURS, Call, Operands, ours, pytorch
from ....measure.timing import Sample, cuda_sample, current, interleaved, sample
from ....measure.workloads import Workload
from ....numerics.scale import largest
from ....problem import DEFAULT_TOLERANCE, Pass, Problem
from ....util import tf32

REPEATS = 3
SHARE_OF_MEMORY = 0.75
ALLOWED = 2 * DEFAULT_TOLERANCE
"""Allowed deviation from PyTorch's result, relative to the scale of the output map. Twice, because both round."""
SPOT = 8
"""Compared channels of the last image; weight gradients are compared whole."""


@dataclass(frozen=True, slots=True)
class Contest:
    workload: str
    kind: str
    batch: int
    whole_batch: int
    ours_ms: float | None = None
    torch_ms: float | None = None
    deviation: float | None = None
    """From PyTorch's float32 result, on a sample of it."""
    torch_computes_in: str = "float32"
    """PyTorch's format during timing, under the user's flags: ``TF32`` on newer GPUs unless it is switched off."""
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        return self.torch_ms / self.ours_ms if self.ours_ms and self.torch_ms else None

    @property
    def ok(self) -> bool:
        """Whether the result is correct; being slower is no failure."""
        return not self.failure and self.deviation is not None and self.deviation <= ALLOWED

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["pass"] = found.pop("kind")
        return {**found, "ratio": self.ratio, "ok": self.ok}

    def __str__(self) -> str:
        return f"{self.workload} {self.kind}: " + (self.failure or f"deviation {self.deviation:.1e}")


def contests(
    workloads: Sequence[Workload],
    device: torch.device,
    *,
    timer: Sample | None = None,
    memory: int | None = None,
    images: int | None = None,
) -> Iterator[Contest]:
    """Time all passes of the workloads, yielding each when measured.

    Args:
        timer: returns the seconds per call; the device's clock if None.
        memory: bytes that may be used; all free memory if None.
        images: upper limit of the batch.
    """
    timer = timer or (cuda_sample if device.type == "cuda" else sample)
    for workload in workloads:
        for kind in Pass:
            batch = 0
            try:
                batch = _batch(workload, free_memory(device) if memory is None else memory, images)
                figures = _contest(with_batch(workload, batch).problem(kind), device, timer)
            except Exception as error:  # such as out of memory: goes into the report
                figures = {"failure": f"{type(error).__name__}: {error}"}
            yield Contest(workload.name, str(kind), batch, workload.input[0], **figures)


def _contest(problem: Problem, device: torch.device, timer: Sample) -> dict[str, Any]:
    operands = _operands(problem, device)
    calls: dict[str, Call] = {OURS: ours(problem, operands), NCHW: pytorch(problem, operands)}
    with torch.no_grad(), current(device), _cudnn(device):
        with tf32.switched_off():
            deviation = _compare(problem, operands, calls)
        timings = interleaved(calls, REPEATS, timer)
    return {
        "ours_ms": timings[OURS].best * 1e3,
        "torch_ms": timings[NCHW].best * 1e3,
        "deviation": deviation,
        "torch_computes_in": tf32.torchs_format(device),
    }


def _compare(problem: Problem, operands: Operands, calls: dict[str, Call]) -> float:
    """Largest deviation on a sample of the result. Each full result is freed before the next is computed."""
    parts = []
    for call in (calls[OURS], calls[NCHW], lambda: scale(problem, operands)):
        result = call()
        part = result if problem.kind is Pass.WGRAD else result[-1:, :SPOT]
        parts.append(part.double().cpu())
        del result, part
    found, expected, unit = parts
    return largest((found - expected).abs(), unit)


def _operands(problem: Problem, device: torch.device) -> Operands:
    """Random operands, generated on the device because they are large."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    return Operands(
        x=draw(*problem.x_shape),
        w=draw(*problem.w_shape),
        bias=draw(problem.out_channels) if problem.bias else None,
        dy=None if problem.kind is Pass.FPROP else draw(*problem.y_shape),
    )


def _batch(workload: Workload, memory: int, images: int | None) -> int:
    """Largest batch that fits into memory together with both outputs."""
    one = with_batch(workload, 1).problem(Pass.FPROP)
    _, c, h, w = one.x_shape
    _, k, out_h, out_w = one.y_shape
    per_image = 4 * (2 * c * h * w + 2 * k * out_h * out_w)
    fitting = int(SHARE_OF_MEMORY * memory / per_image)
    return max(1, min(workload.input[0], fitting, images or workload.input[0]))


def free_memory(device: torch.device) -> int:
    """Free memory of a device [bytes]."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


@contextmanager
def _cudnn(device: torch.device) -> Iterator[None]:
    """Enable cuDNN and its benchmark mode, for PyTorch's best time."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark
    cudnn.enabled = cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.enabled, cudnn.benchmark = before
