"""``optimize``: swap the convolutions of a model that are measured to be faster in polyconv on this machine and input.

:func:`polyconv.replace` trusts the cost model and swaps everything. Here the candidates are timed, interleaved with
PyTorch's convolution, on the model's data and in its mode, and only layers that are faster by a margin are swapped. The
swaps are kept only if the whole model is faster.
"""

from .optimizer import optimize
from .report import OptimizationReport, Row

__all__ = ["OptimizationReport", "Row", "optimize"]
