"""Name, model and cores of the processor, and how many of the cores this process may use.

A container sees all cores of its node. What limits it is affinity, or the quota or the cpuset of a control group, its
own or one around it. PyTorch starts as many threads as the affinity has cores, whatever the quota.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_ARM = {"CPU implementer", "CPU part"}
_ARM_NAMES = {
    "ARM 0x41 0xd08": "Cortex-A72",
    "ARM 0x41 0xd0b": "Cortex-A76",
    "ARM 0x41 0xd0c": "Neoverse N1",
    "ARM 0x41 0xd40": "Neoverse V1",
    "ARM 0x41 0xd42": "Cortex-A78AE",
    "ARM 0x41 0xd49": "Neoverse N2",
    "ARM 0x41 0xd4f": "Neoverse V2",
    "ARM 0x41 0xd84": "Neoverse V3",
    "ARM 0x41 0xd8e": "Neoverse N3",
    "ARM 0xc0 0xac3": "Ampere-1",
    "ARM 0xc0 0xac4": "Ampere-1A",
}
"""Linux tells implementer and part alone. Graviton 2, 3 and 4 are Neoverse N1, V1 and V2, as is Grace."""


@lru_cache(maxsize=4)
def _cpuinfo(path: Path) -> dict[str, str]:
    """Linux's description of the first core. Cached: plans need it, and many cores make a long file."""
    try:
        first, _, _ = path.read_text().partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name; on ARM with Linux that of its design, or its model; ``CPU`` if unknown."""
    found = _cpuinfo(cpuinfo)
    if found.keys() >= _ARM and "model name" not in found:
        model = processor_model(cpuinfo)
        return _ARM_NAMES.get(model, model)
    return found.get("model name") or _brand() or "CPU"


def processor_model(cpuinfo: Path = _CPUINFO) -> str:
    """Vendor, family and model: ``GenuineIntel 6 85``. Cloud machines report many names for one model, or none. On ARM
    implementer and part, of the first core: ``ARM 0x41 0xd0c``. On a Mac the name, ``Apple M1``."""
    found = _cpuinfo(cpuinfo)
    if found.keys() >= _ARM:
        return f"ARM {found['CPU implementer']} {found['CPU part']}"
    if not found and (brand := _brand()):
        return brand
    return " ".join(found.get(name, "?") for name in ("vendor_id", "cpu family", "model"))


@lru_cache(maxsize=1)
def _brand() -> str:
    """The processor's name on a Mac; empty elsewhere."""
    if sys.platform != "darwin":
        return ""
    try:
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def usable_cores() -> int:
    """Threads that can compute at the same time under :func:`cpu_limit`."""
    return max(1, math.ceil(cpu_limit().cores))


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """Cores that a process may use, a fraction under a quota, and what limits them."""

    cores: float
    source: str

    def too_many(self, threads: int) -> str:
        """One sentence about threads that exceed the limit; empty if they do not."""
        fitting = max(1, int(self.cores))
        if threads <= fitting:
            return ""
        return (
            f"PyTorch runs {threads} threads, but {self.source} allows {self.cores:.3g} cores, and threads that are "
            f"held back delay all others: set OMP_NUM_THREADS={fitting}, or call torch.set_num_threads({fitting})"
        )


def cpu_limit(root: Path = Path("/")) -> CpuLimit:
    """The tightest limit of this process; all cores where the system does not tell, as macOS and Windows."""
    found = [CpuLimit(os.cpu_count() or 1, "the machine")]
    if hasattr(os, "sched_getaffinity"):
        found.append(CpuLimit(len(os.sched_getaffinity(0)), "the affinity of this process"))
    with contextlib.suppress(ValueError):  # files of a form that Linux does not write
        for folder in _control_groups(root / "proc/self", root):
            found += _limits(folder)
    return min(found, key=lambda limit: limit.cores)


def _control_groups(process: Path, root: Path) -> Iterator[Path]:
    """Folders of a process's control groups that can limit its cores, and of the groups around them."""
    groups: dict[str, str] = {}
    for line in _text(process / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), group))  # version 2 names no controller
    for line in _text(process / "mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        (_, _, _, inside, place, *_), (kind, _, options) = mount.split(), system.split(maxsplit=2)
        names = {"cgroup": {"cpu", "cpuset"} & set(options.split(",")), "cgroup2": {""}}.get(kind, set())
        for group in {groups[name] for name in names if name in groups}:
            top = root / place.lstrip("/")
            yield top
            folder = top
            for part in Path(group.removeprefix(inside.rstrip("/"))).parts:
                folder = folder / part.strip("/")
                yield folder


def _limits(group: Path) -> Iterator[CpuLimit]:
    quota = _text(group / "cpu.max") or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
    words = [int(word) for word in quota.split() if word.isdecimal()]  # neither "max" nor -1
    if len(words) == 2 and words[1]:
        yield CpuLimit(words[0] / words[1], "the CPU quota of its control group")
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        if cores := _count(_text(group / name)):
            yield CpuLimit(cores, "the cpuset of its control group")


def _count(cpus: str) -> int:
    """Number of cores in a list such as ``0-3,8``."""
    ends = [[int(end) for end in part.split("-")] for part in cpus.strip().split(",") if part]
    return sum(last - first + 1 for first, *_, last in ([*pair, pair[-1]] for pair in ends))


def _text(path: Path) -> str:
    """Contents of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
