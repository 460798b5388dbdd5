"""Bundles: folders of compiled kernels, shipped to machines that must not compile.

``polyconv warmup -o kernels/`` makes one on any machine that has NVRTC; ``POLYCONV_KERNELS=kernels/`` uses it. A bundle
is a :class:`~polyconv.cuda.jit.store.Store` with a manifest that has the checksum of each binary. A binary runs only if
the manifest lists it and only trusted users could have written it; naming a bundle in the settings adds its owner to
these (:mod:`~polyconv.util.file_trust`).

Kernels are found by the identity of their source. So a bundle works with another compiler or none, and stops working
when a header of the installed polyconv differs from the one that was compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ...util import checked_json
from ...util.checked_json import DocumentError, Value
from ...util.file_trust import UntrustedError
from .store import EntryError, Store

MANIFEST = "manifest.json"
SCHEMA = 1
LARGEST = 2**22
"""Limit on a manifest [bytes]; a kernel takes about 200."""

_ENTRY = re.compile(r"\w[\w.-]*", re.ASCII)


class BundleError(EntryError):
    """A folder is not a bundle, or its manifest cannot be read."""


class Bundle:
    """Reader of an existing bundle. Its properties raise :class:`BundleError` if there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        path = self.folder / MANIFEST
        try:
            manifest = checked_json.parse(Store(self.folder, shipped=True).read(MANIFEST, LARGEST), str(path))
            _check(manifest)
        except FileNotFoundError:
            raise BundleError(f"{self.folder} is not a bundle of kernels: it has no {MANIFEST}") from None
        except (DocumentError, UntrustedError) as error:
            raise BundleError(str(error)) from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error}") from error
        return manifest.object()

    @cached_property
    def store(self) -> Store:
        """Its kernels, as far as the manifest lists them."""
        listed = {entry: kernel["cubin"] for entry, kernel in self.manifest["kernels"].items()}
        return Store(self.folder, shipped=True, listed=listed)

    def check(self) -> dict[str, str]:
        """Read every file. Returns the reasons for refusal by entry; empty if the bundle is intact."""
        return self.store.check()


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
