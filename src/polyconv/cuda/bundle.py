"""Bundles: compiled kernels in a folder that is shipped, for machines that must not compile.

``polyconv warmup -o kernels/`` makes one on any machine that has NVRTC; ``POLYCONV_KERNELS=kernels/`` uses it. A bundle
has a cache's entries (:mod:`~polyconv.cuda.entries`) and a manifest, which names each of them with the checksum of its
binary. What the manifest does not vouch for is not run, nor what others than the folder's owner could have written: who
names a folder trusts its owner, and nobody else (:mod:`~polyconv.trust`).

Kernels are found by what they were compiled from, so a bundle serves a machine that has another compiler or none, and
stops to serve as soon as a header of the installed polyconv differs from the one that was compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import documents
from ..documents import DocumentError, Value
from ..files import Folder
from ..trust import UntrustedError
from . import entries
from .entries import Entry, EntryError

MANIFEST = "manifest.json"
SCHEMA = 1
LARGEST = 2**22
"""Bytes of a manifest that are read at most; a kernel takes some 200."""

_ENTRY = re.compile(r"\w[\w.-]*", re.ASCII)


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
            with Folder(self.folder) as folder:
                trusted = entries.trusted_users(folder, shipped=True)
                manifest = documents.parse(folder.read(MANIFEST, LARGEST, trusted), str(path))
            _check(manifest)
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle of kernels: it has no {MANIFEST}") from None
        except (DocumentError, UntrustedError) as error:
            raise BundleError(str(error)) from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        return manifest.object()

    def find(self, kernel: Mapping[str, Any]) -> bytes | None:
        """The binary of a kernel, by its identity; None if it is not here, :class:`EntryError` if it must not run."""
        listed = self.manifest["kernels"]
        return entries.find(self.folder, kernel, lambda entry: self._checked(entry, listed.get(entry.path.name)))

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
                entry.check(shipped=True)
            except EntryError as error:
                problems[name] = str(error)
        return problems

    def _checked(self, entry: Entry, listed: Mapping[str, Any] | None) -> bytes:
        if listed is None:
            raise EntryError(f"{MANIFEST} does not name it")
        if listed.get("cubin") != entry.meta["cubin"]:
            raise EntryError(f"its checksum is not the one in {MANIFEST}")
        try:
            return entry.cubin(shipped=True)
        except OSError as error:  # the folder, which the manifest was read from, is another one now
            raise EntryError(str(error)) from error


def _check(manifest: Value) -> None:
    """Raise unless a manifest has what is read of it, each of its kind."""
    if "kernels" not in manifest.object():
        raise BundleError(f"{manifest.file} is not the manifest of a bundle")
    if not manifest.optional("schema", None).is_whole(SCHEMA):
        raise BundleError(
            f"{manifest.file} has another schema than {SCHEMA}, which this version of polyconv reads: "
            "make the bundle anew with polyconv warmup"
        )
    for entry, kernel in manifest.member("kernels").members().items():
        if not _ENTRY.fullmatch(entry):
            raise kernel.wrong("no entry can have this name")
        for name in ("symbol", "arch", "cubin"):
            kernel.member(name).text()
    for words in manifest.optional("made_for", []).items():
        words.text()
