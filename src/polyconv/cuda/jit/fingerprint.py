"""Keys of compiled kernels, independent of the machine that compiled them.

:func:`identity` covers source, headers, options and architecture, but not the compiler: a machine without one can look
up kernels that were compiled elsewhere. With compiler and flags, everything that can change the binary, it is a
fingerprint: the key of the cache (:meth:`~polyconv.cuda.jit.cache.KernelCache.facts`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..planner import codegen
from ..planner.plan import KernelSpec
from .compile import OPTIONS

SCHEMA = 2
"""To be increased when the layout of an entry or the meaning of a fingerprint changes."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


def included_headers(source: str, search: Sequence[Path]) -> dict[str, str]:
    """Text of every header that the source includes, directly or not, by the name in its ``#include``.

    As NVRTC under ``--no-source-include``, it looks names up in the search path only. A name that is not found is
    skipped: the compiler either has it built in or reports it.
    """
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in headers:
            continue
        path = next((directory / name for directory in search if (directory / name).is_file()), None)
        if path is not None:
            headers[name] = path.read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(headers[name])
    return headers


def identity(spec: KernelSpec, arch: str, search: Sequence[Path]) -> dict[str, Any]:
    """Identity of a kernel for an architecture. It contains neither paths nor the compiler, so it can be shipped."""
    source = codegen.source(spec)
    return {
        "schema": SCHEMA,
        "symbol": spec.symbol,
        "arch": arch,
        "options": dict(sorted(OPTIONS.items())),
        "source": sha256(source.encode()),
        "headers": {name: sha256(text.encode()) for name, text in sorted(included_headers(source, search).items())},
    }


def entry_name(facts: Mapping[str, Any]) -> str:
    """Folder name of the entry with this fingerprint."""
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    return f"{entry_prefix(facts)}{digest[:16]}"


def entry_prefix(kernel: Mapping[str, Any]) -> str:
    """Common prefix of a kernel's entry names, for any compiler."""
    return f"{kernel['symbol']}-{kernel['arch']}-"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
