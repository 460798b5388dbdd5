"""What a launch would spend on a V100, and the time that its busiest resource needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

SECTOR_BYTES = 32

# Cycles for which one warp instruction occupies its pipe in one of the four sub-partitions of an SM.
PIPE_CYCLES = {"fma": 2, "alu": 2, "fp64": 4, "xu": 8, "tensor": 2, "lsu": 1, "control": 1}

_FMA = {"FFMA", "FMUL", "FADD", "FFMA32I", "FMUL32I", "FADD32I", "HADD2", "IMAD"}
_FP64 = {"DFMA", "DADD", "DMUL", "DSETP"}
_XU = {"MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV"}
_TENSOR = {"HMMA"}  # HMMA.884: one of the four steps of m8n8k4, 256 multiply-adds, 128 a cycle
_SHARED = {"LDS", "STS", "ATOMS"}
_GLOBAL_LOADS = {"LDG", "LD"}
_GLOBAL_STORES = {"STG", "ST"}
_GLOBAL_ATOMICS = {"RED", "ATOMG", "ATOM"}
_LOCAL = {"LDL", "STL"}
_LSU = _SHARED | _GLOBAL_LOADS | _GLOBAL_STORES | _GLOBAL_ATOMICS | _LOCAL | {"LDC", "SHFL"}
_CONTROL = {
    *("BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "KILL", "BPT", "BSSY", "BSYNC", "BREAK", "BMOV", "WARPSYNC"),
    *("NOP", "YIELD", "NANOSLEEP", "BAR", "B2R", "DEPBAR", "MEMBAR", "ERRBAR", "CCTL", "CCTLL", "S2R", "CS2R"),
    *("MATCH", "QSPC"),
}
_OPCODES = {"fma": _FMA, "fp64": _FP64, "xu": _XU, "tensor": _TENSOR, "lsu": _LSU, "control": _CONTROL}


def pipe_of(opcode: str) -> str:
    """The pipe that an opcode (without modifiers) runs in. Everything unlisted is integer or logic: alu."""
    return next((pipe for pipe, opcodes in _OPCODES.items() if opcode in opcodes), "alu")


@dataclass(frozen=True)
class SharedTraffic:
    """Passes through the 32 banks."""

    requests: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0  # without bank conflicts

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal_wavefronts


@dataclass(frozen=True)
class GlobalTraffic:
    """Requests of global (or local) memory as they leave the warps."""

    requests: int = 0
    sectors: int = 0  # of 32 bytes
    ideal_sectors: int = 0  # the same bytes, perfectly packed
    lines: int = 0  # of 128 bytes: passes through the L1

    @property
    def coalescing(self) -> float:
        """Share of the requested sectors that the bytes asked for would fill."""
        return self.ideal_sectors / self.sectors if self.sectors else 1.0

    def __add__(self, other: GlobalTraffic) -> GlobalTraffic:
        return GlobalTraffic(
            self.requests + other.requests,
            self.sectors + other.sectors,
            self.ideal_sectors + other.ideal_sectors,
            self.lines + other.lines,
        )


@dataclass(frozen=True)
class Instruction:
    """Counts of one instruction of the kernel."""

    pc: int
    text: str
    mnemonic: str
    issued: int
    skipped: int  # issued with every lane predicated off
    lanes: int  # active lanes, summed
    requests: int
    wavefronts: int
    ideal: int
    sectors: int

    @property
    def opcode(self) -> str:
        return self.mnemonic.split(".")[0]

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal if self.opcode in _SHARED else 0


@dataclass(frozen=True)
class Report:
    """Counts of one launch, or of the part of it that was run."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    blocks_run: int
    registers: int
    shared_bytes: int
    frame_bytes: int
    issue_slots: int  # warp instructions, predicated off or not
    predicated_off: int  # of these, with no active lane
    ffma: int  # fused multiply-adds by threads: active lanes of FFMA
    opcodes: dict[str, int]  # warp instructions by mnemonic
    pipes: dict[str, int]  # warp instructions by pipe
    shared: SharedTraffic
    loads: GlobalTraffic
    stores: GlobalTraffic
    atomics: GlobalTraffic
    local: GlobalTraffic
    shuffles: int
    dram_read_bytes: int  # distinct sectors read: the least that memory must deliver
    dram_write_bytes: int
    l2_read_bytes: int  # distinct sectors read per block: what passes L2 if the L1 never forgets within a block
    instructions: tuple[Instruction, ...] = field(repr=False, default=())  # those that were executed
    scale: float = 1.0  # counts were multiplied by this

    @classmethod
    def from_counters(
        cls,
        *,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks_run: int,
        registers: int,
        shared_bytes: int,
        frame_bytes: int,
        text: list[str],
        mnemonics: list[str],
        counters: npt.NDArray[np.uint64],
        unique_read_sectors: int,
        block_unique_read_sectors: int,
        unique_written_sectors: int,
    ) -> Report:
        # Only what was executed: a launch of a few blocks must stay cheap even if the kernel is long.
        instructions = tuple(
            Instruction(16 * i, text[i], mnemonics[i], *counters[i].tolist())
            for i in np.flatnonzero(counters[:, 0]).tolist()
        )
        opcodes: dict[str, int] = {}
        pipes = dict.fromkeys(PIPE_CYCLES, 0)
        by_opcode: dict[str, list[Instruction]] = {}
        for i in instructions:
            opcodes[i.mnemonic] = opcodes.get(i.mnemonic, 0) + i.issued
            by_opcode.setdefault(i.opcode, []).append(i)
        for opcode, group in by_opcode.items():
            pipes[pipe_of(opcode)] += sum(i.issued for i in group)

        def traffic(kinds: set[str]) -> GlobalTraffic:
            chosen = [i for kind in kinds for i in by_opcode.get(kind, ())]
            return GlobalTraffic(
                sum(i.requests for i in chosen),
                sum(i.sectors for i in chosen),
                sum(i.ideal for i in chosen),
                sum(i.wavefronts for i in chosen),
            )

        shared = traffic(_SHARED)
        return cls(
            kernel=kernel,
            grid=grid,
            block=block,
            blocks_run=blocks_run,
            registers=registers,
            shared_bytes=shared_bytes,
            frame_bytes=frame_bytes,
            issue_slots=sum(i.issued for i in instructions),
            predicated_off=sum(i.skipped for i in instructions),
            ffma=sum(i.lanes for kind in ("FFMA", "FFMA32I") for i in by_opcode.get(kind, ())),
            opcodes=dict(sorted(opcodes.items(), key=lambda item: -item[1])),
            pipes=pipes,
            shared=SharedTraffic(shared.requests, shared.lines, shared.ideal_sectors),
            loads=traffic(_GLOBAL_LOADS),
            stores=traffic(_GLOBAL_STORES),
            atomics=traffic(_GLOBAL_ATOMICS),
            local=traffic(_LOCAL),
            shuffles=sum(i.issued - i.skipped for i in by_opcode.get("SHFL", ())),
            dram_read_bytes=unique_read_sectors * SECTOR_BYTES,
            dram_write_bytes=unique_written_sectors * SECTOR_BYTES,
            l2_read_bytes=block_unique_read_sectors * SECTOR_BYTES,
            instructions=instructions,
        )

    @property
    def dram_bytes(self) -> int:
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def l2_bytes_without_l1(self) -> int:
        """Traffic to L2 if no load hit in L1."""
        return (self.loads + self.stores + self.atomics + self.local).sectors * SECTOR_BYTES

    @property
    def l2_bytes(self) -> int:
        """Least traffic to L2: loads once per block and sector, stores and atomics each time."""
        return self.l2_read_bytes + (self.stores + self.atomics).sectors * SECTOR_BYTES

    def opcode_counts(self) -> dict[str, int]:
        """Warp instructions by opcode without modifiers."""
        out: dict[str, int] = {}
        for mnemonic, count in self.opcodes.items():
            opcode = mnemonic.split(".")[0]
            out[opcode] = out.get(opcode, 0) + count
        return dict(sorted(out.items(), key=lambda item: -item[1]))

    def worst_conflicts(self, count: int = 5) -> list[Instruction]:
        """The shared-memory instructions that lose most passes to bank conflicts."""
        guilty = [i for i in self.instructions if i.conflicts > 0]
        return sorted(guilty, key=lambda i: -i.conflicts)[:count]

    def worst_coalescing(self, count: int = 5) -> list[Instruction]:
        """The global accesses that ask for most sectors beyond what their bytes would fill."""
        kinds = _GLOBAL_LOADS | _GLOBAL_STORES
        guilty = [i for i in self.instructions if i.opcode in kinds and i.sectors > i.ideal]
        return sorted(guilty, key=lambda i: i.ideal - i.sectors)[:count]

    def scaled(self, total_blocks: int, dram_bytes: int | None = None) -> Report:
        """The report for `total_blocks`, if those that were run are typical.

        Distinct sectors do not scale linearly (neighbouring blocks share their rims): pass `dram_bytes` if known.
        """
        factor = total_blocks / self.blocks_run

        def times(value: int) -> int:
            return round(value * factor)

        def traffic(t: GlobalTraffic) -> GlobalTraffic:
            return GlobalTraffic(times(t.requests), times(t.sectors), times(t.ideal_sectors), times(t.lines))

        read, written = times(self.dram_read_bytes), times(self.dram_write_bytes)
        if dram_bytes is not None:
            written = min(written, dram_bytes)
            read = dram_bytes - written
        return replace(
            self,
            blocks_run=total_blocks,
            issue_slots=times(self.issue_slots),
            predicated_off=times(self.predicated_off),
            ffma=times(self.ffma),
            opcodes={k: times(v) for k, v in self.opcodes.items()},
            pipes={k: times(v) for k, v in self.pipes.items()},
            shared=SharedTraffic(
                times(self.shared.requests), times(self.shared.wavefronts), times(self.shared.ideal_wavefronts)
            ),
            loads=traffic(self.loads),
            stores=traffic(self.stores),
            atomics=traffic(self.atomics),
            local=traffic(self.local),
            shuffles=times(self.shuffles),
            dram_read_bytes=read,
            dram_write_bytes=written,
            l2_read_bytes=times(self.l2_read_bytes),
            instructions=tuple(
                replace(
                    i,
                    issued=times(i.issued),
                    skipped=times(i.skipped),
                    lanes=times(i.lanes),
                    requests=times(i.requests),
                    wavefronts=times(i.wavefronts),
                    ideal=times(i.ideal),
                    sectors=times(i.sectors),
                )
                for i in self.instructions
            ),
            scale=self.scale * factor,
        )

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["instructions"] = [asdict(i) for i in self.instructions]
        out["shared"]["conflicts"] = self.shared.conflicts
        out["dram_bytes"] = self.dram_bytes
        out["l2_bytes"] = self.l2_bytes
        return out

    def speed_of_light(
        self,
        sms: int = 80,
        clock_mhz: float = 1530,
        dram_gbs: float = 900,
        l2_bytes_per_clk: float = 2048,
        useful_ffma: int | None = None,
    ) -> SpeedOfLight:
        """The least time that each resource needs, everything else being free.

        Work is taken as perfectly spread over the SMs and their four sub-partitions: no latency, no tail of the last
        wave, no barrier. No kernel is faster than `bound_ms`; how near it comes depends on the latencies it hides.
        """
        quarter = 4 * sms
        lsu = self.shared.wavefronts + (self.loads + self.stores + self.atomics + self.local).lines + self.shuffles
        seconds_per_cycle = 1e-6 / clock_mhz
        cycles = {
            "fp32 (fma pipe)": self.pipes["fma"] * PIPE_CYCLES["fma"] / quarter,
            "alu pipe": self.pipes["alu"] * PIPE_CYCLES["alu"] / quarter,
            "fp64 pipe": self.pipes["fp64"] * PIPE_CYCLES["fp64"] / quarter,
            "xu pipe": self.pipes["xu"] * PIPE_CYCLES["xu"] / quarter,
            "tensor pipe": self.pipes["tensor"] * PIPE_CYCLES["tensor"] / quarter,
            "issue slots": self.issue_slots / quarter,
            "shared memory": self.shared.wavefronts / sms,
            "lsu / L1": lsu / sms,
            "L2": self.l2_bytes / l2_bytes_per_clk,
            "DRAM": self.dram_bytes / (dram_gbs * 1e9) / seconds_per_cycle,
        }
        rows = tuple(ResourceTime(name, c, c * seconds_per_cycle * 1e3) for name, c in cycles.items())
        useful = self.ffma if useful_ffma is None else useful_ffma
        worst_l2 = self.l2_bytes_without_l1 / l2_bytes_per_clk
        return SpeedOfLight(
            kernel=self.kernel,
            rows=rows,
            useful_cycles=useful / 32 * PIPE_CYCLES["fma"] / quarter,
            l2_without_l1_ms=worst_l2 * seconds_per_cycle * 1e3,
        )

    def __str__(self) -> str:
        total = self.issue_slots or 1
        common = list(self.opcode_counts().items())[:10]
        lines = [
            f"{self.kernel}: grid {self.grid}, block {self.block}, {self.blocks_run} blocks"
            + (f" (scaled by {self.scale:g})" if self.scale != 1.0 else ""),
            f"  {self.registers} registers, {self.shared_bytes} bytes of shared memory, {self.frame_bytes} of stack",
            f"  warp instructions {self.issue_slots:,}, of which predicated off {self.predicated_off:,}",
            "  pipes: " + ", ".join(f"{k} {v:,} ({100 * v / total:.1f} %)" for k, v in self.pipes.items() if v),
            "  opcodes: " + ", ".join(f"{k} {100 * v / total:.1f} %" for k, v in common),
            f"  thread FFMAs {self.ffma:,}",
            f"  shared memory: {self.shared.wavefronts:,} wavefronts, {self.shared.conflicts:,} of them bank conflicts",
        ]
        for name in ("loads", "stores", "atomics", "local"):
            t: GlobalTraffic = getattr(self, name)
            if t.requests:
                lines.append(
                    f"  {name}: {t.requests:,} requests, {t.sectors:,} sectors ({100 * t.coalescing:.0f} % used), "
                    f"{t.lines:,} lines"
                )
        lines.append(
            f"  L2 {self.l2_bytes:,} bytes at least, DRAM {self.dram_read_bytes:,} read and "
            f"{self.dram_write_bytes:,} written at least"
        )
        for i in self.worst_conflicts(3):
            lines.append(f"  bank conflicts at 0x{i.pc:04x}: {i.conflicts:,} of {i.wavefronts:,} wavefronts, {i.text}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ResourceTime:
    name: str
    cycles: float
    ms: float


@dataclass(frozen=True)
class SpeedOfLight:
    """Time per resource; the largest bounds the kernel."""

    kernel: str
    rows: tuple[ResourceTime, ...]
    useful_cycles: float
    l2_without_l1_ms: float  # not part of the bound: L2's time if no load hit in L1

    @property
    def binding(self) -> ResourceTime:
        return max(self.rows, key=lambda r: r.cycles)

    @property
    def bound_cycles(self) -> float:
        return self.binding.cycles

    @property
    def bound_ms(self) -> float:
        return self.binding.ms

    @property
    def fp32_share(self) -> float:
        """Useful multiply-adds as a share of what the FP32 lanes could do in the bound."""
        return self.useful_cycles / self.bound_cycles if self.bound_cycles else 0.0

    def row(self, name: str) -> ResourceTime:
        return next(r for r in self.rows if r.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "rows": {r.name: {"cycles": r.cycles, "ms": r.ms} for r in self.rows},
            "binding": self.binding.name,
            "bound_ms": self.bound_ms,
            "fp32_share": self.fp32_share,
            "l2_without_l1_ms": self.l2_without_l1_ms,
        }

    def __str__(self) -> str:
        lines = [f"{self.kernel}: at least {self.bound_ms:.4f} ms, bound by {self.binding.name}"]
        for r in sorted(self.rows, key=lambda r: -r.cycles):
            share = r.cycles / self.bound_cycles if self.bound_cycles else 0.0
            lines.append(f"  {r.name:<16} {r.cycles:>14,.0f} cycles {r.ms:>10.4f} ms {100 * share:>6.1f} %")
        lines.append(f"  useful FP32 share of the bound: {100 * self.fp32_share:.1f} %")
        lines.append(f"  (L2 if no load hit in L1: {self.l2_without_l1_ms:.4f} ms)")
        return "\n".join(lines)
