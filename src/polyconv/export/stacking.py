"""Volumes of an exported file: pictures with further channels, the sheets that the taps along the depth read.

The package sums a problem of pictures per tap (:mod:`polyconv.sheets`). A file stacks these sheets, one volume at a
time, and has one problem in their place: kernels sum over the channels of pictures anyway. What is copied is the input,
once per tap, and nothing is added to outputs that lie in memory already.
"""

from __future__ import annotations

from math import gcd

from ..problem import Pass, Problem


def stacked(problem: Problem) -> Problem:
    """The picture of each output sheet of one volume: of a convolution, or of a transposed one, an input gradient.

    What is stacked is what the module reads. The output sheets of a transposed one with the same rest modulo the stride
    are reached by the same taps; the rest with the most of them says how many sheets are read.
    """
    depth, taps = problem.in_size[0], problem.kernel[0]
    stride, dilation = problem.stride[0], problem.dilation[0]
    in_channels, out_channels = problem.in_channels, problem.out_channels
    if problem.kind is Pass.DGRAD:
        count = -(-depth // stride)
        out_channels *= -(-taps // (stride // gcd(stride, dilation)))
    else:
        count = problem.out_size[0]
        in_channels *= taps
    return Problem.make(
        problem.kind,
        (count, in_channels, *problem.in_size[1:]),
        (out_channels, in_channels // problem.groups, *problem.kernel[1:]),
        stride=problem.stride[1:],
        padding=problem.padding[2:],
        dilation=problem.dilation[1:],
        groups=problem.groups,
        bias=problem.bias,
    )
