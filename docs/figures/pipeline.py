"""The half-fused CUDA pipeline: four kernels, what lies between them, and what binds each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canvas import Canvas

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "table.json"
WIDTH, KERNEL_HEIGHT = 138, 104
LEFTS = (84, 262, 440)
TOP = 148


def draw(canvas: Canvas) -> None:
    (fprop,) = (p for p in json.loads(TABLE.read_text(encoding="utf-8"))["passes"] if _is_w1_forward(p))
    kernels = _kernels(fprop["launches"])
    slabs = kernels["half_gemm"]["times"]
    canvas.text(
        0, 10, f"W1 forward on a V100, as planned: {sum(k['times'] for k in kernels.values())} launches", bold=True
    )

    canvas.rect(72, TOP - 34, 520, KERNEL_HEIGHT + 78, line="grey", corner=8, dashed=True)
    canvas.text(84, TOP - 19, f"for each of {slabs} slabs of rows", size=10.5, colour="grey")
    _kernel(canvas, LEFTS[1], 28, 70, "transform_weights", kernels, ["G along H and W, once"], "gold")
    _kernel(
        canvas, LEFTS[0], TOP, KERNEL_HEIGHT, "half_transform", kernels, ["Bᵀ along H,", "streams, writes X"], "teal"
    )
    _kernel(
        canvas,
        LEFTS[1],
        TOP,
        KERNEL_HEIGHT,
        "half_gemm",
        kernels,
        ["Bᵀ along W on the way in,", "Σ over channels,", "Aᵀ along W on the way out"],
        "coral",
    )
    _kernel(
        canvas,
        LEFTS[2],
        TOP,
        KERNEL_HEIGHT,
        "half_inverse",
        kernels,
        ["Aᵀ along H, + bias,", "writes the output"],
        "teal",
    )

    middle = TOP + KERNEL_HEIGHT / 2
    _tensor(canvas, 0, middle, "x", "NCHW")
    canvas.arrow((44, middle), (LEFTS[0], middle))
    canvas.arrow((LEFTS[0] + WIDTH, middle), (LEFTS[1], middle))
    canvas.text(LEFTS[1] - 20, middle - 10, "X", at="middle", bold=True)
    canvas.arrow((LEFTS[1] + WIDTH, middle), (LEFTS[2], middle))
    canvas.text(LEFTS[2] - 20, middle - 10, "Y", at="middle", bold=True)
    canvas.arrow((LEFTS[2] + WIDTH, middle), (626, middle))
    _tensor(canvas, 626, middle, "y", "NCHW")
    _tensor(canvas, 0, 63, "w", "any strides")
    canvas.arrow((44, 63), (LEFTS[1], 63))
    canvas.arrow((LEFTS[1] + WIDTH / 2, 98), (LEFTS[1] + WIDTH / 2, TOP))
    canvas.text(LEFTS[1] + WIDTH / 2 + 8, 105, "U", bold=True)

    bottom = TOP + KERNEL_HEIGHT
    canvas.text(
        84,
        bottom + 18,
        f"X: transformed along H.  Y: per point of H, back along W.  Workspace: {fprop['workspace_mb']:.0f} MB.",
        size=10.5,
        colour="grey",
    )
    canvas.text(
        84,
        bottom + 33,
        "Transforms along W never leave shared memory and registers: half of the pipeline is fused.",
        size=10.5,
        colour="grey",
    )
    canvas.text(
        0,
        bottom + 62,
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
        one = found.setdefault(stem, {"times": 0, "ms": 0.0, "binding": launch["binding"].partition(" (")[0]})
        one["times"] += launch["times"]
        one["ms"] += launch["times"] * launch["counted_ms"]
    return found


def _kernel(
    canvas: Canvas,
    x: float,
    y: float,
    height: float,
    stem: str,
    kernels: dict[str, dict[str, Any]],
    lines: list[str],
    hue: str,
) -> None:
    one = kernels[stem]
    canvas.rect(x, y, WIDTH, height, f"{hue} soft", hue, corner=6)
    canvas.text(x + WIDTH / 2, y + 14, stem, at="middle", size=11, code=True, bold=True)
    for number, words in enumerate(lines):
        canvas.text(x + WIDTH / 2, y + 33 + 14 * number, words, at="middle", size=10)
    figures = f"{one['ms']:.2f} ms, {'memory' if one['binding'] == 'DRAM' else one['binding'].upper()}"
    if len(lines) < 3 and height < KERNEL_HEIGHT:
        figures = f"{one['ms']:.3f} ms"
    canvas.text(x + WIDTH / 2, y + height - 13, figures, at="middle", size=10, bold=True)


def _tensor(canvas: Canvas, x: float, middle: float, name: str, note: str) -> None:
    canvas.rect(x, middle - 16, 44, 32, "panel", "rule", corner=4)
    canvas.text(x + 22, middle, name, at="middle", bold=True, size=13)
    canvas.text(x + 22, middle + 26, note, at="middle", size=9, colour="grey")


FIGURE = (
    "pipeline",
    672,
    332,
    "Four kernels: transform_weights makes U of the weights; half_transform, half_gemm and half_inverse take the image "
    "to the output, slab by slab, through the half-transformed tensors X and Y.",
    draw,
)
