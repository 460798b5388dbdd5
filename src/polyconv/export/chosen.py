"""What runs, by pass, in order of preference: the first one that does not refuse the tensors at hand is taken."""

from __future__ import annotations

from ..plan.ways import Way
from ..problem import Pass

EXPORTED = ""
WAYS: dict[Pass, list[Way]] = {}
"""In an exported file: what :mod:`polyconv.export.choice` chose."""
