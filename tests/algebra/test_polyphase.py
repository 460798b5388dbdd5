"""The polyphase identities in exact integer arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyconv.algebra.polyphase import Phase, dense_axis, forward_phases, gradient_phases
from polyconv.problem import output_extent

axes = st.tuples(st.integers(1, 30), st.integers(1, 7), st.integers(1, 6), st.integers(1, 6), st.integers(-3, 6))


def pairs(phases: tuple[Phase, ...], extent: int) -> list[tuple[int, int, int]]:
    """(written, tap, read) for every multiplication inside the source."""
    found = []
    for p in phases:
        for i in range(p.count):
            for j in range(p.taps):
                read = p.read_first + i * p.read_step + j * p.tap_step
                if 0 <= read < extent:
                    found.append((p.written_first + i * p.written_step, p.tap_first + j * p.tap_stride, read))
    return found


@given(axes)
def test_forward_phases_do_exactly_the_multiplications_of_a_convolution(axis: tuple[int, ...]) -> None:
    extent, kernel, stride, dilation, before = axis
    outputs = max(output_extent(extent, before, before, kernel, stride, dilation), 0)
    expected = [
        (o, r, o * stride - before + r * dilation)
        for o in range(outputs)
        for r in range(kernel)
        if 0 <= o * stride - before + r * dilation < extent
    ]
    assert sorted(pairs(forward_phases(outputs, kernel, stride, dilation, before), extent)) == sorted(expected)


@given(axes)
def test_gradient_phases_are_the_transpose(axis: tuple[int, ...]) -> None:
    extent, kernel, stride, dilation, before = axis
    outputs = max(output_extent(extent, before, before, kernel, stride, dilation), 0)
    forward = pairs(forward_phases(outputs, kernel, stride, dilation, before), extent)
    gradient = pairs(gradient_phases(extent, kernel, stride, dilation, before), outputs)
    assert sorted(gradient) == sorted((read, tap, written) for written, tap, read in forward)


@given(axes)
def test_gradient_phases_write_every_position_once(axis: tuple[int, ...]) -> None:
    extent, kernel, stride, dilation, before = axis
    phases = gradient_phases(extent, kernel, stride, dilation, before)
    written = [p.written_first + i * p.written_step for p in phases for i in range(p.count)]
    assert sorted(written) == list(range(extent))
    assert sum(p.taps for p in phases) <= kernel
    assert len({(p.tap_step, p.tap_stride, p.read_step) for p in phases}) <= 1


@given(axes, st.integers(1, 9))
def test_slabs_cover_a_phase(axis: tuple[int, ...], lines: int) -> None:
    extent, kernel, stride, dilation, before = axis
    for phase in gradient_phases(extent, kernel, stride, dilation, before):
        slabs = tuple(phase.cut(first, lines) for first in range(0, phase.count, lines))
        assert pairs(slabs, 10**6) == pairs((phase,), 10**6)


@given(axes)
def test_dense_axes_do_the_same_multiplications(axis: tuple[int, ...]) -> None:
    extent, kernel, stride, dilation, before = axis
    outputs = max(output_extent(extent, before, before, kernel, stride, dilation), 0)
    both = forward_phases(outputs, kernel, stride, dilation, before), gradient_phases(extent, *axis[1:])
    for phases, source in zip(both, (extent, outputs), strict=True):
        for phase in phases:
            if not phase.taps:
                continue
            dense = dense_axis(phase)
            found = [
                (dense.written_first + i * dense.written_step, c.tap_first + t * c.tap_stride, read)
                for i in range(dense.count)
                for c in dense.classes
                for t in range(c.taps)
                if 0 <= (read := c.read_first + dense.read_step * (i + dense.dilation * t)) < source
            ]
            assert sorted(found) == sorted(pairs((phase,), source))
            assert dense.dilation >= 1
            assert dense.taps == dense.classes[0].taps
