"""Bundles: compiled kernels in a folder that is shipped, for machines that must not compile.

``polyconv warmup -o kernels/`` makes one on any machine that has NVRTC; ``POLYCONV_KERNELS=kernels/`` uses it. A bundle
has a cache's entries (:mod:`~polyconv.cuda.entries`) and a manifest, which names each of them with the checksum of its
binary. What the manifest does not vouch for is not run.

Kernels are found by what they were compiled from, so a bundle serves a machine that has another compiler or none, and
stops to serve as soon as a header of the installed polyconv differs from the one that was compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import entries
from .entries import Entry, EntryError

MANIFEST = "manifest.json"
SCHEMA = 1


class BundleError(EntryError):
    """A folder that is not a bundle, or one whose manifest cannot be read."""


class Bundle:
    """A bundle that is there, to find kernels in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest: Mapping[str, Any] | None = None

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest, as it was written; :class:`BundleError` if there is none."""
        if self._manifest is None:
            self._manifest = self._read_manifest()
        return self._manifest

    def _read_manifest(self) -> Mapping[str, Any]:
        path = self.folder / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle of kernels: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("kernels"), dict):
            raise BundleError(f"{path} is not the manifest of a bundle")
        if found.get("schema") != SCHEMA:
            raise BundleError(
                f"{path} has schema {found.get('schema')}, this version of polyconv reads {SCHEMA}: "
                "make the bundle anew with polyconv warmup"
            )
        return found

    def find(self, kernel: Mapping[str, Any]) -> bytes | None:
        """The binary of a kernel, by its identity; None if it is not here, :class:`EntryError` if it must not run."""
        listed = self.manifest["kernels"]
        refused: EntryError | None = None
        for entry in entries.of_kernel(self.folder, kernel):
            try:
                return self._checked(entry, listed.get(entry.path.name))
            except EntryError as error:
                refused = EntryError(f"{entry.path} is refused: {error}")
        if refused is not None:
            raise refused
        return None

    def check(self) -> dict[str, str]:
        """What is wrong with the bundle: entry -> why it would be refused. Every file is read."""
        problems: dict[str, str] = {}
        listed = self.manifest["kernels"]
        for name in sorted({*listed, *(path.name for path in entries.folders(self.folder))}):
            try:
                entry = Entry.read(self.folder / name)
                if entry is None:
                    raise EntryError("it is in the manifest, but not in the folder")
                self._checked(entry, listed.get(name))
                entry.check()
            except EntryError as error:
                problems[name] = str(error)
        return problems

    def _checked(self, entry: Entry, listed: Mapping[str, Any] | None) -> bytes:
        if listed is None:
            raise EntryError(f"{MANIFEST} does not name it")
        if listed.get("cubin") != entry.meta["cubin"]:
            raise EntryError(f"its checksum is not the one in {MANIFEST}")
        # Whoever named the folder in the settings trusts its owner.
        return entry.cubin(trusted=(self.folder.stat().st_uid,))
