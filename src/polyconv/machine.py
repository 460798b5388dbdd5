"""The machine that something was measured on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=4)
def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as Linux knows it; read once: a plan asks for it, and many cores make a long file."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
