"""Profiles of processors: what kernels took on them, measured, beside what the cost model estimates.

The cost model alone is right on the machine that its constants were fitted on. :mod:`.profile` corrects it by what was
measured nearby, and says how far it is to be believed; ``known`` has the processors that were met so far;
``polyconv calibrate`` measures another one.
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
