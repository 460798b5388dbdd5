"""Settings in compiled graphs.

``torch.compile`` traces a call once, guards on the Python values it read, and may cache the result on disk under the
graph's text. Settings are neither arguments nor in that text. So their effect is written into the graph while it is
traced, and ``settings.changes``, a text, is read so that a guard on it recompiles after a change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import settings


def _at_the_time_of_tracing() -> tuple[float | None, bool]:
    """The tolerance, if the program has set one, and whether low precision is allowed.

    A tolerance from the environment, or the default, is None in the graph: the operators read it when they run, so an
    exported program follows the process that runs it.
    """
    now = settings.current()
    return (now.tolerance if settings.changes else None), now.allow_low_precision


# What torch.compiler.assume_constant_result does; calling it would import the compiler whenever polyconv is imported.
_at_the_time_of_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def written_out(
    x: Tensor, w: Tensor, bias: Tensor | None, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """Arguments of a convolution in a graph, with the settings of the time of tracing applied."""
    changed = len(settings.changes) > 0  # read for the guard
    now, low_precision = _at_the_time_of_tracing()
    if changed and tolerance is None:
        tolerance = now
    if torch.is_autocast_enabled(x.device.type) and (low_precision or x.device.type == "cuda"):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, w))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    return x, w, bias, tolerance
