"""What will run: the answer of the planner to a :class:`~polyconv.problem.Problem`.

A plan is data. It names kernels, sizes and parameter bytes, but holds no pointer, no handle and no tensor: the
addresses are filled in by the backend, at the offsets that :class:`PointerSlot` lists. So a plan can be printed,
compared, cached for every later call with the same problem, executed by the emulator, or written into an exported file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..accuracy import Way
from ..problem import HALF_DTYPES, Problem
from ..select import Candidate, why_not
from ..tf32 import capability
from .toom import ToomAxis

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One instance of a device kernel: a stem in ``polyconv/kernels`` and its template arguments."""

    stem: str
    """The header ``kernels/<stem>.cuh`` that defines the kernel's body."""
    symbol: str
    """Plain name of the ``extern "C"`` entry point, readable and unique per instance."""
    body: str
    """The call that the entry point makes, for example ``polyconv::gather_gemm<polyconv::GemmTile<...>>(params);``."""
    params: str
    """C++ type of the one by-value parameter, for example ``polyconv::GatherParams``."""
    params_bytes: int
    threads: int
    min_blocks: int = 1
    """Blocks per multiprocessor that the registers must allow: the second launch bound."""
    axes: tuple[ToomAxis, ...] = ()
    """Fast algorithms whose transforms the body names; their text is emitted from the exact matrices."""
    facts: tuple[tuple[str, int], ...] = ()
    """What launches of this instance count with, as its header has it, and the value that they have for it."""
    generations: Sequence[int] = range(1000)
    """Compute capabilities (70 is 7.0) that have the kernel's matrix instruction at full rate; elsewhere no plan names
    it."""
    twin: str = ""
    """The symbol of a kernel whose counts hold for this one, too (plan/cost.py): the same without an epilogue, or of
    the other format of 16 bits."""
    dtype: str = "float32"
    """What its tensors are made of."""

    @classmethod
    def of(
        cls,
        struct: type[ctypes.Structure],
        function: str,
        *arguments: object,
        threads: int,
        symbol: str = "",
        stem: str = "",
        min_blocks: int = 1,
        axes: tuple[ToomAxis, ...] = (),
        facts: Mapping[str, int] | None = None,
        generations: Sequence[int] = range(1000),
    ) -> KernelSpec:
        """One of our own: it hands a struct of plan/layout.py to a function, or to a template with its arguments.

        Unless something else is said, header and entry point are called after the function, and the axes are those
        among the arguments.
        """
        template = f"<{', '.join(map(_cpp, arguments))}>" if arguments else ""
        return cls(
            stem=stem or function,
            symbol=symbol or function,
            body=f"polyconv::{function}{template}(params);",
            params=f"polyconv::{struct.__name__}",
            params_bytes=ctypes.sizeof(struct),
            threads=threads,
            min_blocks=min_blocks,
            axes=axes or tuple(argument for argument in arguments if isinstance(argument, ToomAxis)),
            facts=tuple((facts or {}).items()),
            generations=generations,
        )

    def runs_on(self, arch: str) -> bool:
        """Whether plans for GPUs of an architecture may name it."""
        return capability(arch) in self.generations

    def of_halves(self, dtype: str) -> KernelSpec:
        """The instance for tensors of a format of 16 bits.

        Both formats spend the same where there are tensor cores for them: what was counted of the first holds for both.
        """
        first = HALF_DTYPES[0]
        twin = "" if dtype == first else f"{self.symbol}_{first}"
        return replace(self, symbol=f"{self.symbol}_{dtype}", twin=twin, dtype=dtype)

    def source(self) -> str:
        """Text that instantiates the kernel, asserts that it was planned for as it is, and nothing else."""
        from .assertions import assertions

        return (
            f'#include "{self.stem}.cuh"\n#include "layout.cuh"\n\n'
            + "".join(axis.text() + "\n" for axis in dict.fromkeys(self.axes))
            + f"{assertions(self.stem, self.params, self.params_bytes, self.facts)}\n{self.entry()}"
        )

    def entry(self) -> str:
        """The entry point alone."""
        return (
            f'extern "C" __global__ void __launch_bounds__({self.threads}, POLYCONV_MIN_BLOCKS({self.min_blocks}))\n'
            f"{self.symbol}(const __grid_constant__ {self.params} params) {{\n"
            f"  {self.body}\n"
            f"}}\n"
        )


def _cpp(argument: object) -> str:
    """A template argument: a number, a flag, a text, or something that knows what it is called."""
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(getattr(argument, "cpp", argument))


