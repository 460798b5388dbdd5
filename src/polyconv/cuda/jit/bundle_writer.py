"""Writer of bundles (:mod:`~polyconv.cuda.jit.bundle`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...util.atomic_files import Folder, meant
from ...version import __version__
from ..planner.codegen import source
from ..planner.plan import KernelSpec
from .bundle import MANIFEST, SCHEMA, Bundle
from .cache import KernelCache
from .fingerprint import entry_name, identity_digest, sha256
from .store import FILES, Store, entry_files


class BundleWriter:
    """Creates a bundle, or adds to an existing one. Kernels come from the cache, which compiles missing ones."""

    def __init__(self, folder: Path, cache: KernelCache) -> None:
        if folder.is_dir() and any(meant(path.name) != MANIFEST for path in folder.iterdir()):
            Bundle(folder).manifest  # noqa: B018 - an error if the folder is something else
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        Bundle(folder).unlisted.check_folder()  # an error now, not where the bundle is used
        self.folder = folder
        self._cache = cache
        self._added: dict[str, dict[str, str]] = {}
        self.finish(())  # so that the folder is a bundle even if writing is interrupted

    def add(self, spec: KernelSpec, arch: str) -> bytes:
        """Add a kernel and return its binary. Thread-safe."""
        cubin, facts = self._cache.get(spec, arch), self._cache.facts(spec, arch)
        name, files = entry_name(facts), entry_files(facts, source(spec), cubin)
        listed = {key: sha256(files[file]) for key, file in FILES.items()}
        # An entry with another binary is replaced, whatever its own checksum says.
        Store(self.folder, shipped=True, listed={name: listed}).add(facts, source(spec), lambda: cubin)
        described = {"symbol": spec.symbol, "arch": arch, "compiler": facts["compiler"]}
        self._added[name] = {**described, "identity": identity_digest(facts), **listed}
        return cubin

    def finish(self, made_for: Iterable[str]) -> Mapping[str, Any]:
        """Write the manifest, merged with the existing one. ``made_for``: descriptions of what was requested."""
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
