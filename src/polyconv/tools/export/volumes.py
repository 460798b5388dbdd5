"""Lowering of a volume in an exported file: a 2-D problem whose channels are the slices read by the taps along depth.

As in :mod:`polyconv.lowering.volume_stack`, but always stacking the module's input, one volume at a time, along depth.
A file serves any size, so neighbouring images of the stack do not share slices.
"""

from __future__ import annotations

from dataclasses import replace

from ...lowering.volume_stack import Side, phases_of, stacked_problem
from ...problem import Pass, Problem, contiguous_strides

DEPTH = 0


def stacked(problem: Problem) -> Problem:
    """2-D problem of one volume, with an image per output slice; a transposed convolution is an input gradient.

    Output slices of a transposed convolution are grouped by their residue modulo the stride, because one residue is
    reached by one set of taps. The residue with the most taps gives the number of slices that are stacked.
    """
    side: Side = "y" if problem.kind is Pass.DGRAD else "x"
    phases = phases_of(problem, DEPTH, side)
    one = stacked_problem(problem, DEPTH, side, max(phase.taps for phase in phases))
    lowered = replace(one, batch=max(phase.count for phase in phases))
    x, y = contiguous_strides(lowered.x_shape), contiguous_strides(lowered.y_shape)
    return replace(lowered, x_strides=x, y_strides=y)
