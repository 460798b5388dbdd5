"""The public names, by what they are for. A name that nobody sorted still appears, so the page is always complete."""

from __future__ import annotations

from collections.abc import Iterator

import polyconv

GROUPS = {
    "Convolution": ("conv2d", "Conv2d", "LazyConv2d"),
    "Existing models": (
        "replace",
        "restore",
        "Replacement",
        "enable",
        "disable",
        "Enabling",
        "optimize",
        "OptimizationReport",
    ),
    "Choices that are measured": ("benchmark", "save_benchmark"),
    "What would run": ("explain", "Explanation"),
    "Before the first step": ("warmup", "Warmup"),
    "Accuracy": ("set_tolerance", "tolerance", "audit", "Audit", "allow_low_precision"),
}


def markdown() -> str:
    """A heading per group, and for each name the directive that mkdocstrings replaces."""
    return "\n\n".join(_lines())


def _lines() -> Iterator[str]:
    public = [name for name in polyconv.__all__ if not name.startswith("__")]
    sorted_names = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": tuple(name for name in public if name not in sorted_names)}
    for title, names in groups.items():
        present = [name for name in names if name in public]
        if present:
            yield f"## {title}"
            yield from (f"::: polyconv.{name}" for name in present)
