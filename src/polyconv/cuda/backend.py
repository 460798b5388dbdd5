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
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .. import settings
from ..autotune import preferences
from ..backend import PrepareReport, PrepareRequest, Run
from ..lowering.volume import Parts, pictures_of
from ..lowering.volume_stack import Stack
from ..lowering.volume_stack_run import stacked
from ..lowering.volume_sum import Cut
from ..lowering.volume_sum_run import summed
from ..numerics.known_weights import in_words, keeping_tolerance
from ..problem import Pass, Problem
from ..runtime import state_version
from ..runtime.fork_safety import STATE_LOCK
from ..runtime.warn_once import warn_once
from ..selection import TRIALS, Preference, by_cost, worth_timing
from ..tuning_key import Environment, problem_key
from . import driver
from .compile_log import Teller
from .errors import CaptureError, CudaError, LaunchError, RefusedKernelError
from .jit.cache import KernelCache
from .jit.compile import cores
from .launch import Enqueue, Refused, enqueuer
from .planner.cost import resident_blocks
from .planner.device import why_too_old
from .planner.plan import Plan
from .planner.planner import plan_cuda
from .planner.volumes import CudaVolumePlan, plan_volume, planned
from .weight_cache import Memory, PreparedWeights, State

if TYPE_CHECKING:
    from ..util.console import Progress
    from .planner.device import CudaDevice

Planner = Callable[[Problem, "CudaDevice"], Plan]
P = TypeVar("P", Plan, CudaVolumePlan)

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


