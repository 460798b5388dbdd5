"""What a compiled graph has to say for itself.

``torch.compile`` traces a call once, guards on the Python values that it saw, and may keep the result on disk under
the text of the graph. Settings are neither arguments nor in that text. So what they decide while a graph is traced is
written into it here; and the compiler is shown the text that stands for them, so that a change compiles anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import settings


def _at_the_time_of_tracing() -> tuple[float | None, bool]:
    """The tolerance, if the program has set one, and whether low precision is allowed.

    A tolerance that comes from the environment, or from nowhere, is left open: then the operators read it when they
    run, and an exported program follows the process that runs it.
    """
    now = settings.current()
    return (now.tolerance if settings.changes else None), now.allow_low_precision


# What torch.compiler.assume_constant_result does; calling it would import the compiler whenever polyconv is imported.
_at_the_time_of_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def written_out(
    x: Tensor, w: Tensor, bias: Tensor | None, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """The arguments of a convolution, for a graph: with the settings that it is traced under."""
    changed = len(settings.changes) > 0  # read for the guard
    now, low_precision = _at_the_time_of_tracing()
    if changed and tolerance is None:
        tolerance = now
    if torch.is_autocast_enabled(x.device.type) and (low_precision or x.device.type == "cuda"):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, w))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    return x, w, bias, tolerance
