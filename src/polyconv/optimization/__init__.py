"""``optimize``: swap the convolutions of a model that are faster in polyconv, on this machine, on this input.

:func:`polyconv.replace` trusts the cost model and swaps everything; this measures and swaps what gains. Every candidate
is timed in turn with PyTorch's convolution on the model's own data, in the mode that the model is in. What is not
faster by a margin stays PyTorch's, and the whole model's time has the last word: a model never comes back slower.
"""

from .optimizer import optimize
from .report import OptimizationReport, Row

__all__ = ["OptimizationReport", "Row", "optimize"]
