"""Volumes of an exported file: pictures with further channels, the sheets that the taps along the depth meet.

As in :mod:`polyconv.stacks`, with what the module reads stacked, one volume at a time, across the depth always; a file
serves any size, so its sheets are not shared by neighbouring pictures.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem import Pass, Problem, contiguous_strides
from ..stacks import Side, phases_of, stacked_picture

DEPTH = 0


def stacked(problem: Problem) -> Problem:
    """The picture of each output sheet of one volume: of a convolution, or of a transposed one, an input gradient.

    The output sheets of a transposed one with the same rest modulo the stride are reached by the same taps; the rest
    with the most of them says how many sheets are read.
    """
    side: Side = "y" if problem.kind is Pass.DGRAD else "x"
    phases = phases_of(problem, DEPTH, side)
    picture = stacked_picture(problem, DEPTH, side, max(phase.taps for phase in phases))
    pictures = replace(picture, batch=max(phase.count for phase in phases))
    x, y = contiguous_strides(pictures.x_shape), contiguous_strides(pictures.y_shape)
    return replace(pictures, x_strides=x, y_strides=y)
