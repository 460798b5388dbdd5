"""Which kernel a binary is: what it was made of, in terms that do not depend on where it was made.

Two questions are asked of a compiled kernel. Is it the very binary that this compiler would make now? That is its
:func:`fingerprint`, by which a machine's cache is keyed. And is it a binary of this source at all? That is its
:func:`identity`, which leaves the compiler out, so that a machine that has none can look for kernels that another one
compiled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plan.plan import KernelSpec
from .compile import OPTIONS

SCHEMA = 2
"""Raise it when the layout of an entry or the meaning of a fingerprint changes."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


def included_headers(source: str, search: Sequence[Path]) -> dict[str, str]:
    """Text of every header that the source reaches, by the name it is included under.

    Follows NVRTC's own rule under ``--no-source-include``: each name is looked up in the search path alone. A name
    that is not found there is skipped, since the compiler will either know it itself or report it.
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
    """What the kernel is and for which architecture. Neither paths nor the compiler are in it: it can be shipped."""
    source = spec.source()
    return {
        "schema": SCHEMA,
        "symbol": spec.symbol,
        "arch": arch,
        "options": dict(sorted(OPTIONS.items())),
        "source": sha256(source.encode()),
        "headers": {name: sha256(text.encode()) for name, text in sorted(included_headers(source, search).items())},
    }


def fingerprint(kernel: Mapping[str, Any], compiler: str, flags: Sequence[str]) -> dict[str, Any]:
    """Everything that can change the binary: the kernel's identity, the compiler's, and its flags."""
    return {**kernel, "compiler": compiler, "flags": list(flags)}


def entry_name(facts: Mapping[str, Any]) -> str:
    """The name of the folder that a binary of this fingerprint is kept in."""
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    return f"{entry_prefix(facts)}{digest[:16]}"


def entry_prefix(kernel: Mapping[str, Any]) -> str:
    """How the names of all binaries of a kernel begin, whatever compiled them."""
    return f"{kernel['symbol']}-{kernel['arch']}-"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
