"""Name, model and cores of the processor."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@lru_cache(maxsize=4)
def _cpuinfo(path: Path) -> dict[str, str]:
    """Linux's description of the first core. Cached: plans need it, and many cores make a long file."""
    try:
        first, _, _ = path.read_text().partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name in Linux; ``CPU`` if unknown."""
    return _cpuinfo(cpuinfo).get("model name", "CPU")


def processor_model(cpuinfo: Path = _CPUINFO) -> str:
    """Vendor, family and model: ``GenuineIntel 6 85``. Cloud machines report many names for one model, or none."""
    found = _cpuinfo(cpuinfo)
    return " ".join(found.get(name, "?") for name in ("vendor_id", "cpu family", "model"))


def usable_cores() -> int:
    """Cores that this process may use; all of them where the system does not tell, as macOS and Windows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
