"""What the plans of the three headline workloads cost a V100, counted, beside the limit of direct multiplication."""

from __future__ import annotations

import json
from pathlib import Path

from canvas import Canvas

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "table.json"
NAMES = {"fprop": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}
LEFT, SCALE = 168, 11.2
BAR = 15


def draw(canvas: Canvas) -> None:
    canvas.text(0, 10, "Least time on a V100, ms", bold=True)
    canvas.rect(LEFT, 4, 12, 12, "teal", corner=2)
    canvas.text(LEFT + 18, 10, "counted for the plan", size=10.5, colour="grey")
    canvas.rect(LEFT + 152, 4, 12, 12, "rule", corner=2)
    canvas.text(LEFT + 170, 10, "if direct multiplication ran at the FP32 peak", size=10.5, colour="grey")
    passes = [p for p in json.loads(TABLE.read_text(encoding="utf-8"))["passes"] if p["workload"].startswith("W")]
    y, before = 30.0, ""
    for one in passes:
        if one["workload"] != before:
            y += 10 if before else 0
            before = one["workload"]
            canvas.text(0, y + BAR / 2 + 1, before, bold=True)
        counted = sum(launch["times"] * launch["counted_ms"] for launch in one["launches"])
        canvas.text(LEFT - 8, y + BAR / 2 + 1, NAMES[one["kind"]], size=10.5, colour="grey", at="end")
        canvas.rect(LEFT, y + 1, one["direct_ms"] * SCALE, BAR, "rule", corner=2)
        canvas.rect(LEFT, y + 1, counted * SCALE, BAR, "teal", corner=2)
        canvas.text(
            LEFT + one["direct_ms"] * SCALE + 6, y + BAR / 2 + 1, f"{counted:.1f} of {one['direct_ms']:.1f}", size=10
        )
        y += BAR + 6
    canvas.text(
        0,
        y + 12,
        "Counted from the execution of the machine code; nothing in this figure was measured.",
        size=10,
        colour="grey",
    )


FIGURE = (
    "counted",
    690,
    268,
    "Bars for the three passes of W1, W2 and W3: the counted time of the plan inside the time that direct "
    "multiplication would need at least.",
    draw,
)