class CudaBackend:
    """Backend of one GPU.

    Args:
        index: the GPU.
        stream: returns the handle of the stream to launch on; default: torch's current stream.
        description: the device to plan for; default: read from the driver.
        cache: kernel cache; default: that of the settings.
        planner: default: :func:`polyconv.cuda.planner.planner.plan_cuda` with autotuned or agreed preferences.
    """

    name = "cuda"

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
        self._planner = planner or self._plan_or_choose
        self._prepare = lru_cache(maxsize=1024)(self._prepare_anew)
        self._planned: dict[tuple[Problem, int], tuple[CudaDevice, Plan]] = {}
        """Plans of :meth:`prepare_all` that are not prepared yet, with the description they were made for."""
        self._teller = Teller(self._cache.compilations, description.arch, self._cache.folder)

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> Plan | CudaVolumePlan:
        """Plan that would run. Compiles and loads nothing."""
        if problem.rank == 3:
            return self._plan_volume(problem).with_plans(self._plan_picture)
        found = self._plan_picture(problem)
        return found if w is None or not problem.frozen else self._for_weights(found, w)

    def _plan_picture(self, problem: Problem) -> Plan:
        return self._planner(problem, self.description)

    def _plan_volume(self, problem: Problem) -> CudaVolumePlan:
        """Lowering of a 3-D problem to 2-D problems, which are planned individually."""
        return self._choose(problem, partial(plan_volume, problem, self.description))

    def _pictures_of(self, problem: Problem) -> tuple[Problem, ...]:
        """2-D problems that kernels run for ``problem``: itself unless it is 3-D."""
        return pictures_of(self._plan_volume(problem).parts) if problem.rank == 3 else (problem,)

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan, compile and load. A run then only writes addresses and launches."""
        if problem.rank == 3:
            return self._prepare_parts(self._plan_volume(problem).parts)
        return self.prepare_picture(problem)

    def _prepare_parts(self, parts: Parts) -> Run:
        runs = {picture: self.prepare_picture(picture) for picture in pictures_of(parts)}
        if isinstance(parts, Cut):
            return summed(parts, runs)
        assert isinstance(parts, Stack)
        return stacked(parts, runs)

    def prepare_picture(self, problem: Problem) -> PreparedPlan:
        """:meth:`prepare` for a 2-D problem; the result exposes its launches."""
        return self._prepare(problem, state_version.current())

    def prepare_all(self, asked: Sequence[PrepareRequest], progress: Progress) -> PrepareReport:
        """Plan all problems, compile missing kernels in parallel, then load. Rejected kernels are blacklisted last."""
        self._teller.tell()
        number, problems = state_version.current(), dict.fromkeys(problem for problem, _ in asked)
        pictures = list(dict.fromkeys(picture for problem in problems for picture in self._pictures_of(problem)))
        began = time.perf_counter()
        self._planned = {(problem, number): (self.description, self._plan_picture(problem)) for problem in pictures}
        planned = time.perf_counter()
        specs = list(dict.fromkeys(kernel for _, plan in self._planned.values() for kernel in plan.kernels))
        progress.expect(len(specs))
        with suppress(RefusedKernelError):
            self._cache.get_many(
                specs, self.description.arch, "this model", lambda spec: progress.step(f"compiled {spec.symbol}")
            )
        compiled = time.perf_counter()
        try:
            for problem in pictures:
                self.prepare_picture(problem)
        finally:
            self._planned.clear()
        found = self._cache.compilations.take()
        return PrepareReport(
            len(problems),
            planning=planned - began,
            kernels=len(specs),
            compiled=found.kernels,
            compiling=found.seconds,
            cores=min(found.kernels, cores()),
            longest=found.longest,
            longest_compiling=found.longest_seconds,
            loading=time.perf_counter() - compiled,
            cache=self._cache.folder,
        )

    def run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        """Enqueue the launches that fill the outputs in ``tensors``."""
        self.prepare(problem)(tensors)

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

    def _enqueue_keeping(
        self, prepared: PreparedPlan, keeping: Keeping, tensors: MutableMapping[str, Tensor], stream: int
    ) -> bool:
        """:meth:`enqueue` with a cached weight, or caching it. Returns False if the weight cannot be cached now."""
        plan, w = prepared.plan, tensors.get("owner", tensors["w"])
        if w.is_inference():  # it has no version counter
            return False
        capturing = driver.is_capturing(stream)
        weights = None if capturing else keeping.weights.find(w, stream, keeping.recipe)
        state, first = None, keeping.launches
        if weights is None:
            if not keeping.judged and plan.ways:
                judge = None if capturing else partial(self._instead, plan, tensors["w"])
                other = keeping.weights.judge(w, keeping.recipe, judge)
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
        prepared = self._settled(partial(self._plan_again, found.problem), self.weights)
        keeping = prepared.keeping
        return prepared if keeping is None else replace(prepared, keeping=replace(keeping, judged=True))

    def _for_weights(self, plan: Plan, w: Tensor) -> Plan:
        return keeping_tolerance(plan.problem, plan, w, self._plan_again)

    def _plan_again(self, problem: Problem) -> Plan:
        """Plan without preferences: ranks do not agree on plans for individual weights."""
        return plan_cuda(problem, self.description, settings.current().workspace_bytes)

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
        other = self.prepare_picture(prepared.plan.problem)
        if error.symbol in {kernel.symbol for kernel in other.plan.kernels}:
            raise error
        other(tensors)

    def is_passthrough(self, problem: Problem, *, inference: bool = False) -> bool:
        """Always False: ATen's convolution is never called on a CUDA tensor."""
        return False

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        plan = self.plan(problem)
        return plan.explain() + ("" if w is None else in_words(problem, plan, w, self._plan_again))

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """Candidates by cost. Neither depends on ``inference``."""
        plan = planned(problem, self.description, settings.current().workspace_bytes)
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def trials(self, problem: Problem, *, inference: bool = False, most: int = TRIALS) -> tuple[str, ...]:
        """Candidates for autotuning. ATen's convolution is never one of them."""
        plan = planned(problem, self.description, settings.current().workspace_bytes)
        return tuple(worth_timing(plan.candidates, most, lambda name: name.partition("_")[0]))

    def trial(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        workspace = settings.current().workspace_bytes
        if problem.rank == 3:
            return self._prepare_parts(plan_volume(problem, self.description, workspace, Preference(name)).parts)
        return self._settled(
            lambda: plan_cuda(problem, self.description, workspace, Preference(name)), PreparedWeights()
        )

    def dispatch_overhead(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        return 0.0  # ATen's convolution is not a candidate here

    def trim_memory(self) -> None:
        """No-op: torch's allocator already has the memory."""

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        return problem_key(problem)

    def environment(self) -> Environment:
        """GPU, driver version and version of the CUDA bindings."""
        number = int(driver.call("cuDriverGetVersion"))
        version = f"{number // 1000}.{number % 1000 // 10}"
        return Environment.of_cuda(self.description.name, self.description.arch, version, driver.bindings_version())

    def allocate(self, size: int) -> Memory:
        """Allocate GPU memory. Not as a tensor: in deterministic mode torch would fill it, which no kernel needs."""
        return torch.UntypedStorage(size, device=self._place)

    def _prepare_anew(self, problem: Problem, number: int) -> PreparedPlan:
        description, first = self._planned.pop((problem, number), (None, None))
        return self._settled(
            lambda: self._plan_picture(problem), self.weights, first if description is self.description else None
        )

    def _settled(
        self, planned: Callable[[], Plan], weights: PreparedWeights, first: Plan | None = None
    ) -> PreparedPlan:
        """Plan and prepare, repeatedly until all kernels load and have the occupancy that the planner assumed.

        ``weights``: weight cache for a frozen problem. ``first``: plan to begin with, made for the current description.
        """
        tried: set[str] = set()
        while True:
            plan, first = first or planned(), None
            keeps = plan.problem.frozen and plan.weights_bytes > 0
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

    def _plan_or_choose(self, problem: Problem, device: CudaDevice) -> Plan:
        return self._choose(problem, partial(plan_cuda, problem, device))

    def _choose(self, problem: Problem, plan: Callable[[int, Preference | None], P]) -> P:
        """Plan by measured or agreed preference, or else by the cost model, within the workspace limit."""
        workspace = settings.current().workspace_bytes
        return preferences.decide(problem, False, self.environment(), partial(plan, workspace))
