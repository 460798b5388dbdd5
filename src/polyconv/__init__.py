"""polyconv: ``torch.nn.Conv2d`` on CUDA kernels of its own.

    print(polyconv.replace(model))      # replaced 53 of 53 Conv2d modules

or :class:`polyconv.Conv2d` and :func:`polyconv.conv2d` in place of torch's. Importing the package only defines names:
nothing is compiled, no file is touched and CUDA is not initialised until a convolution runs.
"""

from .explanation import Explanation, explain
from .functional import conv2d
from .nn import Conv2d
from .replacement import Replacement, replace, restore
from .settings import set_tolerance, tolerance
from .version import __version__

__all__ = [
    "Conv2d",
    "Explanation",
    "Replacement",
    "__version__",
    "conv2d",
    "explain",
    "replace",
    "restore",
    "set_tolerance",
    "tolerance",
]
