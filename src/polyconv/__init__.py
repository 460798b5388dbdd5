"""polyconv: torch's convolutions on CUDA and CPU kernels of its own.

    print(polyconv.replace(model))      # replaced 53 of 53 convolutions

or :func:`polyconv.enable` for every convolution of the process, or :class:`polyconv.Conv2d` and :func:`polyconv.conv2d`
in place of torch's. Importing the package only defines names: nothing is compiled, no file is touched and CUDA is not
initialised until a convolution runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .dispatch.override import Enabling, disable, enable
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .model.freeze import Freezing, freeze, unfreeze
from .model.replace import Replacement, replace, restore
from .nn import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LazyConv1d,
    LazyConv2d,
    LazyConv3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from .settings import allow_low_precision, benchmark, set_tolerance, tolerance
from .version import __version__

if TYPE_CHECKING:
    from .autotune.online import save_benchmark
    from .model.explain import Explanation, explain
    from .model.warmup import Warmup, warmup
    from .tools.audit import Audit, audit
    from .tools.optimize import OptimizationReport, optimize

_ON_DEMAND = {
    "Audit": "tools.audit",
    "Explanation": "model.explain",
    "OptimizationReport": "tools.optimize",
    "Warmup": "model.warmup",
    "audit": "tools.audit",
    "explain": "model.explain",
    "optimize": "tools.optimize",
    "save_benchmark": "autotune.online",
    "warmup": "model.warmup",
}
"""Public name -> module that defines it, imported when the name is first used."""

__all__ = [
    "Audit",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Enabling",
    "Explanation",
    "Freezing",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "OptimizationReport",
    "Replacement",
    "Warmup",
    "__version__",
    "allow_low_precision",
    "audit",
    "benchmark",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "disable",
    "enable",
    "explain",
    "freeze",
    "optimize",
    "replace",
    "restore",
    "save_benchmark",
    "set_tolerance",
    "tolerance",
    "unfreeze",
    "warmup",
]


def __getattr__(name: str) -> Any:
    module = _ON_DEMAND.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
