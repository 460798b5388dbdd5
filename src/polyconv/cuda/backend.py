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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import choices, epoch, settings
from ..forking import whole
from ..once import warn_once
from ..plan.cost import resident_blocks
from ..plan.cuda import plan_cuda
from ..plan.device import why_too_old
from ..plan.plan import Plan
from ..preference import Preference
from ..problem import Problem
from ..readiness import Asked, Ready
from ..select import CONTENDERS, by_cost, worth_timing
from ..tuning import Environment, problem_key
from . import driver
from .cache import KernelCache
from .compile import cores
from .errors import CaptureError, CudaError, LaunchError, RefusedKernelError
from .first_use import Teller

if TYPE_CHECKING:
    from ..console import Progress
    from ..plan.device import CudaDevice

Planner = Callable[[Problem, "CudaDevice"], Plan]

_given_up: list[str] = []
"""Kernels that could not be used, on any GPU. Calls that were prepared with them are prepared again."""


@epoch.follow
def _kernels_given_up() -> int:
    return len(_given_up)


def _is_the_kernels(error: RefusedKernelError | LaunchError) -> bool:
    return not isinstance(error, LaunchError) or driver.blames_the_kernel(error)


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan whose kernels are loaded and whose launches are packed. Calling it enqueues them."""

    plan: Plan
    launches: tuple[driver.PreparedLaunch, ...]
    backend: CudaBackend

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
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
        self.stream = stream or self._torch_stream
        self._memory = torch.device("cuda", index)
        self._cache = cache or KernelCache()
        self._planner = planner or self._plan_or_choose
        self._prepare = lru_cache(maxsize=1024)(self._prepare_anew)
        self._planned: dict[tuple[Problem, int], tuple[CudaDevice, Plan]] = {}
        """Plans that are yet to be prepared, and the description that they were made with."""
        self._teller = Teller(self._cache.compilations, description.arch, self._cache.folder)

    def plan(self, problem: Problem, *, inference: bool = False) -> Plan:
        """What would run; makes no call to the compiler or the driver."""
        return self._planner(problem, self.description)

    def prepare(self, problem: Problem, *, inference: bool = False) -> PreparedPlan:
        """Plan, compile and load: what is left for a run is to write addresses and to launch."""
        return self._prepare(problem, epoch.now())

    def prepare_all(self, asked: Sequence[Asked], progress: Progress) -> Ready:
        """Plan all, compile what is missing side by side, then load.

        A kernel that NVRTC refuses is met again by the problems that want it, which do without it.
        """
        self._teller.tell()
        problems, number = list(dict.fromkeys(problem for problem, _ in asked)), epoch.now()
        began = time.perf_counter()
        self._planned = {(problem, number): (self.description, self.plan(problem)) for problem in problems}
        planned = time.perf_counter()
        specs = list(dict.fromkeys(kernel for _, plan in self._planned.values() for kernel in plan.kernels))
        progress.expect(len(specs))
        with suppress(RefusedKernelError):
            self._cache.get_many(
                specs, self.description.arch, "this model", lambda spec: progress.step(f"compiled {spec.symbol}")
            )
        compiled = time.perf_counter()
        try:
            for problem in problems:
                self.prepare(problem)
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

    def run(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        """Enqueue the launches that fill the outputs in ``tensors``."""
        self.prepare(problem)(tensors)

    def enqueue(self, prepared: PreparedPlan, tensors: Mapping[str, Tensor]) -> None:
        """Write the addresses of this call's tensors into the launches, and launch."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if prepared.plan.workspace_bytes:
            # Freed on return, while the kernels may still be running: the allocator gives the memory to nobody but
            # later work on the same stream.
            workspace = self.allocate(prepared.plan.workspace_bytes)
            addresses["workspace"] = workspace.data_ptr()
        stream = self.stream()
        launched = 0
        try:
            with self.device.activate():
                for launch in prepared.launches:
                    launch(addresses, stream)
                    launched += 1
        except LaunchError as error:
            if launched and addresses.get("residual") == addresses.get("y", 0):
                raise  # what was launched before may have written over an input
            self._give_up(error)
            other = self.prepare(prepared.plan.problem)
            if error.symbol in {kernel.symbol for kernel in other.plan.kernels}:
                raise
            other(tensors)

    def leaves_to_torch(self, problem: Problem, *, inference: bool = False) -> bool:
        """Never: PyTorch's convolution is not called on a CUDA tensor."""
        return False

    def explain(self, problem: Problem) -> str:
        """The plan in words."""
        return self.plan(problem).explain()

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """The candidates that may run. No weights are kept on a GPU: they are transformed where they are read."""
        plan = plan_cuda(problem, self.description, settings.current().workspace_bytes)
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def contenders(self, problem: Problem, *, inference: bool = False, most: int = CONTENDERS) -> tuple[str, ...]:
        """PyTorch's convolution is none of them: it is not called on a CUDA tensor."""
        plan = plan_cuda(problem, self.description, settings.current().workspace_bytes)
        return tuple(worth_timing(plan.candidates, most, lambda name: name.partition("_")[0]))

    def contender(self, problem: Problem, name: str, *, inference: bool = False) -> PreparedPlan:
        workspace = settings.current().workspace_bytes
        return self._settled(lambda: plan_cuda(problem, self.description, workspace, Preference(name)))

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        return problem_key(problem)

    def environment(self) -> Environment:
        """This GPU, its driver, and what its kernels are compiled with."""
        number = int(driver.call("cuDriverGetVersion"))
        version = f"{number // 1000}.{number % 1000 // 10}"
        return Environment.of_cuda(self.description.name, self.description.arch, version, driver.bindings_version())

    def allocate(self, size: int) -> Tensor | torch.UntypedStorage:
        """Scratch memory for one run.

        Without a tensor around it: in deterministic mode torch fills a new one, and kernels read nothing here that they
        have not written.
        """
        return torch.UntypedStorage(size, device=self._memory)

    def _torch_stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def _prepare_anew(self, problem: Problem, number: int) -> PreparedPlan:
        description, first = self._planned.pop((problem, number), (None, None))
        return self._settled(lambda: self.plan(problem), first if description is self.description else None)

    def _settled(self, planned: Callable[[], Plan], first: Plan | None = None) -> PreparedPlan:
        """Planned again for as long as a kernel turns out to be another than the planner believed: it learns of it.

        ``first``: what was planned already, with what is known of the device.
        """
        tried: set[str] = set()
        while True:
            plan, first = first or planned(), None
            try:
                launches = self._launches(plan)
                if not self._learns_occupancy(plan, launches):
                    return PreparedPlan(plan, launches, self)
            except (RefusedKernelError, LaunchError) as error:
                if error.symbol in tried:
                    raise
                tried.add(error.symbol)
                self._give_up(error)

    def _launches(self, plan: Plan) -> tuple[driver.PreparedLaunch, ...]:
        """Compiled, loaded and packed."""
        specs = list(dict.fromkeys(plan.kernels))
        missing = [spec.symbol for spec in specs if not self.device.has(spec)]
        if missing and self.device.captures(self.stream()):
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
        workspace = settings.current().workspace_bytes
        return choices.decide(
            problem, False, self.environment(), lambda prefer: plan_cuda(problem, device, workspace, prefer)
        )
