"""Keys of tuning files: problem and environment as text that is stable across processes and versions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from .activation import Activation
from .problem import Problem, Shape, Strides, channels_last_strides, contiguous_strides
from .util.cpuinfo import processor_name
from .version import __version__


def problem_key(problem: Problem, *, kept_weights: bool = False) -> str:
    """Key with everything that a choice depends on. ``kept_weights``: the weight cache may be used, in inference."""
    parts = [
        f"{problem.kind} x {_times(problem.x_shape)} w {_times(problem.w_shape)}",
        f"stride {_times(problem.stride)}",
        f"padding {','.join(map(str, problem.padding))} {problem.padding_mode}",
        f"dilation {_times(problem.dilation)}",
        f"groups {problem.groups}",
        "layout "
        + " ".join(
            layout(shape, strides)
            for shape, strides in (
                (problem.x_shape, problem.x_strides),
                (problem.w_shape, problem.w_strides),
                (problem.y_shape, problem.y_strides),
            )
        ),
        problem.dtype,
        f"tolerance {problem.tolerance:g}",
    ]
    if problem.bias:
        parts.append("bias")
    if problem.residual:
        parts.append("residual")
    if problem.activation is not Activation.NONE:
        parts.append(str(problem.activation))
    if not problem.vector_aligned:
        parts.append("unaligned")
    if kept_weights:
        parts.append("frozen weights" if problem.frozen else "kept weights")
    return ", ".join(parts)


def layout(shape: Shape, strides: Strides) -> str:
    """``nchw`` or ``nhwc`` for a dense tensor, else the strides. Strides of axes with extent 1 are ignored."""
    for name, dense in (("nchw", contiguous_strides), ("nhwc", channels_last_strides)):
        expected = dense(shape)
        if strides == expected or all(e == 1 or s == d for e, s, d in zip(shape, strides, expected, strict=True)):
            return name
    return "/".join(str(s) if e > 1 else "-" for e, s in zip(shape, strides, strict=True))


def _times(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class Environment:
    """A device and its software versions. Fields that do not apply to the device are empty."""

    device: str
    """``cpu`` or ``cuda``."""
    name: str
    """The vendor's product name."""
    polyconv: str
    torch: str
    instruction_set: str = ""
    """CPU: of the native kernels."""
    threads: int = 0
    """CPU: size of PyTorch's thread pool, which polyconv shares."""
    arch: str = ""
    """CUDA: ``sm_70``."""
    driver: str = ""
    """CUDA: version of CUDA that the driver supports."""
    cuda: str = ""
    """CUDA: version that compiles and launches the kernels."""

    @classmethod
    def of_cpu(cls, instruction_set: str) -> Environment:
        return cls(
            device="cpu",
            name=processor_name(),
            polyconv=__version__,
            torch=str(torch.__version__),
            instruction_set=instruction_set,
            threads=torch.get_num_threads(),
        )

    @classmethod
    def of_cuda(cls, name: str, arch: str, driver: str, cuda: str) -> Environment:
        return cls("cuda", name, __version__, str(torch.__version__), arch=arch, driver=driver, cuda=cuda)

    def as_json(self) -> dict[str, Any]:
        """The non-empty fields by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_json().items())