@dataclass(frozen=True, slots=True)
class PointerSlot:
    """Where in the parameter bytes a buffer's address goes."""

    offset: int
    buffer: str
    """``x``, ``w``, ``y``, ``bias``, ``residual``, ``dw``, ``db`` or ``workspace``; ``weights``, where what was made of
    ``w`` lies apart from the workspace."""
    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """How much a launch does, in the units that its kernel's instructions are counted in (plan/cost.py)."""

    blocks: int = 0
    """Blocks that do anything."""
    tiles: int = 0
    """Tiles that they walk over, all blocks together; for kernels whose blocks do one each, as many as blocks."""
    steps: int = 0
    """Rounds of the innermost loop that loads, all blocks together."""
    dram_bytes: int = 0
    """Memory traffic if each element is read and written once."""
    scattered_lines: int = 0
    """Lines of the L1 that the kernel touches because its elements are not neighbours: of a dilated row, say."""
    scattered_sectors: int = 0
    """Sectors of the L2, for the same reason."""
    finished: int = 0
    """Elements that an epilogue adds to and activates before they are stored."""
    passed_bytes: int = 0
    """Of the memory traffic, what a launch of a slab leaves for another in the workspace: none, if that stays in L2."""
    slab_bytes: int = 0
    """What lies in the workspace meanwhile, of all launches of the slab."""
    behind: int = 0
    """Of the blocks along x, the last so many, which do something else. Of it only the memory traffic is in the other
    figures: such blocks fill what the others leave free."""


@dataclass(frozen=True, slots=True)
class Task:
    """A launch in counts: which kernel, how many blocks of it, how much work. That is enough to weigh it (plan/cost.py)
    and costs next to nothing, so every candidate has its tasks; launches are made for the one that is chosen."""

    kernel: KernelSpec
    grid: Dim3
    work: Work
    times: int = 1
    """Launches that differ in their parameters alone: slabs of an image, phases of a stride."""
    dynamic_shared: int = 0
    """Bytes of shared memory per block that are sized at launch."""

    def launch(self, params: bytes, pointers: tuple[PointerSlot, ...]) -> Launch:
        """One of the launches."""
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
        """The parameter bytes with the addresses of this call's buffers in place. An absent buffer becomes null."""
        blob = bytearray(self.params)
        for slot in self.pointers:
            address = addresses.get(slot.buffer, 0)
            blob[slot.offset : slot.offset + 8] = ((address + slot.byte_offset) if address else 0).to_bytes(8, "little")
        return bytes(blob)

    def with_weights_apart(self, size: int) -> Launch:
        """The same, with so many bytes of the workspace in a buffer of their own."""
        pointers = (
            replace(slot, buffer="weights") if slot.buffer == "workspace" and slot.byte_offset < size else slot
            for slot in self.pointers
        )
        return replace(self, pointers=tuple(pointers))

    def __str__(self) -> str:
        return f"{self.kernel.symbol} grid {self.grid} block {self.block} shared {self.dynamic_shared} B"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The launches that carry out one candidate, in order, and what they need."""

    launches: tuple[Launch, ...]
    workspace_bytes: int
    weights_bytes: int = 0
    """The first of these, if the first launches make them of ``w`` alone and no other launch writes to them."""


def direct_name(candidate: str) -> str:
    """What a plan calls a candidate that sums the products of the definition."""
    return f"direct ({candidate})"


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches that solve a problem, in order, and why they were chosen."""

    problem: Problem
    device: str
    algorithm: str
    launches: tuple[Launch, ...]
    workspace_bytes: int
    expected_error: float
    """The largest |ours - exact| of any element to be expected, relative to the output's scale (algebra/error.py)."""
    cost_us: float
    candidates: tuple[Candidate, ...]
    preference: str = ""
    """What became of a preference from outside: who chose what runs, or why the preferred candidate does not run."""
    weights_bytes: int = 0
    """At the beginning of the workspace: what may be kept while ``w`` stays as it is (:class:`Schedule`)."""
    ways: tuple[Way, ...] = field(default=(), repr=False)
    """How output maps are summed by fast algorithms: what the error for known weights follows from."""

    @property
    def choice(self) -> str:
        """The chosen candidate's name, by which it can be preferred."""
        return next(candidate.name for candidate in self.candidates if candidate.rejected is None)

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
        """How many launches, all before the others, make what may be kept."""
        return sum(any(slot.buffer == "w" for slot in launch.pointers) for launch in self.launches)

    def with_weights_apart(self) -> Plan:
        """The same, with what may be kept in a buffer of its own. Offsets stay, as from the beginning of both."""
        return replace(self, launches=tuple(launch.with_weights_apart(self.weights_bytes) for launch in self.launches))

    def summary(self) -> list[str]:
        """What runs, in lines: the problem, the algorithm with its figures, the launches (those that repeat, once)."""
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
        """The plan in words: what runs, and why other candidates do not: the next best, or all (verbose)."""
        return "\n".join([*self.summary(), *why_not(self.candidates, verbose=verbose)])
