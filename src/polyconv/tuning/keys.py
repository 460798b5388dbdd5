"""A problem as a line of text that means the same in every process and every version."""

from __future__ import annotations

from ..problem import Activation, Problem, Shape, Strides, channels_last_strides, contiguous_strides


def problem_key(problem: Problem, *, kept_weights: bool = False) -> str:
    """Everything that a choice may depend on. ``kept_weights``: in inference, where transformed weights may be kept."""
    parts = [
        f"{problem.kind} x {_times(problem.x_shape)} w {_times(problem.w_shape)}",
        f"stride {_times(problem.stride)}",
        f"padding {','.join(map(str, problem.padding))} {problem.padding_mode}",
        f"dilation {_times(problem.dilation)}",
        f"groups {problem.groups}",
        "layout "
        + " ".join(
            layout(shape, strides)
            for shape, strides in (
                (problem.x_shape, problem.x_strides),
                (problem.w_shape, problem.w_strides),
                (problem.y_shape, problem.y_strides),
            )
        ),
        problem.dtype,
        f"tolerance {problem.tolerance:g}",
    ]
    if problem.bias:
        parts.append("bias")
    if problem.residual:
        parts.append("residual")
    if problem.activation is not Activation.NONE:
        parts.append(str(problem.activation))
    if not problem.vector_aligned:
        parts.append("unaligned")
    if kept_weights:
        parts.append("frozen weights" if problem.frozen else "kept weights")
    return ", ".join(parts)


def layout(shape: Shape, strides: Strides) -> str:
    """``nchw`` or ``nhwc`` for a dense tensor; other strides as they are. A stride along one element is no matter."""
    for name, dense in (("nchw", contiguous_strides), ("nhwc", channels_last_strides)):
        if all(e == 1 or s == d for e, s, d in zip(shape, strides, dense(shape), strict=True)):
            return name
    return "/".join(str(s) if e > 1 else "-" for e, s in zip(shape, strides, strict=True))


def _times(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))
