"""Makes a bundle (:mod:`~polyconv.cuda.bundle`) of kernels, or adds to one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..files import Folder, meant
from ..plan.plan import KernelSpec
from ..version import __version__
from . import entries
from .bundle import MANIFEST, SCHEMA, Bundle
from .cache import KernelCache
from .entries import SHARED, EntryError
from .fingerprint import entry_name, sha256


class BundleWriter:
    """Fills a bundle: a new one, or one that lacks something. What an older one holds stays in it.

    Kernels come from the machine's cache, which compiles those that it does not have.
    """

    def __init__(self, folder: Path, cache: KernelCache) -> None:
        if folder.is_dir() and any(meant(path.name) != MANIFEST for path in folder.iterdir()):
            Bundle(folder).manifest  # noqa: B018 - an error if the folder is something else
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        entries.check_folder(folder, shipped=True)  # an error now, not where the bundle is used
        self.folder = folder
        self._cache = cache
        self._added: dict[str, dict[str, str]] = {}
        self.finish(())  # so that the folder is a bundle also if this is interrupted

    def add(self, spec: KernelSpec, arch: str) -> bytes:
        """A kernel's binary, which is in the bundle afterwards. Safe to call from several threads."""
        cubin = self._cache.get(spec, arch)
        facts = self._cache.facts(spec, arch)
        name = entry_name(facts)
        with Folder(self.folder) as folder, folder.locked() as alone:  # others may be adding the same kernel
            there = None
            with contextlib.suppress(EntryError):
                there = entries.load(self.folder / name, facts, shipped=True)
            if there != cubin:
                entries.store(folder, name, spec.source(), cubin, facts, SHARED, alone=alone)
        self._added[name] = {
            "symbol": spec.symbol,
            "arch": arch,
            "compiler": facts["compiler"],
            "cubin": sha256(cubin),
        }
        return cubin

    def finish(self, made_for: Iterable[str]) -> Mapping[str, Any]:
        """Write the manifest; ``made_for`` says in words what was asked for. What others added meanwhile stays."""
        with Folder(self.folder) as folder, folder.locked() as alone:
            exists = (self.folder / MANIFEST).exists()
            before: Mapping[str, Any] = Bundle(self.folder).manifest if exists else {}
            manifest = {
                "schema": SCHEMA,
                "polyconv": __version__,
                "made_for": list(dict.fromkeys([*before.get("made_for", ()), *made_for])),
                "kernels": dict(sorted({**before.get("kernels", {}), **self._added}.items())),
            }
            folder.replace(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode(), alone=alone)
        return manifest
