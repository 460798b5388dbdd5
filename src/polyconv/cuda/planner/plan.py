"""Plans: the planner's answer to a :class:`~polyconv.problem.Problem`.

A plan is data: kernels, sizes and parameter bytes, but no pointer, handle or tensor. The backend fills in addresses at
the offsets that :class:`PointerSlot` lists. So a plan can be printed, compared, cached for later calls with an equal
problem, executed by the emulator, or exported to a file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...numerics.prediction import Way
from ...problem import HALF_DTYPES, Pass, Problem
from ...selection import TRIALS, Candidate, Preference, why_not, worth_timing
from ...util.gpu_arch import capability
from .winograd.axis import ToomAxis

Dim3 = tuple[int, int, int]

DEFAULT_EFFICIENCY = 0.8
"""Efficiency of kernels that were not simulated."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel instance: a header in ``cuda/kernels`` and template arguments."""

    stem: str
    """Family and kernel, as in ``winograd/nonfused_gemm``; the header is ``kernels/<stem>.cuh``."""
    symbol: str
    """Name of the ``extern "C"`` entry point, readable and unique per instance."""
    body: str
    """Call that the entry point makes: ``polyconv::implicit_gemm<polyconv::GemmTile<...>>(params);``."""
    params: str
    """C++ type of the by-value parameter, for example ``polyconv::ImplicitGemmParams``."""
    params_bytes: int
    threads: int
    min_blocks: int = 1
    """Second launch bound: resident blocks per multiprocessor that the registers must allow."""
    axes: tuple[ToomAxis, ...] = ()
    """Winograd axes whose transforms the body names; their code is emitted from the exact matrices."""
    facts: tuple[tuple[str, int], ...] = ()
    """Device constants that launches rely on: C++ expression and planned value, asserted at compile time."""
    generations: Sequence[int] = range(1000)
    """Compute capabilities (70 is 7.0) with the kernel's matrix instruction at full rate; others never run it."""
    twin: str = ""
    """Symbol of the kernel whose profile serves this one too (cuda/planner/cost.py): the instance without an epilogue,
    or of the other 16-bit format."""
    dtype: str = "float32"
    """Element type of the tensors."""
    struct: type[ctypes.Structure] | None = None
    """``ctypes`` mirror of the struct in ``params``. None for a kernel from elsewhere: its size alone is asserted."""
    efficiency: float = DEFAULT_EFFICIENCY
    """Share of its bound that the kernel reaches where arithmetic, issue slots or shared memory bind."""

    def __hash__(self) -> int:
        return hash(self.symbol)  # planning looks kernels up often, and symbols are unique

    @classmethod
    def of(
        cls,
        struct: type[ctypes.Structure],
        stem: str,
        *arguments: object,
        threads: int,
        symbol: str = "",
        function: str = "",
        min_blocks: int = 1,
        axes: tuple[ToomAxis, ...] = (),
        facts: Mapping[str, int] | None = None,
        generations: Sequence[int] = range(1000),
        efficiency: float = DEFAULT_EFFICIENCY,
    ) -> KernelSpec:
        """Instance of a function or template that takes a struct of cuda/planner/kernel_params.py. By default function
        and symbol are named after the header, and the axes are those among the arguments."""
        function = function or stem.replace("/", "_")
        template = f"<{', '.join(map(_cpp, arguments))}>" if arguments else ""
        return cls(
            stem=stem,
            symbol=symbol or function,
            body=f"polyconv::{function}{template}(params);",
            params=f"polyconv::{struct.__name__}",
            params_bytes=ctypes.sizeof(struct),
            threads=threads,
            min_blocks=min_blocks,
            axes=axes or tuple(argument for argument in arguments if isinstance(argument, ToomAxis)),
            facts=tuple((facts or {}).items()),
            generations=generations,
            struct=struct,
            efficiency=efficiency,
        )

    def runs_on(self, arch: str) -> bool:
        return capability(arch) in self.generations

    def of_halves(self, dtype: str) -> KernelSpec:
        """The instance for a 16-bit format. Both formats cost the same on tensor cores that support them, so the
        profile of the first serves both."""
        first = HALF_DTYPES[0]
        twin = "" if dtype == first else f"{self.symbol}_{first}"
        return replace(self, symbol=f"{self.symbol}_{dtype}", twin=twin, dtype=dtype)

    def entry(self) -> str:
        """Source of the entry point alone."""
        return (
            f'extern "C" __global__ void __launch_bounds__({self.threads}, POLYCONV_MIN_BLOCKS({self.min_blocks}))\n'
            f"{self.symbol}(const __grid_constant__ {self.params} params) {{\n"
            f"  {self.body}\n"
            f"}}\n"
        )


