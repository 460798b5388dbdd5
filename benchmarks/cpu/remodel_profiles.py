"""Writes the estimates in shipped profiles anew, after a change of the cost model's formulas; measured times stay.

    python benchmarks/cpu/remodel_profiles.py

Sections of instruction sets that this processor does not have are left as they are, and named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polyconv.cpu.profiles
from polyconv.cpu import native
from polyconv.cpu.profiles import Section, load, text
from polyconv.measure.calibration import remodelled

SHIPPED = Path(polyconv.cpu.profiles.__file__).with_name("shipped")


def anew(section: Section) -> Section:
    """The record with current estimates."""
    try:
        native.instruction_set(section.instruction_set)
    except RuntimeError:
        print(f"{section}: left as it is, this processor has no {section.instruction_set}")
        return section
    records = tuple(remodelled(one, section.instruction_set, section.threads) for one in section.records)
    native.instruction_set("best")
    return replace(section, records=records)


def main() -> None:
    for path in sorted(SHIPPED.glob("*.json")):
        sections = load(path)
        path.write_text(text(map(anew, sections)), encoding="utf-8")
        print(f"{path.name}: {len(sections)} sections")


if __name__ == "__main__":
    main()
