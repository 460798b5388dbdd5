"""Enqueue the launches of a plan: in one call of native code, or one by one from Python.

The native part (``csrc/cuda``) does not link to CUDA: it receives the addresses of the driver's functions. A wheel
contains it, and ``python csrc/build.py`` builds it in place. Without it a launch takes about two microseconds longer;
:func:`why_absent` and ``polyconv doctor`` say why it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from torch import Tensor

from ..runtime.lazy_import import imported
from . import driver

_MODULE = "polyconv.cuda._native"

Refused = tuple[str, int, int]
"""Failed launch: name of the driver function, index of the launch, status."""
Enqueue = Callable[[int, int, int, Mapping[str, Tensor], int, int], "Refused | None"]
"""``enqueue(first, last, stream, tensors, workspace, weights)``: launches from ``first`` up to, not including, ``last``
on the stream with this handle. ``workspace`` and ``weights`` (cached apart from it) are addresses."""


@lru_cache(maxsize=1)
def why_absent() -> str | None:
    """Load the native part, once. Returns None if it is there, else why not."""
    try:
        imported(_MODULE)
    except ModuleNotFoundError:
        return "this installation has no native part for CUDA (a wheel has it; in a checkout: python csrc/build.py)"
    except ImportError as error:
        return f"the native part for CUDA cannot be loaded: {error}"
    return None


def enqueuer(device: driver.Device, launches: tuple[driver.PreparedLaunch, ...]) -> Enqueue:
    if why_absent() is not None:
        return partial(_one_by_one, device, launches)
    described = tuple(launch.described() for launch in launches)
    enqueue: Enqueue = imported(_MODULE).Launches(driver.entry_points(), device.context_address, described).enqueue
    return enqueue


def _one_by_one(
    device: driver.Device,
    launches: tuple[driver.PreparedLaunch, ...],
    first: int,
    last: int,
    stream: int,
    tensors: Mapping[str, Tensor],
    workspace: int,
    weights: int,
) -> Refused | None:
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    addresses |= {"workspace": workspace, "weights": weights}
    with device.activate():
        for number in range(first, last):
            if status := launches[number].enqueue(addresses, stream):
                return driver.LAUNCH, number, int(status)
    return None
