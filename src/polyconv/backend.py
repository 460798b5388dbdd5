"""Backends: one per device, built at its first call and never at import.

The operators in :mod:`polyconv.dispatch` allocate the outputs and pass every buffer to the backend by name; the backend
only fills them. So CUDA kernels, ATen's convolution and the GPU emulator of the tests are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .problem import Pass, Problem
from .runtime.fork_safety import STATE_LOCK
from .runtime.lazy_import import imported
from .runtime.scopes import Scope, ScopeStack
from .selection import TRIALS

if TYPE_CHECKING:
    from .autotune.preferences import Planned
    from .tuning_key import Environment
    from .util.console import Progress


class Backend(Protocol):
    """Runs problems on one device.

    ======  =====================================  ============================================
    pass    reads                                  writes
    ======  =====================================  ============================================
    FPROP   ``x``, ``w``, ``bias``, ``residual``   ``y``
    DGRAD   ``y``, ``w``                           ``x``
    WGRAD   ``x``, ``y``                           ``dw``, and ``db`` when ``problem.bias``
    ======  =====================================  ============================================

    In both gradient passes ``y`` is the incoming gradient. It may have any strides, zeros included. ``bias`` is present
    if ``problem.bias``, ``residual`` if ``problem.residual``; the residual has the strides of ``y``. If ``w`` is a view
    made for this call, ``owner`` is the weight itself, by which weight caches identify it.
    """

    name: str

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan a problem under the current settings. The returned function may be called any number of times.

        It fills the outputs in ``tensors``, whose contents are undefined before, or replaces one by a tensor of the
        backend's own with equal strides. No tensor is empty. With ``inference`` no gradient is recorded, so the weight
        of a forward pass is unlikely to change.
        """

    def prepare_all(self, asked: Sequence[PrepareRequest], progress: Progress) -> PrepareReport:
        """Prepare several problems under the current settings, compiling their kernels in parallel."""

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> Planned:
        """The plan that :meth:`prepare` would run; for a cached weight, the one that keeps the tolerance for ``w``."""

    def is_passthrough(self, problem: Problem, *, inference: bool = False) -> bool:
        """Whether the plan is a passthrough: ATen's convolution on unchanged tensors, callable without the backend."""

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        """Text of the plan; with ``w``, also the predicted error of a forward pass for that weight."""

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """Names of the candidates that may run a problem, in the cost model's order."""

    def trials(self, problem: Problem, *, inference: bool = False, most: int = TRIALS) -> tuple[str, ...]:
        """Names of candidates worth timing, in the cost model's order: ``most``, the best of each kind, and ATen."""

    def trial(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        """Prepare the named candidate for a trial, whatever was chosen, with a weight cache that is freed with it."""

    def dispatch_overhead(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        """Dispatch overhead over a direct call of ATen [s]. ``ahead``: gain over ATen in other passes of the layer."""

    def trim_memory(self) -> None:
        """Return the memory of finished trials to the system."""

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        """Key under which measurements for a problem are stored."""

    def environment(self) -> Environment:
        """Device and software versions under which measurements are stored."""


_backends: dict[torch.device, Backend] = {}
_overrides: ScopeStack[tuple[str, Backend]] = ScopeStack()
BackendT = TypeVar("BackendT", bound=Backend)


def backend_for(device: torch.device) -> Backend:
    """The backend of a device. The first call imports and builds it; later ones are a dictionary lookup."""
    for entry in reversed(_overrides.entries):
        device_type, backend = entry.value
        if device_type == device.type:
            return backend
    found = _backends.get(device)
    if found is None:
        with STATE_LOCK:
            found = _backends.get(device)
            if found is None:
                found = _backends[device] = _build(device)
    return found


def _build(device: torch.device) -> Backend:
    """Build a backend, importing everything that calls on the device need: none of them imports anything later."""
    imported("polyconv.autotune.tuning_lookup")
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
        if index is None:  # only for explain(..., device="cuda"); a tensor's device always has an index
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
    return Scope(_overrides, entry, backend)


Run = Callable[[MutableMapping[str, Tensor]], None]
"""A prepared problem: fills the outputs among the named tensors of one call."""


class PrepareRequest(NamedTuple):
    """One problem to prepare."""

    problem: Problem
    inference: bool
    """Whether no gradient is recorded."""


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """Counts and times [s] of preparing several problems."""

    problems: int
    planning: float
    kernels: int = 0
    """Distinct kernels that the plans use; 0 where none need compiling."""
    compiled: int = 0
    """Kernels that were not in the cache."""
    compiling: float = 0.0
    cores: int = 0
    """Cores that compiled, each another kernel."""
    longest: str = ""
    """Kernel that took longest to compile."""
    longest_compiling: float = 0.0
    """Its time: a lower bound of ``compiling`` for any number of cores."""
    loading: float = 0.0
    cache: Path | None = None
    """Folder of the kernel cache."""
