"""``audit``: how far the convolutions of a model stray from float64, on the user's own data.

The planner predicts an error for even data and trusts it. This measures: it looks on while the model runs, computes in
float64 what every convolution was asked for, on the very same operands, and says which tolerance would keep a limit.
"""

from .auditor import audit
from .passes import Remedy
from .report import Audit, Row

__all__ = ["Audit", "Remedy", "Row", "audit"]
