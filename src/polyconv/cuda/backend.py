"""Backend of an NVIDIA GPU: plan, compile, allocate, launch.

The first run of a problem plans it, compiles kernels that are not cached, loads them and packs their parameters. Later
runs only write addresses and launch. Nothing waits for the GPU: launches go to torch's current stream, and the
workspace comes from torch's allocator, which orders memory by stream.

A kernel that cannot be compiled, loaded or launched is blacklisted: one warning says what to report, no later plan of
this process uses it, and the next candidate runs, down to the direct kernels. ``POLYCONV_STRICT=on`` raises instead.
Errors that are not the kernel's fault (lost GPU, out of memory, graph capture) are raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import settings
from ..backend import PrepareReport, Run
from ..lowering import aten
from ..lowering.base import Lowering, WeightPart
from ..numerics.known_weights import keeping_tolerance
from ..problem import Problem, Shape, Strides
from ..runtime import state_version
from ..runtime.fork_safety import STATE_LOCK
from ..runtime.warn_once import warn_once
from ..selection import PlanError, Preference
from ..tuning_key import Environment
from ..util.cpuinfo import usable_cores
from . import driver
from .compile_log import Teller
from .errors import CaptureError, CudaError, LaunchError, RefusedKernelError
from .jit.cache import KernelCache
from .launch import Enqueue, Refused, enqueuer
from .planner import volumes
from .planner.aten import AtenPlan, chosen
from .planner.cost import resident_blocks
from .planner.device import why_too_old
from .planner.plan import Plan
from .planner.planner import plan_cuda
from .planner.volumes import CudaVolumePlan
from .weight_cache import Memory, PreparedWeights, State

if TYPE_CHECKING:
    from ..util.console import Progress
    from .planner.device import CudaDevice

Planner = Callable[[Problem, "CudaDevice"], Plan]
AnyPlan = Plan | CudaVolumePlan | AtenPlan

_given_up: list[str] = []
"""Blacklisted kernels of all GPUs. Their number is part of the state version, so cached calls are prepared again."""


@state_version.include
def _kernels_given_up() -> int:
    return len(_given_up)


def _torch_stream(index: int) -> Callable[[], int]:
    """Function that returns the raw handle of torch's current stream on a GPU."""
    handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle is None:  # a CPU build of torch, which can plan for a GPU but has no CUDA tensors
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return partial(handle, index)


def _is_the_kernels(error: RefusedKernelError | LaunchError) -> bool:
    return not isinstance(error, LaunchError) or driver.blames_the_kernel(error)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Weight-cache slot of a plan whose weight is frozen."""

    weights: PreparedWeights
    launches: int
    """Number of leading launches that prepare the weight."""
    recipe: bytes
    """Cache key made of these launches: problems that differ only in the other launches share the prepared weight."""
    judged: bool = False
    """Whether the plan was made for this weight, so that its tolerance need not be checked."""
    found: Memory | None = None
    """What is cached for a part of a weight."""
    make: Callable[[], Tensor] | None = None
    """Makes the part of a weight that ``found`` was prepared from."""

    @classmethod
    def of(cls, plan: Plan, weights: PreparedWeights) -> Keeping:
        first = plan.launches[: plan.preparing]
        return cls(weights, len(first), b"".join(repr((str(one), one.pointers)).encode() + one.params for one in first))


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan with loaded kernels and packed launches. Calling it enqueues them."""

    plan: Plan
    launches: tuple[driver.PreparedLaunch, ...]
    enqueue: Enqueue
    backend: CudaBackend
    keeping: Keeping | None = None
    """None if the weight is prepared at each call."""

    def __call__(self, tensors: MutableMapping[str, Tensor]) -> None:
        self.backend.enqueue(self, tensors)

    def with_part(self, tensors: dict[str, Tensor], part: WeightPart) -> None:
        """Run with a part of a weight, which is not made if its prepared form is cached."""
        self.backend.enqueue_with_part(self, tensors, part)


