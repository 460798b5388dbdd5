"""What plans cost a V100: the counted figures of benchmarks/gpu/table.json, those columns that fit a page."""

from __future__ import annotations

import json
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "table.json"


def markdown() -> str:
    """One row per workload and pass."""
    lines = [
        '<div class="one-line" markdown>\n',
        "| workload | pass | plan | launches | counted ms | direct limit ms | limit / counted |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for one in json.loads(TABLE.read_text(encoding="utf-8"))["passes"]:
        counted = sum(launch["times"] * launch["counted_ms"] for launch in one["launches"])
        launches = sum(launch["times"] for launch in one["launches"])
        lines.append(
            f"| {one['workload']} | {one['kind']} | `{one['algorithm']}` | {launches} | {counted:.2f} "
            f"| {one['direct_ms']:.2f} | {one['direct_ms'] / counted:.2f} |"
        )
    return "\n".join([*lines, "\n</div>"])
