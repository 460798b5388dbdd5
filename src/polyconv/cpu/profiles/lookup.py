"""Choice of the profile: this machine's own, measured by ``polyconv calibrate``, before the shipped ones.

Among the latter that of the same processor is used or, with more uncertainty, one of the same instruction set. A
machine's own profile falls back on the shipped one, because sixty seconds do not measure everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from math import log2, sqrt
from pathlib import Path
from typing import TypeVar

import torch

from ... import settings
from ...runtime.warn_once import warn_once
from ...util.cpuinfo import processor_model, processor_name
from ...version import __version__
from .file import ProfileError, Section, load
from .lines import parse_lines
from .profile import Profile

STRANGER = 0.3
"""Uncertainty for another processor than the measured one."""
PER_DOUBLING = 0.1
"""Uncertainty per doubling or halving of the number of threads."""
OF_FEWER_THREADS = 0.3
"""Uncertainty per doubling of the threads for a prior of fewer threads: the scatter of the errors' differences in the
3,588 kernels that were measured with both one thread and two."""
NEWLY_MEASURED = 0.1
"""Uncertainty of a shipped profile of the same processor: another machine, another day."""


def in_force(instruction_set: str, threads: int) -> Profile | None:
    """Profile of the current processor with the native kernels' instruction set; None if the setting is ``off``."""
    named = settings.current().profile
    if named == "off":
        return None
    path = own_file() if named or settings.current().cache_dir else None
    return _in_force(instruction_set, threads, processor_model(), path)


def own_file() -> Path:
    """Default output file of ``polyconv calibrate``."""
    named = settings.current().profile
    return settings.cache_file("profile.json") if named is None or named == "off" else named


@lru_cache(maxsize=16)
def _in_force(instruction_set: str, threads: int, model: str, path: Path | None) -> Profile:
    alike = shipped(instruction_set)
    of_this = [section for section in alike if section.model == model]
    found = _nearest(of_this or alike, threads)
    behind = None if found is None else _profile(found, of_this or alike)
    distance = _distance(found, threads) if of_this else sqrt(STRANGER**2 + _distance(found, threads) ** 2)
    mine = [s for s in _own_sections(path) if s.instruction_set == instruction_set and s.model == model]
    own = _nearest(mine, threads)
    if own is not None:
        return Profile(f"{own}, measured here", own.records, behind, max(distance, NEWLY_MEASURED))
    if behind is not None and not distance:
        return behind
    here = f"{processor_name()} ({model})"
    unlike = f"{threads} threads" if of_this else here
    name = f"{here}, which was not measured" if behind is None else f"{behind}, taken for {unlike}"
    return Profile(name, (), behind, distance)


def _profile(known: Known, alike: Iterable[Known]) -> Profile:
    """A shipped profile. Its prior is one of the same processor and fewer threads, with which more layers were
    measured."""
    section = known.read()
    fewer = [other for other in alike if other.model == known.model and other.threads < known.threads]
    nearest = _nearest(fewer, known.threads)
    if nearest is None:
        return Profile(str(section), section.records)
    doubt = OF_FEWER_THREADS * log2(known.threads / nearest.threads)
    return Profile(str(section), section.records, _profile(nearest, fewer), doubt)


@dataclass(frozen=True, slots=True)
class Known:
    """A shipped section, not read yet. Its file name describes it: ``GenuineIntel 6 85 avx512 1.json``."""

    model: str
    threads: int
    read: Callable[[], Section]


M = TypeVar("M", Section, Known)


def _nearest(sections: Iterable[M], threads: int) -> M | None:
    return min(sections, key=lambda section: _distance(section, threads), default=None)


def _distance(section: Section | Known | None, threads: int) -> float:
    return 0.0 if section is None else PER_DOUBLING * abs(log2(section.threads / threads))


@lru_cache(maxsize=4)
def shipped(instruction_set: str) -> tuple[Known, ...]:
    """Shipped profiles for an instruction set."""
    found = []
    for entry in sorted(files(__package__).joinpath("shipped").iterdir(), key=lambda entry: entry.name):
        model, _, rest = entry.name.removesuffix(".json").rpartition(f" {instruction_set} ")
        if model:
            found.append(Known(model, int(rest), partial(parse_lines, entry.read_bytes, entry.name)))
    return tuple(found)


def _own_sections(path: Path | None) -> tuple[Section, ...]:
    """Sections for the current versions of polyconv and torch. Warns once about an unreadable file."""
    if path is None:
        return ()
    try:
        sections = load(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if settings.current().profile is None:
            return ()
        sections = ()
        _ignore(f"{path} cannot be read")
    except (ProfileError, OSError) as error:
        sections = ()
        _ignore(str(error))
    here = {"polyconv": __version__, "torch": str(torch.__version__)}
    return tuple(s for s in sections if here.items() <= s.environment.items())


def _ignore(problem: str) -> None:
    warn_once(
        f"polyconv ignores a profile: {problem}. What is shipped decides instead; set POLYCONV_PROFILE to a file that "
        "`polyconv calibrate` wrote, or to off"
    )
