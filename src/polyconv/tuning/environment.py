"""Where something was measured: what has to be the same for the measurement to hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from ..machine import processor_name
from ..version import __version__


@dataclass(frozen=True, slots=True)
class Environment:
    """One device with the software that runs it. What does not apply to a device is empty."""

    device: str
    """``cpu`` or ``cuda``."""
    name: str
    """What its maker calls it."""
    polyconv: str
    torch: str
    instruction_set: str = ""
    """CPU: the native kernels'."""
    threads: int = 0
    """CPU: of PyTorch's pool, which polyconv shares."""
    arch: str = ""
    """CUDA: ``sm_70``."""
    driver: str = ""
    """CUDA: the version of CUDA that the driver offers."""
    cuda: str = ""
    """CUDA: the version that the kernels are launched and compiled with."""

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
        """What applies, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_json().items())