def _cpp(argument: object) -> str:
    """C++ text of a template argument: a bool, an object with a ``cpp`` name, or anything printable."""
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(getattr(argument, "cpp", argument))


@dataclass(frozen=True, slots=True)
class PointerSlot:
    """Offset in the parameter bytes at which a buffer's address is stored."""

    offset: int
    buffer: str
    """``x``, ``w``, ``y``, ``bias``, ``residual``, ``dw``, ``db`` or ``workspace``; ``weights`` if the
    transformed weights have a buffer apart from the workspace."""
    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a launch, in the units of its kernel's profile (cuda/planner/cost.py)."""

    blocks: int = 0
    """Blocks that have work."""
    tiles: int = 0
    """Tiles of all blocks together; equal to ``blocks`` for kernels with one tile per block."""
    steps: int = 0
    """Iterations of the innermost loading loop, all blocks together."""
    dram_bytes: int = 0
    """DRAM traffic if each element is read and written once."""
    scattered_lines: int = 0
    """Extra L1 lines touched because elements are not adjacent, for example in a dilated row."""
    scattered_sectors: int = 0
    """Extra L2 sectors, likewise."""
    stored_singly: int = 0
    """Elements stored one at a time by a kernel that otherwise stores several."""
    finished: int = 0
    """Elements finished by an epilogue before they are stored."""
    passed_bytes: int = 0
    """Part of ``dram_bytes`` passed between launches of a slab through the workspace: free if the slab stays in L2."""
    slab_bytes: int = 0
    """Workspace bytes in use by all launches of the slab."""
    behind: int = 0
    """Trailing blocks in grid.x that compute absmax parts for later slabs. They fill idle slots of the last wave, so
    only their DRAM bytes are counted above."""


@dataclass(frozen=True, slots=True)
class Task:
    """A launch in counts: kernel, grid and work. That is enough for the cost model (cuda/planner/cost.py) and cheap to
    make, so every candidate has tasks; launches are made for the chosen candidate alone."""

    kernel: KernelSpec
    grid: Dim3
    work: Work
    times: int = 1
    """Launches that differ only in their parameters: slabs of an image, phases of a stride."""
    dynamic_shared: int = 0
    """Dynamic shared memory per block [bytes]."""

    def launch(self, params: bytes, pointers: tuple[PointerSlot, ...]) -> Launch:
        block = (self.kernel.threads, 1, 1)
        return Launch(self.kernel, self.grid, block, self.dynamic_shared, params, pointers, self.work)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch of a plan."""

    kernel: KernelSpec
    grid: Dim3
    block: Dim3
    dynamic_shared: int
    params: bytes = field(repr=False)
    pointers: tuple[PointerSlot, ...] = field(repr=False)
    work: Work = field(default=Work(), repr=False)

    def bind(self, addresses: Mapping[str, int]) -> bytes:
        """Parameter bytes with the addresses of a call's buffers in place; an absent buffer becomes null."""
        blob = bytearray(self.params)
        for slot in self.pointers:
            address = addresses.get(slot.buffer, 0)
            blob[slot.offset : slot.offset + 8] = ((address + slot.byte_offset) if address else 0).to_bytes(8, "little")
        return bytes(blob)

    def with_weights_apart(self, size: int) -> Launch:
        """The launch with the first ``size`` bytes of the workspace in the separate buffer ``weights``."""
        pointers = (
            replace(slot, buffer="weights") if slot.buffer == "workspace" and slot.byte_offset < size else slot
            for slot in self.pointers
        )
        return replace(self, pointers=tuple(pointers))

    def __str__(self) -> str:
        return f"{self.kernel.symbol} grid {self.grid} block {self.block} shared {self.dynamic_shared} B"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Launches of one candidate, in order, and the memory they need."""

    launches: tuple[Launch, ...]
    workspace_bytes: int
    weights_bytes: int = 0
    """Leading workspace bytes that the first launches compute from ``w`` alone and no other launch writes."""


def direct_name(candidate: str) -> str:
    """Algorithm name of a candidate that sums the products of the definition."""
    return f"direct ({candidate})"


ATEN = "PyTorch's convolution, ATen"
"""Name of PyTorch's convolution as a candidate (cuda/planner/aten.py)."""


