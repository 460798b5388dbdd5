"""What the lanes of a CPU vector hold: tiles, channels or columns."""

from __future__ import annotations

from canvas import Canvas

LANES = 16
CELL = 31
LEFT = 168
HUES = ("teal", "coral", "blue")
DILATION = 3


def draw(canvas: Canvas) -> None:
    canvas.text(LEFT, 10, f"one AVX-512 register: {LANES} lanes", bold=True)
    _row(
        canvas,
        26,
        "tile lanes",
        ["forward,", "input gradient"],
        [f"t{unit // DILATION}" for unit in range(LANES)],
        [f"{HUES[unit % DILATION]} soft" for unit in range(LANES)],
        [
            "Lane u is tile u / 3 of column phase u % 3 (dilation 3, phases by colour): neighbouring lanes",
            "read neighbouring columns. Any layout, stride and border; weights are broadcast.",
        ],
    )
    _row(
        canvas,
        122,
        "channel lanes",
        ["weight gradient,", "small maps, channels_last"],
        [f"c{lane}" for lane in range(LANES)],
        ["gold soft"] * LANES,
        [
            "Pixels are packed so that channels are neighbours. The weight gradient sums products over tiles,",
            "64 in registers at most, then chunks, then slices in double: the order is fixed.",
        ],
    )
    _row(
        canvas,
        218,
        "depthwise",
        ["groups = channels"],
        [f"j+{lane}" for lane in range(LANES)],
        ["rule"] * LANES,
        [
            "NCHW: lanes are columns of one channel. channels_last: lanes are channels of one pixel.",
            "Direct sums; kernels of many taps by F(4,4) in segments, with channels in the lanes.",
        ],
    )


def _row(
    canvas: Canvas, top: float, name: str, passes: list[str], labels: list[str], hues: list[str], notes: list[str]
) -> None:
    canvas.text(0, top + 8, name, bold=True, size=12)
    for number, words in enumerate(passes):
        canvas.text(0, top + 25 + 14 * number, words, colour="grey", size=10.5)
    for lane, (label, hue) in enumerate(zip(labels, hues, strict=True)):
        x = LEFT + lane * CELL
        canvas.rect(x, top, CELL - 2, 26, hue, corner=3)
        canvas.text(x + (CELL - 2) / 2, top + 13, label, at="middle", size=10)
    for number, words in enumerate(notes):
        canvas.text(LEFT, top + 41 + 15 * number, words, colour="grey", size=10)


FIGURE = (
    "lanes",
    670,
    294,
    "Sixteen lanes of a vector: in the first engine they hold tiles, phase beside phase; in the second, channels; "
    "in the third, columns.",
    draw,
)
