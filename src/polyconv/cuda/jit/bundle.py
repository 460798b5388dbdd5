"""Bundles: folders of compiled kernels, shipped to machines that must not compile.

``polyconv warmup -o kernels/`` makes one on any machine that has NVRTC; ``POLYCONV_KERNELS=kernels/`` uses it. A bundle
holds cache entries (:mod:`~polyconv.cuda.jit.store`) and a manifest with the checksum of each binary. A binary runs
only if the manifest lists it and only trusted users could have written it; naming a bundle in the settings adds its
owner to these (:mod:`~polyconv.util.file_trust`).

Kernels are found by the identity of their source. So a bundle works with another compiler or none, and stops working
when a header of the installed polyconv differs from the one that was compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...util import checked_json
from ...util.atomic_files import Folder
from ...util.checked_json import DocumentError, Value
from ...util.file_trust import UntrustedError
from . import store
from .store import Entry, EntryError

MANIFEST = "manifest.json"
SCHEMA = 1
LARGEST = 2**22
"""Limit on a manifest [bytes]; a kernel takes about 200."""

_ENTRY = re.compile(r"\w[\w.-]*", re.ASCII)


class BundleError(EntryError):
    """A folder is not a bundle, or its manifest cannot be read."""


class Bundle:
    """Reader of an existing bundle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest: Mapping[str, Any] | None = None

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest. Raises :class:`BundleError` if there is none."""
        if self._manifest is None:
            self._manifest = self._read_manifest()
        return self._manifest

    def _read_manifest(self) -> Mapping[str, Any]:
        path = self.folder / MANIFEST
        try:
            with Folder(self.folder) as folder:
                trusted = store.trusted_users(folder, shipped=True)
                manifest = checked_json.parse(folder.read(MANIFEST, LARGEST, trusted), str(path))
            _check(manifest)
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle of kernels: it has no {MANIFEST}") from None
        except (DocumentError, UntrustedError) as error:
            raise BundleError(str(error)) from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        return manifest.object()

    def find(self, kernel: Mapping[str, Any]) -> bytes | None:
        """Binary of a kernel by its identity; None if absent. Raises :class:`EntryError` if it must not run."""
        listed = self.manifest["kernels"]
        return store.find(self.folder, kernel, lambda entry: self._checked(entry, listed.get(entry.path.name)))

    def check(self) -> dict[str, str]:
        """Read every file. Returns the reasons for refusal by entry; empty if the bundle is intact."""
        problems: dict[str, str] = {}
        listed = self.manifest["kernels"]
        for name in sorted({*listed, *(path.name for path in store.folders(self.folder))}):
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
        except OSError as error:  # the folder has changed since the manifest was read
            raise EntryError(str(error)) from error


def _check(manifest: Value) -> None:
    """Raise unless a manifest has the expected members and types."""
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