class CudaBackend:
    """Backend of one GPU.

    Args:
        index: the GPU.
        stream: returns the handle of the stream to launch on; default: torch's current stream.
        description: the device to plan for; default: read from the driver.
        cache: kernel cache; default: that of the settings.
        planner: plans 2-D problems, whatever is preferred; default: :func:`polyconv.cuda.planner.planner.plan_cuda`.
    """

    name = "cuda"
    caches_weights = False

    def __init__(
        self,
        index: int = 0,
        *,
        stream: Callable[[], int] | None = None,
        description: CudaDevice | None = None,
        cache: KernelCache | None = None,
        planner: Planner | None = None,
    ) -> None:
        if description is None:
            from .device import describe

            description = describe(index)
        if too_old := why_too_old(description.arch, description.name):
            raise CudaError(too_old)
        self.index = index
        self.description = description
        self.device = driver.device(index)
        self.stream = stream or _torch_stream(index)
        self._place = torch.device("cuda", index)
        self.weights = PreparedWeights()
        self._cache = cache or KernelCache()
        self._planner = planner
        self._teller = Teller(self._cache.compilations, description.arch, self._cache.folder)

    def plan(
        self,
        problem: Problem,
        *,
        inference: bool = False,
        prefer: Preference | None = None,
        w: Tensor | None = None,
    ) -> AnyPlan:
        """Plan within the workspace limit. Nothing depends on ``inference``; nothing is compiled or loaded."""
        if self._planner is not None and problem.rank == 2:
            return self._planner(problem, self.description)
        found = chosen(problem, self.description, settings.current().workspace_bytes, prefer)
        return self._for_weights(found, w) if w is not None and problem.frozen and isinstance(found, Plan) else found

    def is_ahead(self, lowering: Lowering, other: Lowering | None) -> bool:
        """Whether a lowering is modelled to take no longer than another of its problem, or than the problem itself."""
        return volumes.is_ahead(lowering, other, self.description, settings.current().workspace_bytes)

    def prepare(self, plan: AnyPlan, *, trial: bool = False) -> Run:
        """Compile and load. A run then only writes addresses and launches."""
        if isinstance(plan, AtenPlan):
            return partial(aten.run, plan.problem)
        if isinstance(plan, CudaVolumePlan):
            weights, frozen = PreparedWeights() if trial else self.weights, plan.problem.frozen
            try:
                runs = {
                    part: self.prepare_launches(own, weights, part_of_frozen=frozen) for part, own in plan.plans.items()
                }
            except PlanError:  # all kernels of this lowering were given up
                return self.prepare(self.plan(plan.problem), trial=trial)
            return plan.parts.adapt(runs)
        return self.prepare_launches(plan, PreparedWeights() if trial else self.weights)

    def prepare_all(self, plans: Sequence[AnyPlan], progress: Progress) -> PrepareReport:
        """Compile missing kernels in parallel, then load. Rejected kernels are blacklisted last."""
        self._teller.tell()
        own = [plan for plan in plans if not isinstance(plan, AtenPlan)]
        parts = [
            part for plan in own for part in (plan.plans.values() if isinstance(plan, CudaVolumePlan) else (plan,))
        ]
        specs = list(dict.fromkeys(kernel for plan in parts for kernel in plan.kernels))
        progress.expect(len(specs))
        with suppress(RefusedKernelError):
            self._cache.get_many(
                specs, self.description.arch, "this model", lambda spec: progress.step(f"compiled {spec.symbol}")
            )
        compiled = time.perf_counter()
        for plan in parts:
            self.prepare(plan)
        found = self._cache.compilations.take()
        return PrepareReport(
            len(plans),
            planning=0.0,
            kernels=len(specs),
            compiled=found.kernels,
            compiling=found.seconds,
            cores=min(found.kernels, usable_cores()),
            longest=found.longest,
            longest_compiling=found.longest_seconds,
            loading=time.perf_counter() - compiled,
            cache=self._cache.folder,
        )

    def run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        """Enqueue the launches that fill the outputs in ``tensors``."""
        self.prepare(self.plan(problem))(tensors)

    def enqueue(self, prepared: PreparedPlan, tensors: MutableMapping[str, Tensor]) -> None:
        """Write the addresses of this call's tensors into the launches, and launch."""
        stream = self.stream()
        if prepared.keeping is not None and self._enqueue_keeping(prepared, prepared.keeping, tensors, stream):
            return
        size = prepared.plan.workspace_bytes
        # Freed while kernels may still be running: the allocator reuses it only for later work on the same stream.
        memory = self.allocate(size) if size else None
        workspace = 0 if memory is None else memory.data_ptr()
        refused = prepared.enqueue(0, len(prepared.launches), stream, tensors, workspace, workspace)
        if refused is not None:
            self._go_on(prepared, tensors, stream, refused)

    def enqueue_with_part(self, prepared: PreparedPlan, tensors: dict[str, Tensor], part: WeightPart) -> None:
        """:meth:`enqueue` with a part of a weight as ``w``. The tolerance is that for even weights."""
        keeping, found = prepared.keeping, None
        if keeping is not None:
            recipe, stream = keeping.recipe + part.name, self.stream()
            if not part.owner.is_inference() and not driver.is_capturing(stream):
                found = keeping.weights.find(part.owner, stream, recipe)
            keeping = Keeping(keeping.weights, keeping.launches, recipe, True, found, part.make)
            prepared = replace(prepared, keeping=keeping)
            tensors["owner"] = part.owner
        if found is None:
            tensors["w"] = part.make()
        self.enqueue(prepared, tensors)

    def _enqueue_keeping(
        self, prepared: PreparedPlan, keeping: Keeping, tensors: MutableMapping[str, Tensor], stream: int
    ) -> bool:
        """:meth:`enqueue` with a cached weight, or caching it. Returns False if the weight cannot be cached now."""
        plan, w = prepared.plan, tensors["owner"] if "owner" in tensors else tensors["w"]
        if w.is_inference():  # it has no version counter
            return False
        capturing = driver.is_capturing(stream)
        weights = keeping.found
        if weights is None and not capturing:
            weights = keeping.weights.find(w, stream, keeping.recipe)
        state, first = None, keeping.launches
        if weights is None:
            if not keeping.judged and plan.ways:
                judge = None if capturing else partial(self._instead, plan, tensors["w"])
                other = keeping.weights.judge(w, keeping.recipe, plan.problem, judge)
                if other is not None:
                    other(tensors)
                    return True
            if capturing:
                return False
            state, first = State.of(w), 0
            if state is None:
                return False
            weights = self.allocate(plan.weights_bytes)
        size = plan.workspace_bytes - plan.weights_bytes
        memory = self.allocate(size) if size else None
        workspace = 0 if memory is None else memory.data_ptr() - plan.weights_bytes
        refused = prepared.enqueue(first, len(prepared.launches), stream, tensors, workspace, weights.data_ptr())
        if refused is not None:
            self._go_on(prepared, tensors, stream, refused)
        elif state is not None:
            keeping.weights.keep(w, stream, keeping.recipe, state, weights, plan.weights_bytes)
        return True

    def _instead(self, plan: Plan, w: Tensor) -> Run | None:
        """Replacement for a plan that exceeds its tolerance for this weight; None if it does not. Waits for the GPU."""
        found = self._for_weights(plan, w)
        if found is plan:
            return None
        prepared = self.prepare_launches(found, self.weights)
        keeping = prepared.keeping
        return prepared if keeping is None else replace(prepared, keeping=replace(keeping, judged=True))

    def _for_weights(self, plan: Plan, w: Tensor) -> Plan:
        """The plan that keeps the tolerance for a weight. Ranks do not agree on plans for individual weights."""
        workspace = settings.current().workspace_bytes
        return keeping_tolerance(plan.problem, plan, w, lambda asked: plan_cuda(asked, self.description, workspace))

    def _go_on(
        self, prepared: PreparedPlan, tensors: MutableMapping[str, Tensor], stream: int, refused: Refused
    ) -> None:
        """Handle a refused launch: run the next plan if the kernel is at fault, else raise."""
        function, launched, number = refused
        status = driver.status_of(number)
        if function != driver.LAUNCH:
            raise driver.failed(function, status)
        error = prepared.launches[launched].error(status, stream)
        residual = tensors.get("residual")
        if launched and residual is not None and residual.data_ptr() == tensors["y"].data_ptr():
            raise error  # earlier launches may have overwritten the residual
        self._give_up(error)
        if prepared.keeping is not None and prepared.keeping.make is not None:
            tensors["w"] = prepared.keeping.make()
        try:
            other = self.prepare_launches(self._plan_again(prepared.plan), self.weights)
        except PlanError:
            if prepared.plan.problem.rank == 2:
                raise
            self.prepare(self.plan(prepared.plan.problem))(tensors)  # lowered to 2-D problems
            return
        if error.symbol in {kernel.symbol for kernel in other.plan.kernels}:
            raise error
        other(tensors)

    def environment(self) -> Environment:
        """GPU, driver version and version of the CUDA bindings."""
        number = int(driver.call("cuDriverGetVersion"))
        version = f"{number // 1000}.{number % 1000 // 10}"
        return Environment.of_cuda(self.description.name, self.description.arch, version, driver.bindings_version())

    def allocate(self, size: int) -> Memory:
        """Allocate GPU memory. Not as a tensor: in deterministic mode torch would fill it, which no kernel needs."""
        return torch.UntypedStorage(size, device=self._place)

    def new_output(self, like: Tensor, shape: Shape, strides: Strides) -> Tensor:
        return like.new_empty_strided(shape, strides)

    def prepare_launches(self, plan: Plan, weights: PreparedWeights, *, part_of_frozen: bool = False) -> PreparedPlan:
        """Prepare a 2-D plan. Plan again until all kernels load and have the occupancy that the planner assumed.

        ``weights``: weight cache for a frozen problem, or one whose weight is a ``part_of_frozen``.
        """
        tried: set[str] = set()
        while True:
            keeps = (plan.problem.frozen or part_of_frozen) and plan.weights_bytes > 0
            if keeps:
                plan = plan.with_weights_apart()
            try:
                launches = self._launches(plan)
                if not self._learns_occupancy(plan, launches):
                    enqueue = enqueuer(self.device, launches)
                    return PreparedPlan(plan, launches, enqueue, self, Keeping.of(plan, weights) if keeps else None)
            except (RefusedKernelError, LaunchError) as error:
                if error.symbol in tried:
                    raise
                tried.add(error.symbol)
                self._give_up(error)
            plan = self._plan_again(plan)

    def _plan_again(self, plan: Plan) -> Plan:
        """Plan the problem of a plan again, with its preference, after the description of the device changed."""
        if plan.problem.rank == 3:
            return plan_cuda(plan.problem, self.description, settings.current().workspace_bytes, plan.prefer)
        found = self.plan(plan.problem, prefer=plan.prefer)
        assert isinstance(found, Plan)
        return found

    def _launches(self, plan: Plan) -> tuple[driver.PreparedLaunch, ...]:
        """Compile, load and pack the launches of a plan."""
        specs = list(dict.fromkeys(plan.kernels))
        missing = [spec.symbol for spec in specs if not self.device.has(spec)]
        if missing and driver.is_capturing(self.stream()):
            raise CaptureError(
                f"{plan.problem} runs for the first time while a CUDA graph is captured, and kernels cannot be loaded "
                f"then ({', '.join(missing)}): run the model once before capture, on tensors of the same shapes, or "
                "call polyconv.warmup(model, x)"
            )
        codes = self._cache.get_many(specs, self.description.arch, wanted_for=str(plan.problem))
        self._teller.listen()
        kernels = {spec: self.device.load(spec, code) for spec, code in zip(specs, codes, strict=True)}
        with self.device.activate(), driver.relaxed():
            return tuple(driver.PreparedLaunch(kernels[launch.kernel], launch) for launch in plan.launches)

    def _give_up(self, error: RefusedKernelError | LaunchError) -> None:
        """Blacklist the kernel of an error. Raises the error if the kernel is not at fault, or in strict mode."""
        if settings.current().strict or not _is_the_kernels(error):
            raise error
        warn_once(
            f"{error.symbol} cannot be used here, and another kernel, which may be slower, runs instead. Please report "
            f"it, with the output of polyconv doctor ({self.environment()}): {error}"
        )
        with STATE_LOCK:
            state_version.changed()
            known = {**self.description.refused, error.symbol: str(error).splitlines()[0].rstrip(":")}
            self.description = replace(self.description, unusable=tuple(sorted(known.items())))
            _given_up.append(error.symbol)
            state_version.changed()

    def _learns_occupancy(self, plan: Plan, launches: tuple[driver.PreparedLaunch, ...]) -> bool:
        """Record kernels with a lower occupancy [blocks per SM] than the cost model assumed. Returns whether any."""
        fewer: dict[str, int] = {}
        with self.device.activate():
            for prepared, launch in zip(launches, plan.launches, strict=True):
                symbol, believed = launch.kernel.symbol, resident_blocks(launch, self.description)
                if believed > 1 and symbol not in fewer and (held := prepared.resident_blocks) < believed:
                    fewer[symbol] = max(1, held)
        if fewer:
            with STATE_LOCK:
                known = {**self.description.read, **fewer}
                self.description = replace(self.description, resident=tuple(sorted(known.items())))
        return bool(fewer)
