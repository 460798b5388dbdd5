"""Runs problems on an NVIDIA GPU: plan, compile, allocate, launch.

The first run of a problem plans it, compiles what is not in the cache, loads the kernels and packs their parameters.
Every later run only writes addresses and launches. Nothing waits for the GPU: the launches go to torch's current
stream, and the workspace comes from torch's allocator, which orders memory by stream.

A kernel that cannot be compiled, loaded or launched is given up: one warning says what to report, no plan of this
process names it any more, and the next candidate runs, down to the plain direct kernels. ``POLYCONV_STRICT=on`` raises
instead. Errors that are not the kernel's (the GPU is lost, memory is short, a graph is being captured) are raised.
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

from .. import choices, epoch, settings
from ..forking import whole
from ..known_weights import in_words, keeping_tolerance
from ..once import warn_once
from ..plan.cost import resident_blocks
from ..plan.cuda import plan_cuda
from ..plan.device import why_too_old
from ..plan.plan import Plan
from ..plan.volumes import CudaVolumePlan, plan_volume, planned
from ..preference import Preference
from ..problem import Pass, Problem
from ..readiness import Asked, Ready, Run
from ..select import by_cost, worth_timing
from ..sheets import Cut
from ..stacking import stacked
from ..stacks import Stack
from ..standings import CONTENDERS
from ..summing import summed
from ..tuning import Environment, problem_key
from ..volumes import Parts, pictures_of
from . import driver
from .cache import KernelCache
from .compile import cores
from .enqueue import Enqueue, Refused, enqueuer
from .errors import CaptureError, CudaError, LaunchError, RefusedKernelError
from .first_use import Teller
from .weights import Memory, PreparedWeights, State

if TYPE_CHECKING:
    from ..console import Progress
    from ..plan.device import CudaDevice

Planner = Callable[[Problem, "CudaDevice"], Plan]
P = TypeVar("P", Plan, CudaVolumePlan)

_given_up: list[str] = []
"""Kernels that could not be used, on any GPU. Calls that were prepared with them are prepared again."""


@epoch.follow
def _kernels_given_up() -> int:
    return len(_given_up)


def _torch_stream(index: int) -> Callable[[], int]:
    """Gives the handle of torch's current stream of a GPU, without an object of torch's around it."""
    handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if handle is None:  # a build for the CPU, which plans for a GPU and has no tensor on one
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return partial(handle, index)


def _is_the_kernels(error: RefusedKernelError | LaunchError) -> bool:
    return not isinstance(error, LaunchError) or driver.blames_the_kernel(error)


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of a plan's work from call to call, because its weight is frozen."""

    weights: PreparedWeights
    """Where."""
    launches: int
    """How many launches make it, all before the others."""
    recipe: bytes
    """These launches: problems that differ elsewhere share what they make."""
    judged: bool = False
    """Whether the plan was made for the weight, and need not be asked whether it suits it."""

    @classmethod
    def of(cls, plan: Plan, weights: PreparedWeights) -> Keeping:
        first = plan.launches[: plan.preparing]
        return cls(weights, len(first), b"".join(repr((str(one), one.pointers)).encode() + one.params for one in first))


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan whose kernels are loaded and whose launches are packed. Calling it enqueues them."""

    plan: Plan
    launches: tuple[driver.PreparedLaunch, ...]
    enqueue: Enqueue
    backend: CudaBackend
    keeping: Keeping | None = None
    """None where everything is made at each call."""

    def __call__(self, tensors: MutableMapping[str, Tensor]) -> None:
        self.backend.enqueue(self, tensors)


class CudaBackend:
    """The backend of one GPU.

    Args:
        index: the GPU.
        stream: gives the handle of the stream to launch on; torch's current stream if absent.
        description: the device to plan for; read from the driver if absent.
        cache: where compiled kernels are kept; the one in the settings if absent.
        planner: makes the plan; if absent :func:`polyconv.plan.plan_cuda`, and what was measured or agreed upon.
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
        """Plans that are yet to be prepared, and the description that they were made with."""
        self._teller = Teller(self._cache.compilations, description.arch, self._cache.folder)

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> Plan | CudaVolumePlan:
        """What would run; makes no call to the compiler or the driver."""
        if problem.rank == 3:
            return self._plan_volume(problem).with_plans(self._plan_picture)
        found = self._plan_picture(problem)
        return found if w is None or not problem.frozen else self._for_weights(found, w)

    def _plan_picture(self, problem: Problem) -> Plan:
        return self._planner(problem, self.description)

    def _plan_volume(self, problem: Problem) -> CudaVolumePlan:
        """The way that is chosen; how its pictures are computed is for each of them to be chosen, too."""
        return self._choose(problem, partial(plan_volume, problem, self.description))

    def _pictures_of(self, problem: Problem) -> tuple[Problem, ...]:
        """What kernels are asked for in the place of a problem: itself, if it has two axes."""
        return pictures_of(self._plan_volume(problem).parts) if problem.rank == 3 else (problem,)

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan, compile and load: what is left for a run is to write addresses and to launch."""
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
        """The same for two axes: its launches can be looked at."""
        return self._prepare(problem, epoch.now())

    def prepare_all(self, asked: Sequence[Asked], progress: Progress) -> Ready:
        """Plan all, compile what is missing side by side, then load.

        A kernel that NVRTC refuses is met again by the problems that want it, which do without it.
        """
        self._teller.tell()
        number, problems = epoch.now(), dict.fromkeys(problem for problem, _ in asked)
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
        return Ready(
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
        # Freed on return, while the kernels may still be running: the allocator gives the memory to nobody but later
        # work on the same stream.
        memory = self.allocate(size) if size else None
        workspace = 0 if memory is None else memory.data_ptr()
        refused = prepared.enqueue(0, len(prepared.launches), stream, tensors, workspace, workspace)
        if refused is not None:
            self._go_on(prepared, tensors, stream, refused)

    def _enqueue_keeping(
        self, prepared: PreparedPlan, keeping: Keeping, tensors: MutableMapping[str, Tensor], stream: int
    ) -> bool:
        """The same, without the launches that made what is kept, or with what they make kept. False if it cannot be."""
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
        """What runs for a weight in the place of a plan that does not keep its tolerance for it. Waits for the GPU."""
        found = self._for_weights(plan, w)
        if found is plan:
            return None
        prepared = self._settled(partial(self._plan_again, found.problem), self.weights)
        keeping = prepared.keeping
        return prepared if keeping is None else replace(prepared, keeping=replace(keeping, judged=True))

    def _for_weights(self, plan: Plan, w: Tensor) -> Plan:
        return keeping_tolerance(plan.problem, plan, w, self._plan_again)

    def _plan_again(self, problem: Problem) -> Plan:
        """By the planner alone: no other rank is asked about a weight."""
        return plan_cuda(problem, self.description, settings.current().workspace_bytes)

    def _go_on(
        self, prepared: PreparedPlan, tensors: MutableMapping[str, Tensor], stream: int, refused: Refused
    ) -> None:
        """Run what comes after a plan of which a launch was refused, if that is the kernel's fault."""
        function, launched, number = refused
        status = driver.status_of(number)
        if function != driver.LAUNCH:
            raise driver.failed(function, status)
        error = prepared.launches[launched].error(status, stream)
        residual = tensors.get("residual")
        if launched and residual is not None and residual.data_ptr() == tensors["y"].data_ptr():
            raise error  # what was launched before may have written over an input
        self._give_up(error)
        other = self.prepare_picture(prepared.plan.problem)
        if error.symbol in {kernel.symbol for kernel in other.plan.kernels}:
            raise error
        other(tensors)

    def leaves_to_torch(self, problem: Problem, *, inference: bool = False) -> bool:
        """Never: PyTorch's convolution is not called on a CUDA tensor."""
        return False

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        """The plan in words."""
        plan = self.plan(problem)
        return plan.explain() + ("" if w is None else in_words(problem, plan, w, self._plan_again))

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """The candidates that may run: the same, and as dear, whether the weight is kept or not."""
        plan = planned(problem, self.description, settings.current().workspace_bytes)
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def contenders(self, problem: Problem, *, inference: bool = False, most: int = CONTENDERS) -> tuple[str, ...]:
        """PyTorch's convolution is none of them: it is not called on a CUDA tensor."""
        plan = planned(problem, self.description, settings.current().workspace_bytes)
        return tuple(worth_timing(plan.candidates, most, lambda name: name.partition("_")[0]))

    def contender(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        workspace = settings.current().workspace_bytes
        if problem.rank == 3:
            return self._prepare_parts(plan_volume(problem, self.description, workspace, Preference(name)).parts)
        return self._settled(
            lambda: plan_cuda(problem, self.description, workspace, Preference(name)), PreparedWeights()
        )

    def head_start(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        return 0.0  # PyTorch's convolution is no contender here

    def give_back(self) -> None:
        """PyTorch's allocator has it, for whoever wants it next."""

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        return problem_key(problem)

    def environment(self) -> Environment:
        """This GPU, its driver, and what its kernels are compiled with."""
        number = int(driver.call("cuDriverGetVersion"))
        version = f"{number // 1000}.{number % 1000 // 10}"
        return Environment.of_cuda(self.description.name, self.description.arch, version, driver.bindings_version())

    def allocate(self, size: int) -> Memory:
        """Scratch memory for one run.

        Without a tensor around it: in deterministic mode torch fills a new one, and kernels read nothing here that they
        have not written.
        """
        return torch.UntypedStorage(size, device=self._place)

    def _prepare_anew(self, problem: Problem, number: int) -> PreparedPlan:
        description, first = self._planned.pop((problem, number), (None, None))
        return self._settled(
            lambda: self._plan_picture(problem), self.weights, first if description is self.description else None
        )

    def _settled(
        self, planned: Callable[[], Plan], weights: PreparedWeights, first: Plan | None = None
    ) -> PreparedPlan:
        """Planned again for as long as a kernel turns out to be another than the planner believed: it learns of it.

        ``weights``: where those of a frozen problem are kept. ``first``: what was planned already, with what is known
        of the device.
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
        """Compiled, loaded and packed."""
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
        """Let no plan name the kernel that an error is about; raise the error if it is not the kernel's, or must be."""
        if settings.current().strict or not _is_the_kernels(error):
            raise error
        warn_once(
            f"{error.symbol} cannot be used here, and another kernel, which may be slower, runs instead. Please report "
            f"it, with the output of polyconv doctor ({self.environment()}): {error}"
        )
        with whole:
            epoch.changed()
            known = {**self.description.refused, error.symbol: str(error).splitlines()[0].rstrip(":")}
            self.description = replace(self.description, unusable=tuple(sorted(known.items())))
            _given_up.append(error.symbol)
            epoch.changed()

    def _learns_occupancy(self, plan: Plan, launches: tuple[driver.PreparedLaunch, ...]) -> bool:
        """Whether a multiprocessor holds fewer blocks of some launch than its cost was reckoned with."""
        fewer: dict[str, int] = {}
        with self.device.activate():
            for prepared, launch in zip(launches, plan.launches, strict=True):
                symbol, believed = launch.kernel.symbol, resident_blocks(launch, self.description)
                if believed > 1 and symbol not in fewer and (held := prepared.resident_blocks) < believed:
                    fewer[symbol] = max(1, held)
        if fewer:
            with whole:
                known = {**self.description.read, **fewer}
                self.description = replace(self.description, resident=tuple(sorted(known.items())))
        return bool(fewer)

    def _plan_or_choose(self, problem: Problem, device: CudaDevice) -> Plan:
        return self._choose(problem, partial(plan_cuda, problem, device))

    def _choose(self, problem: Problem, plan: Callable[[int, Preference | None], P]) -> P:
        """What was measured or agreed upon, or else the planner's own choice, given the workspace."""
        workspace = settings.current().workspace_bytes
        return choices.decide(problem, False, self.environment(), partial(plan, workspace))
