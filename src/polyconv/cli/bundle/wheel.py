"""Wheels with a bundle of kernels, so that machines get kernels the way they get code.

A wheel has one package: the bundle, and a module with its place and digest, which an entry point of the group
``polyconv.kernels`` names (:func:`polyconv.cuda.jit.bundle.installed`). The digest is code of an installed package, so
the kernels need no permissions of their own. The same bundle makes the same file, bit by bit.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from ...cuda.jit.bundle import ENTRY_POINTS, MANIFEST, Bundle
from ...cuda.jit.store import FILES

_NAME = re.compile(r"[A-Z0-9]|[A-Z0-9][A-Z0-9._-]*[A-Z0-9]", re.IGNORECASE | re.ASCII)
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?", re.ASCII)
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of all files: the earliest that an archive can have."""


def check_names(name: str, version: str) -> str:
    """Reason why a distribution cannot have this name or version; empty if it can."""
    if not _NAME.fullmatch(name):
        return f"{name!r} is no name of a distribution: expected letters, digits, - _ and ., such as mymodel-kernels"
    if not _VERSION.fullmatch(version):
        return f"{version!r} is no version: expected one such as 1.0 or 2026.11.18"
    return ""


def default_version(bundle: Bundle) -> str:
    """Version of polyconv that made the bundle, with the first digits of its digest."""
    made_by = str(bundle.manifest.get("polyconv", "0"))
    return f"{made_by}{'.' if '+' in made_by else '+'}{bundle.digest[:12]}"


def write_wheel(bundle: Bundle, folder: Path, name: str, version: str) -> Path:
    """Write a wheel of a bundle that was checked. Returns its path."""
    package = re.sub(r"[-_.]+", "_", name).lower()
    package = f"_{package}" if package[0].isdigit() else package
    info = f"{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
    kernels = sum(1 for _ in bundle.manifest["kernels"])
    made_for = "".join(f"- {words}\n" for words in bundle.manifest.get("made_for", ()))
    files = {f"{package}/__init__.py": _module(bundle).encode(), f"{package}/kernels/{MANIFEST}": bundle.contents}
    for entry in bundle.manifest["kernels"]:
        for file in sorted(FILES.values()):
            files[f"{package}/kernels/{entry}/{file}"] = (bundle.folder / entry / file).read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: {kernels} compiled CUDA kernels of polyconv {bundle.manifest.get('polyconv', '')}\n"
        f"Requires-Dist: polyconv\n\nMade for:\n\n{made_for}"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: polyconv\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[{ENTRY_POINTS}]\n{name} = {package}:KERNELS\n".encode()
    record = "".join(f"{file},sha256={_urlsafe(data)},{len(data)}\n" for file, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            described = zipfile.ZipInfo(file, _EPOCH)
            described.compress_type = zipfile.ZIP_DEFLATED
            described.external_attr = 0o100644 << 16
            archive.writestr(described, data)
    return path


def _module(bundle: Bundle) -> str:
    return (
        '"""Compiled kernels of polyconv, which finds them by an entry point."""\n\n'
        "from pathlib import Path\n\n"
        f"KERNELS = f\"{{Path(__file__).parent / 'kernels'}}#{bundle.digest}\"\n"
    )


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