class Autotunable:
    """What autotuning reads of a plan on a GPU."""

    __slots__ = ()
    candidates: tuple[Candidate, ...]

    @property
    def passthrough(self) -> bool:
        return False

    def trials(self, most: int = TRIALS) -> tuple[str, ...]:
        """Names of candidates worth timing, in the cost model's order; ATen always, where it may run."""
        return tuple(worth_timing(self.candidates, most, lambda name: name.partition("_")[0], ATEN))

    def dispatch_overhead(self, ahead: Mapping[Pass, float]) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Plan(Autotunable):
    """Launches that solve a problem, in order, and the reasons for the choice."""

    problem: Problem
    device: str
    algorithm: str
    launches: tuple[Launch, ...]
    workspace_bytes: int
    expected_error: float
    """Largest expected |ours - exact| of any element, relative to the output's scale (``numerics``)."""
    cost_us: float
    candidates: tuple[Candidate, ...]
    preference: str = ""
    """Outcome of an external preference: where the choice came from, or why the preferred candidate does not run. Or of
    the comparison with PyTorch's convolution."""
    weights_bytes: int = 0
    """Leading workspace bytes that stay valid while ``w`` is unchanged (:class:`Schedule`)."""
    ways: tuple[Way, ...] = field(default=(), repr=False)
    """How fast algorithms sum the output maps, from which the error for known weights follows."""
    prefer: Preference | None = field(default=None, repr=False, compare=False)
    """The preference that the problem was planned with."""

    @property
    def keeps_weights(self) -> bool:
        return self.problem.frozen and self.weights_bytes > 0

    def with_parts(self, plan: Callable[[Problem], Plan]) -> Plan:
        return self

    @property
    def choice(self) -> str:
        """Name of the chosen candidate, by which it can be preferred; the algorithm if there was no choice."""
        return next((one.name for one in self.candidates if one.rejected is None), self.algorithm)

    @property
    def name(self) -> str:
        return self.algorithm

    @property
    def direct(self) -> bool:
        """Whether it sums the products of the definition."""
        return self.algorithm == direct_name(self.choice)

    @property
    def predicted_error(self) -> float:
        return self.expected_error

    @property
    def cost(self) -> float:
        return self.cost_us

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return tuple(launch.kernel for launch in self.launches)

    @property
    def preparing(self) -> int:
        """Number of leading launches that fill the ``weights_bytes``; meaningless if those are 0."""
        return sum(any(slot.buffer == "w" for slot in launch.pointers) for launch in self.launches)

    def with_weights_apart(self) -> Plan:
        """The plan with the cacheable weights in a separate buffer. Workspace offsets still include their bytes."""
        return replace(self, launches=tuple(launch.with_weights_apart(self.weights_bytes) for launch in self.launches))

    def summary(self) -> list[str]:
        """Lines of text: the problem, the algorithm with its figures, the launches (repeated ones once)."""
        lines = [
            f"{self.problem}",
            f"  runs {self.algorithm} on {self.device}: {len(self.launches)} launches, "
            f"workspace {self.workspace_bytes / 2**20:.1f} MiB, expected error {self.expected_error:.1e}, "
            f"modelled cost {self.cost_us:.0f} us",
            *([f"  {self.preference}"] if self.preference else []),
        ]
        times: dict[str, int] = {}
        for launch in self.launches:
            times[str(launch)] = times.get(str(launch), 0) + 1
        return lines + [f"    {text}" + (f", {n} times" if n > 1 else "") for text, n in times.items()]

    def explain(self, *, verbose: bool = False) -> str:
        """The plan as text: what runs, and why the next best candidates (verbose: all others) do not."""
        return "\n".join([*self.summary(), *why_not(self.candidates, verbose=verbose)])
