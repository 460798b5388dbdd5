"""What a launch can die of."""

from __future__ import annotations

from dataclasses import dataclass


class LaunchError(ValueError):
    """The launch itself is invalid: arguments, limits, shared memory. A driver would refuse it too."""


@dataclass
class Fault(Exception):  # noqa: N818 - faults are the machine's word
    """A kernel did something wrong. Subclasses say what."""

    message: str
    kernel: str
    block: tuple[int, int, int]
    thread: int | None  # linear index in the block; None when no single thread is to blame
    pc: int
    sass: str
    address: int | None = None
    other_thread: int | None = None
    thread_index: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        who = "" if self.thread is None else f", thread {self.thread} {self.thread_index}"
        where = f"kernel {self.kernel}, block {self.block}{who}, pc 0x{self.pc:04x}: {self.sass}"
        return f"{self.message}\n  {where}"

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.message, self.kernel, self.block, self.thread, self.pc, self.sass, self.address)
        return type(self), (*values, self.other_thread, self.thread_index)


class Unsupported(Fault):
    """An instruction (or modifier) that this emulator does not know."""


class OutOfBounds(Fault):
    """An access outside every registered buffer, the block's shared memory or the thread's stack."""


class Misaligned(Fault):
    """An address that is no multiple of the access width."""


class UninitialisedShared(Fault):
    """A read of shared memory that no thread of the block has written."""


class SharedRace(Fault):
    """Two threads touch a shared word, one writes, and no barrier lies between."""


class DivergentBarrier(Fault):
    """A block barrier that only part of a warp reaches, or that warps disagree about."""


class Deadlock(Fault):
    """Every thread left waits for one that will not come."""


class Trap(Fault):
    """The kernel executed a trap (``__trap()``, a failed assertion)."""


class GlobalRace(Fault):
    """Two threads of one launch stored to the same global word (only with ``check_global``)."""


class InstructionLimit(Fault):
    """A block ran longer than ``max_instructions``."""


class BadConstant(Fault):
    """A constant-bank read outside the bank."""


class BadBranch(Fault):
    """A jump out of the kernel."""


class UnfinishedCopy(Fault):
    """Shared memory was touched that an asynchronous copy may still write: its thread has not waited for it."""


# The numbers are those of core/fault.h.
BY_NUMBER: dict[int, type[Fault]] = {
    1: Unsupported,
    2: OutOfBounds,
    3: Misaligned,
    4: UninitialisedShared,
    5: SharedRace,
    6: DivergentBarrier,
    7: Deadlock,
    8: Trap,
    9: GlobalRace,
    10: InstructionLimit,
    11: BadConstant,
    12: BadBranch,
    13: UnfinishedCopy,
}
