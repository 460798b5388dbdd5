"""``audit``: measured errors of a model's convolutions against float64, on the user's data.

The planner predicts errors for even data. The audit observes a run of the model, recomputes every pass in float64 on
the same operands, and finds the tolerance that keeps a limit.
"""

from .auditor import audit
from .passes import Remedy
from .report import Audit, Row

__all__ = ["Audit", "Remedy", "Row", "audit"]
