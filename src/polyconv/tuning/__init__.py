"""Tuning files: measured choices, kept for later processes and for other machines of the same kind.

A cost model knows a kind of device; a measurement knows the one that is there. ``polyconv tune`` and
:func:`polyconv.optimize` measure, a tuning file keeps what they found, and the backends look a problem up when they
plan it for the first time. A file says for which environment each of its sections was measured, so that one file in a
repository can serve several devices.
"""

from .environment import Environment
from .file import Entry, Tuning, TuningError, load, merge, update
from .keys import problem_key
from .lookup import Found, default_file, find

__all__ = [
    "Entry",
    "Environment",
    "Found",
    "Tuning",
    "TuningError",
    "default_file",
    "find",
    "load",
    "merge",
    "problem_key",
    "update",
]
