"""Profiles of processors: measured times of kernels beside the cost model's estimates.

The cost model alone is accurate on the machine that its constants were fitted on. :mod:`.profile` corrects it by nearby
measurements and gives its uncertainty; ``shipped`` has the processors measured so far; ``polyconv calibrate`` measures
another one.
"""

from .file import ProfileError, Section, check, load, text, update
from .lookup import in_force, own_file, shipped
from .profile import Correction, Formula, Kernel, Profile, Record, Spent, in_words

__all__ = [
    "Correction",
    "Formula",
    "Kernel",
    "Profile",
    "ProfileError",
    "Record",
    "Section",
    "Spent",
    "check",
    "in_force",
    "in_words",
    "load",
    "own_file",
    "shipped",
    "text",
    "update",
]
