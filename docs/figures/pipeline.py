"""The CUDA pipeline on the tensor cores: its kernels, what lies between them, and what binds each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canvas import Canvas

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "table.json"
LEFT, RIGHT = 92, 348
"""Where the two columns of kernels begin."""
WIDTH, HEIGHT = 178, 74
ONCE, SLAB = 30, 176
"""Where the row of kernels that run once begins, and that of the kernels of a slab."""
END = 628
BINDINGS = {"DRAM": "memory", "tensor": "tensor cores"}


def draw(canvas: Canvas) -> None:
    (fprop,) = (p for p in json.loads(TABLE.read_text(encoding="utf-8"))["passes"] if _is_w1_forward(p))
    kernels = _kernels(fprop["launches"])
    canvas.text(
        4, 10, f"W1 forward on a V100, as planned: {sum(k['times'] for k in kernels.values())} launches", bold=True
    )
    slabs = kernels["winograd_fp16x3_input"]["times"]
    canvas.rect(80, SLAB - 36, 458, HEIGHT + 88, line="grey", corner=8, dashed=True)
    canvas.text(LEFT, SLAB - 21, f"for each of {slabs} slabs of rows", size=10.5, colour="grey")

    scales = ["the largest of each filter", "and of the first images"]
    _kernel(canvas, LEFT, ONCE, "winograd_fp16x3_absmax", kernels, scales, "gold")
    _kernel(canvas, RIGHT, ONCE, "winograd_fp16x3_filter", kernels, ["G along W, scaled,", "split into halves"], "gold")
    source = ["Bᵀ along W, scaled,", "split into halves, writes V"]
    _kernel(canvas, LEFT, SLAB, "winograd_fp16x3_input", kernels, source, "teal")
    product = ["Σ over channels, tap rows;", "Aᵀ along W, + bias"]
    _kernel(canvas, RIGHT, SLAB, "winograd_fp16x3_gemm", kernels, product, "coral")

    once, slab = ONCE + HEIGHT / 2, SLAB + HEIGHT / 2
    _tensor(canvas, 12, once, "w", "any strides")
    _tensor(canvas, 12, slab, "x", "any strides")
    _tensor(canvas, END, slab, "y", "NCHW")
    canvas.arrow((56, once), (LEFT, once))
    canvas.arrow((56, slab), (LEFT, slab))
    canvas.arrow((LEFT + WIDTH, once), (RIGHT, once))
    canvas.text((LEFT + WIDTH + RIGHT) / 2, once - 10, "scales", at="middle", size=10)
    canvas.arrow((LEFT + WIDTH - 16, ONCE + HEIGHT), (LEFT + WIDTH - 16, SLAB))
    canvas.text(LEFT + WIDTH - 8, ONCE + HEIGHT + 14, "scales", size=10)
    canvas.arrow((RIGHT + WIDTH / 2, ONCE + HEIGHT), (RIGHT + WIDTH / 2, SLAB))
    canvas.text(RIGHT + WIDTH / 2 + 8, ONCE + HEIGHT + 14, "U", bold=True)
    canvas.arrow((LEFT + WIDTH, slab), (RIGHT, slab))
    canvas.text((LEFT + WIDTH + RIGHT) / 2, slab - 10, "V", at="middle", bold=True)
    canvas.arrow((RIGHT + WIDTH, slab), (END, slab))

    below = SLAB + HEIGHT
    notes = (
        f"U, V: transformed along W, each number two halves. Workspace: {fprop['workspace_mb']:.0f} MB.",
        "The last blocks of a product find the scales of later slabs' images.",
    )
    for line, words in enumerate(notes):
        canvas.text(LEFT, below + 18 + 15 * line, words, size=9.5, colour="grey")
    canvas.text(
        4,
        below + 70,
        "ms: counted, all launches of a kernel together; the least that its busiest resource needs. Not measured.",
        size=10,
        colour="grey",
    )


def _is_w1_forward(one: dict[str, Any]) -> bool:
    return one["workload"] == "W1" and one["kind"] == "fprop"


def _kernels(launches: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Stem -> number of launches, their counted time, and what binds them."""
    found: dict[str, dict[str, Any]] = {}
    for launch in launches:
        stem = launch["kernel"].partition("_toom")[0]
        one = found.setdefault(stem, {"times": 0, "ms": 0.0, "binding": launch["binding"].partition(" ")[0]})
        one["times"] += launch["times"]
        one["ms"] += launch["times"] * launch["counted_ms"]
    return found


def _kernel(
    canvas: Canvas, x: float, y: float, stem: str, kernels: dict[str, dict[str, Any]], lines: list[str], hue: str
) -> None:
    one = kernels[stem]
    canvas.rect(x, y, WIDTH, HEIGHT, f"{hue} soft", hue, corner=6)
    canvas.text(x + WIDTH / 2, y + 13, stem, at="middle", size=11, code=True, bold=True)
    for number, words in enumerate(lines):
        canvas.text(x + WIDTH / 2, y + 29 + 13 * number, words, at="middle", size=10)
    binding, digits = BINDINGS.get(one["binding"], one["binding"]), 2 if one["ms"] >= 0.01 else 3
    figures = f"{one['ms']:.{digits}f} ms, {binding}"
    canvas.text(x + WIDTH / 2, y + HEIGHT - 12, figures, at="middle", size=10, bold=True)


def _tensor(canvas: Canvas, x: float, middle: float, name: str, note: str) -> None:
    canvas.rect(x, middle - 16, 44, 32, "panel", "rule", corner=4)
    canvas.text(x + 22, middle, name, at="middle", bold=True, size=13)
    canvas.text(x + 22, middle + 26, note, at="middle", size=9, colour="grey")


FIGURE = (
    "pipeline",
    684,
    336,
    "Four kernels: winograd_fp16x3_absmax finds the scales, winograd_fp16x3_filter makes U of the weights; "
    "winograd_fp16x3_input and winograd_fp16x3_gemm take the image to the output, slab by slab, through the "
    "transformed and split tensor V.",
    draw,
)
