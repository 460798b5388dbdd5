"""Who runs a problem: one backend per kind of device, found at the first call and never at import.

The operators in :mod:`polyconv.ops` allocate the outputs and hand every buffer to the backend by name; the backend only
fills them. So the CUDA kernels, ATen's convolution and the emulator that stands in for a GPU in the tests are
interchangeable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from .blocks import Block, Stack
from .forking import whole
from .importing import imported
from .problem import Pass, Problem
from .readiness import Asked, Ready, Run
from .standings import CONTENDERS

if TYPE_CHECKING:
    from .choices import Planned
    from .console import Progress
    from .tuning import Environment


class Backend(Protocol):
    """Runs problems on one device.

    ======  =====================================  ============================================
    pass    reads                                  writes
    ======  =====================================  ============================================
    FPROP   ``x``, ``w``, ``bias``, ``residual``   ``y``
    DGRAD   ``y``, ``w``                           ``x``
    WGRAD   ``x``, ``y``                           ``dw``, and ``db`` when ``problem.bias``
    ======  =====================================  ============================================

    In both gradient passes ``y`` is the incoming gradient. It may have any strides, zeros included. The bias is there
    when ``problem.bias``, the residual when ``problem.residual``; the latter lies in memory exactly as ``y`` does.
    Where ``w`` is a view that was made for this call, ``owner`` is the weight: what is kept of ``w`` is kept by that.
    """

    name: str

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan a problem, under the settings of now. The result runs it, as often as it is called.

        With ``inference`` no gradient is recorded, so the weight of a forward pass is likely to stay what it is.

        It fills the outputs in ``tensors``, whose contents are undefined until then. No tensor is empty. A backend that
        has the result in memory of its own may put that tensor in the place of the output, if it has the same strides.
        """

    def prepare_all(self, asked: Sequence[Asked], progress: Progress) -> Ready:
        """Prepare many problems, under the settings of now: what is to be compiled is compiled side by side."""

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> Planned:
        """What :meth:`prepare` would run, under the settings of now; needs no tensors.

        With ``w``, what it would run for that weight, where weights are kept and so are known.
        """

    def leaves_to_torch(self, problem: Problem, *, inference: bool = False) -> bool:
        """Whether the plan is PyTorch's own convolution on the tensors as they are: then nobody need stand between."""

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        """The same in words, for people; with what there is to say of a weight in a forward pass."""

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """Names of the candidates that may run a problem, the one that the cost model thinks best first.

        With ``inference`` no gradient is recorded, so the weight of a forward pass is likely to stay what it is.
        """

    def contenders(self, problem: Problem, *, inference: bool = False, most: int = CONTENDERS) -> tuple[str, ...]:
        """Names of the candidates among which a measurement should decide, the cost model's first choice first.

        ``most``: of the backend's own kernels, but for the best of each kind; PyTorch's convolution, where it is a
        candidate at all, is there besides.
        """

    def contender(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        """What runs a problem by the candidate of that name, whatever was decided for it: one side of a race.

        What it prepares of a weight is its own, and is gone with it.
        """

    def head_start(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        """Seconds that it costs to get to a kernel of polyconv's, where PyTorch's is called as a program calls it.

        ``ahead``: seconds by which a kernel was ahead of PyTorch's in other passes of the same layer.
        """

    def give_back(self) -> None:
        """Return memory to the system that contenders took and have no more use for."""

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        """By which what was measured for a problem is found again."""

    def environment(self) -> Environment:
        """Where this backend runs, for what is measured there."""


_backends: dict[torch.device, Backend] = {}
_overrides: Stack[tuple[str, Backend]] = Stack()
BackendT = TypeVar("BackendT", bound=Backend)


def backend_for(device: torch.device) -> Backend:
    """The backend of a device. The first call for it imports and builds; later ones are a dictionary lookup."""
    for entry in reversed(_overrides.entries):
        device_type, backend = entry.value
        if device_type == device.type:
            return backend
    found = _backends.get(device)
    if found is None:
        with whole:
            found = _backends.get(device)
            if found is None:
                found = _backends[device] = _build(device)
    return found


def _build(device: torch.device) -> Backend:
    """Imports all that calls on the device will need: none of them imports anything later."""
    if device.type == "cpu":
        on_cpu: Backend = imported("polyconv.cpu.backend").CpuBackend()
        return on_cpu
    if device.type == "cuda":
        try:
            cuda = imported("polyconv.cuda.backend")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("polyconv"):
                raise
            raise RuntimeError(
                f"polyconv's CUDA kernels need the module {error.name!r}, which is not installed. Install polyconv "
                "with the extra that matches your driver: pip install 'polyconv[cu12]' or 'polyconv[cu13]'"
            ) from error
        index = device.index
        if index is None:  # only when an explanation is asked for "cuda"; a tensor always has an index
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        on_cuda: Backend = cuda.CudaBackend(index)
        return on_cuda
    raise RuntimeError(
        f"polyconv runs on 'cuda' and 'cpu' tensors; got a tensor on {str(device)!r}. "
        "polyconv.restore(model) gives such a model torch's modules back"
    )


def override(device_type: str, backend: BackendT) -> AbstractContextManager[BackendT]:
    """Send every tensor of a device type to ``backend`` inside a ``with`` block.

    For tests: a recording backend, or the CUDA backend on a virtual GPU that reads the memory of CPU tensors.
    """
    entry: tuple[str, Backend] = (device_type, backend)
    return Block(_overrides, entry, backend)
