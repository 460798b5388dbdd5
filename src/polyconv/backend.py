"""Backends: one per device, built at its first call and never at import.

The operators in :mod:`polyconv.dispatch` allocate the outputs and pass every buffer to the backend by name; the backend
only fills them. So CUDA kernels, ATen's convolution and the GPU emulator of the tests are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .problem import Pass, Problem, Shape, Strides
from .runtime.fork_safety import STATE_LOCK
from .runtime.lazy_import import imported
from .runtime.scopes import Scope, ScopeStack
from .selection import TRIALS, Candidate, Preference, by_cost

if TYPE_CHECKING:
    from .numerics.prediction import Way
    from .tuning_key import Environment
    from .util.console import Progress


class Plan(Protocol):
    """A backend's plan of a problem: the chosen candidate, and why the others do not run."""

    @property
    def problem(self) -> Problem: ...

    @property
    def choice(self) -> str:
        """Name of the chosen candidate."""

    @property
    def name(self) -> str:
        """Display name: the candidate and its additional steps."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, each but the chosen one with the reason of its rejection."""

    @property
    def preference(self) -> str:
        """Outcome of the preference; empty if there was none."""

    @property
    def predicted_error(self) -> float:
        """Predicted largest error of an element, relative to the output's scale."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """Fast algorithms of its output maps; empty for direct summation."""

    @property
    def keeps_weights(self) -> bool:
        """Whether it uses the weight cache."""

    @property
    def passthrough(self) -> bool:
        """Whether it is ATen's convolution on unchanged tensors, callable without the backend."""

    def trials(self, most: int = TRIALS) -> tuple[str, ...]:
        """Names of candidates worth timing, in the cost model's order: ``most``, the best of each kind, and ATen."""

    def dispatch_overhead(self, ahead: Mapping[Pass, float]) -> float:
        """Dispatch overhead over a direct call of ATen [s]. ``ahead``: gain over ATen in other passes of the layer."""

    def with_parts(self, plan: Callable[[Problem], Any]) -> Plan:
        """This plan with each 2-D problem of a volume planned by ``plan``, where those have plans of their own."""

    def explain(self, *, verbose: bool = False) -> str:
        """Text of the plan."""


P = TypeVar("P", bound=Plan)


class Backend(Protocol[P]):
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
    caches_weights: bool
    """Whether inference caches weights that are not frozen, so that measurements differ between the two."""

    def plan(
        self,
        problem: Problem,
        *,
        inference: bool = False,
        prefer: Preference | None = None,
        w: Tensor | None = None,
    ) -> P:
        """Plan a problem under the current settings. Preferences of the process are applied by the caller.

        With ``inference`` no gradient is recorded, so the weight of a forward pass is unlikely to change. ``w``: a
        cached weight, for which the plan keeps the tolerance.
        """

    def prepare(self, plan: P, *, trial: bool = False) -> Run:
        """Make a plan ready to run. The returned function may be called any number of times.

        It fills the outputs in ``tensors``, whose contents are undefined before, or replaces one by a tensor of the
        backend's own with equal strides. No tensor is empty. ``trial``: with a weight cache that is freed with it.
        """

    def prepare_all(self, plans: Sequence[P], progress: Progress) -> PrepareReport:
        """Prepare several plans, compiling their kernels in parallel."""

    def environment(self) -> Environment:
        """Device and software versions under which measurements are stored."""

    def new_output(self, like: Tensor, shape: Shape, strides: Strides) -> Tensor:
        """Allocate a large uninitialised output with the dtype and device of ``like``."""


_backends: dict[torch.device, Backend[Any]] = {}

_overrides: ScopeStack[tuple[str, Backend[Any]]] = ScopeStack()
BackendT = TypeVar("BackendT", bound=Backend[Any])


def backend_for(device: torch.device) -> Backend[Any]:
    """The backend of a device. The first call imports and builds it; later ones are a dictionary lookup."""
    found = _overriding(device) or _backends.get(device)
    if found is None:
        with STATE_LOCK:
            found = _backends.get(device)
            if found is None:
                found = _backends[device] = _build(device)
    return found


def backend_name(device: torch.device) -> str:
    """Name of the backend of a device, which need not be built: the device's type unless it is overridden."""
    found = _overriding(device)
    return device.type if found is None else found.name


def _overriding(device: torch.device) -> Backend[Any] | None:
    for entry in reversed(_overrides.entries):
        device_type, backend = entry.value
        if device_type == device.type:
            found: Backend[Any] = backend
            return found
    return None


def _build(device: torch.device) -> Backend[Any]:
    """Build a backend, importing everything that calls on the device need: none of them imports anything later."""
    imported("polyconv.autotune.tuning_lookup")
    if device.type == "cpu":
        on_cpu: Backend[Any] = imported("polyconv.cpu.backend").CpuBackend()
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
        on_cuda: Backend[Any] = cuda.CudaBackend(index)
        return on_cuda
    raise RuntimeError(
        f"polyconv runs on 'cuda' and 'cpu' tensors; got a tensor on {str(device)!r}. "
        "polyconv.restore(model) gives such a model torch's modules back"
    )


def candidate_names(backend: Backend[Any], problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
    """Names of the candidates that may run a problem, in the cost model's order."""
    return tuple(one.name for one in by_cost(backend.plan(problem, inference=inference).candidates))


def override(device_type: str, backend: BackendT) -> AbstractContextManager[BackendT]:
    """Send every tensor of a device type to ``backend`` inside a ``with`` block.

    For tests: a recording backend, or the CUDA backend on a virtual GPU that reads the memory of CPU tensors.
    """
    entry: tuple[str, Backend[Any]] = (device_type, backend)
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
