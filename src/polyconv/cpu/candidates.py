"""What the planner weighs: one kernel of one engine, with what it would cost and how far it would stray."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod, sqrt

from ..algebra.error import predicted_error
from ..algebra.segments import Scheme2d
from ..algebra.steps import Form
from ..problem import Pass, Problem


class Engine(str, Enum):
    """Who computes."""

    TILE_LANES = "tile lanes"
    """Cook-Toom or direct, lanes of vectors hold tiles: large maps."""
    CHANNEL_LANES = "channel lanes"
    """The same, lanes hold channels: small maps, channels_last, the weight gradient."""
    DEPTHWISE = "depthwise"
    """One channel in, a few out: nothing to sum over but taps."""
    PLAIN = "plain"
    """Written for clarity: float64, and whatever no other kernel takes."""
    ATEN = "ATen"
    """PyTorch's own convolution, where it is the best that is known."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a problem. Without a ``refusal`` it has cycles and an error."""

    engine: Engine
    name: str
    algorithm: int = 0
    """The number that the engine's operators know it by."""
    direct: bool = False
    """Sums the products of the definition: allowed whatever the tolerance."""
    cycles: float = 0.0
    """Estimated, of one core: only the ratio between candidates means anything."""
    weight_cycles: float = 0.0
    """Of these, those that transform the weights: saved where they are kept."""
    error: float = 0.0
    """The largest error of any output to be expected, relative to the output's scale."""
    refusal: str | None = None
    """Why it cannot run this problem."""

    def __str__(self) -> str:
        return f"{self.name}, {self.engine}"


def reduction_of(problem: Problem) -> int:
    """Products of the definition that one output element sums, at most."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.WGRAD:
        return problem.batch * prod(problem.out_size)
    return (k if problem.kind is Pass.DGRAD else c) * prod(problem.kernel)


def error_of(problem: Problem, scheme: Scheme2d | None, count: int, blocks: tuple[int, ...]) -> float:
    """The error of a scheme that sums over ``count`` channels (tiles, products), cut into ``blocks``.

    A kernel that does not fill the scheme (4 taps in F(4, 5), a tile that juts out) has a smaller output, but the
    scheme's roundings: so those of the whole scheme count, against the scale of what is there.
    """
    form: Form = "weight gradient" if problem.kind is Pass.WGRAD else "forward"
    if scheme is None:
        return predicted_error(None, max(1, count), form=form, blocks=blocks)
    h, w = scheme.h, scheme.w
    taps = h.outputs * w.outputs if problem.kind is Pass.WGRAD else h.r * w.r
    whole = max(1, count) * taps
    scale = sqrt(max(1.0, whole / reduction_of(problem)))
    return scale * predicted_error(scheme, whole, form=form, blocks=blocks)
