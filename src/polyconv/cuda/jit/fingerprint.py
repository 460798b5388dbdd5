"""Keys of compiled kernels, independent of the machine that compiled them.

:func:`identity` covers source, headers, options and architecture, but not the compiler: a machine without one can look
up kernels that were compiled elsewhere. With compiler and flags, everything that can change the binary, it is a
fingerprint: the key of the cache (:meth:`~polyconv.cuda.jit.cache.KernelCache.facts`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..planner import codegen
from ..planner.plan import KernelSpec
from .compile import OPTIONS

SCHEMA = 2
"""To be increased when the layout of an entry or the meaning of a fingerprint changes."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


class Headers:
    """Headers in a search path, each read once: later edits are not noticed."""

    def __init__(self, search: Sequence[Path]) -> None:
        self._search = search
        self._known: dict[tuple[str, ...], dict[str, str]] = {}
        self._read = cache(self._read_header)

    def included_by(self, source: str) -> dict[str, str]:
        """SHA-256 of every header that the source includes, directly or not, by the name in its ``#include``.

        As NVRTC under ``--no-source-include``, it looks names up in the search path only. A name that is not found is
        skipped: the compiler either has it built in or reports it.
        """
        direct = tuple(_includes(source))
        found = self._known.get(direct)
        if found is None:
            found = self._known[direct] = dict(sorted(self._closure(direct).items()))
        return found

    def _closure(self, direct: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        waiting = list(direct)
        while waiting:
            name = waiting.pop()
            if name not in found and (header := self._read(name)) is not None:
                found[name], inner = header
                waiting += inner
        return found

    def _read_header(self, name: str) -> tuple[str, list[str]] | None:
        """SHA-256 of a header, and the names that it includes."""
        path = next((directory / name for directory in self._search if (directory / name).is_file()), None)
        if path is None:
            return None
        text = path.read_text(encoding="utf-8")
        return sha256(text.encode()), _includes(text)


def _includes(text: str) -> list[str]:
    """Names that a text includes. Only lines that can have one are searched, as searching takes longest."""
    return _INCLUDE.findall("\n".join(line for line in text.split("\n") if "include" in line))


def identity(spec: KernelSpec, arch: str, headers: Headers) -> dict[str, Any]:
    """Identity of a kernel for an architecture. It contains neither paths nor the compiler, so it can be shipped."""
    source = codegen.source(spec)
    return {
        "schema": SCHEMA,
        "symbol": spec.symbol,
        "arch": arch,
        "options": dict(sorted(OPTIONS.items())),
        "source": sha256(source.encode()),
        "headers": headers.included_by(source),
    }


def entry_name(facts: Mapping[str, Any]) -> str:
    """Folder name of the entry with this fingerprint."""
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    return f"{entry_prefix(facts)}{digest[:16]}"


def identity_digest(kernel: Mapping[str, Any]) -> str:
    """SHA-256 of a kernel's identity, also from its fingerprint."""
    own = {key: value for key, value in kernel.items() if key not in ("compiler", "flags")}
    return sha256(json.dumps(own, sort_keys=True).encode())


def entry_prefix(kernel: Mapping[str, Any]) -> str:
    """Common prefix of a kernel's entry names, for any compiler."""
    return f"{kernel['symbol']}-{kernel['arch']}-"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
