"""How the launches of a plan reach the driver: by one call of native code, or one after another from Python.

The native part (``csrc/cuda``) is linked with nothing of CUDA: it is given the addresses of the driver's functions. A
wheel has it, or ``python csrc/build.py`` builds it in place. Without it everything is launched just the same, at about
two microseconds more per launch: :func:`why_absent` says why, and so does ``polyconv doctor``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from torch import Tensor

from ..importing import imported
from . import driver

_MODULE = "polyconv.cuda._native"

Refused = tuple[str, int, int]
"""The function of the driver that failed, the number of the launch that it was about, and its status."""
Enqueue = Callable[[int, int, int, Mapping[str, Tensor], int, int], "Refused | None"]
"""Enqueues launches of a plan, from the first of these numbers up to the second, on a stream, by its handle. Tensors
are given by name; the last two numbers are the addresses of the workspace and of weights that lie apart from it."""


@lru_cache(maxsize=1)
def why_absent() -> str | None:
    """Loads the native part, once. None if it is there, else why not."""
    try:
        imported(_MODULE)
    except ModuleNotFoundError:
        return "this installation has no native part for CUDA (a wheel has it; in a checkout: python csrc/build.py)"
    except ImportError as error:
        return f"the native part for CUDA cannot be loaded: {error}"
    return None


def enqueuer(device: driver.Device, launches: tuple[driver.PreparedLaunch, ...]) -> Enqueue:
    """What enqueues these launches on their device."""
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
