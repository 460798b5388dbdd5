"""What runs, by pass, in order of preference: the first one that does not refuse the tensors at hand is taken."""

from __future__ import annotations

from ..problem import Pass
from .within import Launcher

EXPORTED = ""
WAYS: dict[Pass, list[Launcher]] = {}
"""In an exported file: what :mod:`polyconv.export.choice` chose."""
