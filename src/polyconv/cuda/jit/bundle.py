"""Bundles: folders of compiled kernels, shipped to machines that must not compile.

``polyconv warmup -o kernels/`` makes one on any machine that has NVRTC; ``POLYCONV_KERNELS=kernels/`` uses it. A bundle
is a :class:`~polyconv.cuda.jit.store.Store` with a manifest that has the SHA-256 of every file. A binary runs only if
the manifest lists it and only trusted users could have written it; naming a bundle in the settings adds its owner to
these (:mod:`~polyconv.util.file_trust`). With the digest of its manifest, ``kernels/#<SHA-256>``, a bundle is trusted
by content instead: Hugging Face's snapshots and Kubernetes' ConfigMaps are links, and groups can write to volumes.

Kernels are found by the identity of their source. So a bundle works with another compiler or none, and stops working
when a header of the installed polyconv differs from the one that was compiled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ... import settings
from ...runtime.lazy_import import imported
from ...runtime.warn_once import warn_once
from ...util import checked_json
from ...util.cached import cached_property
from ...util.checked_json import DocumentError, Value
from ...util.file_trust import UntrustedError
from .fingerprint import sha256
from .store import EntryError, Store

MANIFEST = "manifest.json"
ENTRY_POINTS = "polyconv.kernels"
"""Group of entry points that name a bundle, as ``<folder>#<digest>``: those of wheels by ``polyconv bundle wheel``."""
SCHEMA = 1
LARGEST = 2**22
"""Limit on a manifest [bytes]; a kernel takes about 500."""

_ENTRY = re.compile(r"\w[\w.-]*", re.ASCII)
_DIGEST = re.compile(r"(.+)#([0-9a-fA-F]{64})", re.DOTALL)


class BundleError(EntryError):
    """A folder is not a bundle, or its manifest cannot be read."""


class Bundle:
    """Reader of an existing bundle. Its properties raise :class:`BundleError` if there is none.

    Args:
        named: its folder, or ``<folder>#<digest>``.
        digest: SHA-256 of its manifest; with one, contents are checked instead of owners, permissions and links.
    """

    def __init__(self, named: str | os.PathLike[str], digest: str | None = None) -> None:
        self.folder, in_name = split_digest(named)
        self._known = digest.lower() if digest is not None else in_name

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which has those of all other files: the bundle's content in one number."""
        return sha256(self.contents)

    @cached_property
    def contents(self) -> bytes:
        """The manifest as it is in its file."""
        path = self.folder / MANIFEST
        try:
            data = self.unlisted.read(MANIFEST, LARGEST)
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle of kernels: it has no {MANIFEST}") from None
        except UntrustedError as error:
            raise BundleError(str(error)) from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        if self._known not in (None, found := sha256(data)):
            raise BundleError(
                f"{path} is not the manifest that was named: its SHA-256 is {found}, and {self._known} was expected"
            )
        return data

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        try:
            manifest = checked_json.parse(self.contents, str(self.folder / MANIFEST))
            _check(manifest)
        except DocumentError as error:
            raise BundleError(str(error)) from error
        return manifest.object()

    @property
    def unlisted(self) -> Store:
        """The folder itself, without the manifest."""
        return Store(self.folder, shipped=True, pinned=self._known is not None)

    @cached_property
    def store(self) -> Store:
        """Its kernels, as far as the manifest lists them."""
        kernels: Mapping[str, Mapping[str, str]] = self.manifest["kernels"]
        entries = {
            listed["identity"]: entry
            for entry, listed in reversed(
                list(kernels.items())
            )  # of several compilers the first, as without identities
            if "identity" in listed and "meta" in listed
        }
        return replace(self.unlisted, listed=kernels, entries=entries)

    def check(self) -> dict[str, str]:
        """Read every file. Returns the reasons for refusal by entry; empty if the bundle is intact."""
        return self.store.check()


@cache
def installed() -> tuple[Bundle, ...]:
    """Bundles of the installed wheels. One that cannot be imported is left out, with a warning."""
    found: list[Bundle] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            found.append(Bundle(getattr(imported(point.module), point.attr)))
        except Exception as error:  # the code of another package
            warn_once(f"polyconv cannot use the kernels of {point.name} ({point.value}): {error}")
    return tuple(found)


def in_force() -> list[Bundle]:
    """Bundles to search, the one of the settings first."""
    named = settings.current().kernels
    if named == "off":
        return []
    return [*([] if named is None else [Bundle(named)]), *installed()]


def split_digest(named: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Folder and digest of a bundle named ``<folder>#<SHA-256 of its manifest>``, or None without one."""
    found = _DIGEST.fullmatch(os.fspath(named))
    return (Path(found[1]), found[2].lower()) if found else (Path(named), None)


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
        facts = kernel.object()
        for name in ("symbol", "arch", "cubin", *facts):
            if not isinstance(found := facts.get(name), str) or not found.isprintable():
                kernel.member(name).text()  # raises
    for words in manifest.optional("made_for", []).items():
        words.text()
