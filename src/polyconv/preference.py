"""A choice that comes from outside the planner: measured, or agreed upon."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = "no candidate of that name exists for this problem here"


class Preference(NamedTuple):
    """A candidate that runs if it can and keeps the tolerance; otherwise the model decides, and the plan says so."""

    name: str
    """As the planner calls the candidate."""
    source: str = "chosen by the caller"
    """Who says so, after the words "it was": ``chosen by the tuning file``, ``agreed with the other ranks``."""

    def not_followed(self, why: str) -> str:
        """The words of a plan that runs something else."""
        return f"not {self.name}, although {self.source}: {why}"
