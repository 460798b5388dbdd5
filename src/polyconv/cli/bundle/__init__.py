"""``polyconv bundle``: bundles of compiled kernels, as ``polyconv warmup -o`` makes them, for other machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...cuda.jit.bundle import Bundle
from ...util.console import print_json, size_text
from .. import _options
from .wheel import check_names, default_version, write_wheel

ACTIONS = {
    "digest": "print the SHA-256 of its manifest: POLYCONV_KERNELS=FOLDER#DIGEST is trusted by content",
    "wheel": "write a wheel; where it is installed, polyconv finds its kernels by itself",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(ACTIONS), help="see below")
    folder = parser.add_argument("folder", metavar="FOLDER", help="the bundle; with #DIGEST, whatever its permissions")
    _options.completes(folder, _options.FOLDERS)
    parser.add_argument("--name", help="wheel: name of the distribution, such as mymodel-kernels")
    parser.add_argument("--version", help="wheel: its version (default: polyconv's, with the digest's first digits)")
    _options.add_output_argument(parser, "wheel: folder to write it into (default: this one)", folder=True)
    _options.add_json_argument(parser, "the answer")
    _options.add_examples(
        parser,
        "polyconv bundle digest kernels/",
        "polyconv bundle wheel kernels/ --name mymodel-kernels -o dist/",
        about="actions:\n" + "\n".join(f"  {name:<8}{what}" for name, what in ACTIONS.items()),
    )


def run(args: argparse.Namespace) -> int:
    bundle = Bundle(args.folder)
    if args.action == "digest":
        return _digest(bundle, args.json)
    if not args.name:
        raise _options.UsageError("--name is needed: what the wheel is to be called, such as mymodel-kernels")
    version = args.version or default_version(bundle)
    if wrong := check_names(args.name, version):
        raise _options.UsageError(wrong)
    folder = args.output or Path()
    _options.check_folder(folder, "name another folder with -o")
    damaged = bundle.check()
    if damaged:
        entry, why = next(iter(damaged.items()))
        raise _options.UsageError(f"{len(damaged)} kernels of {bundle.folder} are refused, the first: {entry}: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    path = write_wheel(bundle, folder, args.name, version)
    kernels, size = len(bundle.manifest["kernels"]), path.stat().st_size
    if args.json:
        print_json({"wheel": str(path), "kernels": kernels, "bytes": size, "digest": bundle.digest})
    else:
        print(f"{path}: {kernels} kernels, {size_text(size)}; where it is installed, polyconv finds them by itself")
    return 0


def _digest(bundle: Bundle, as_json: bool) -> int:
    if as_json:
        print_json({"directory": str(bundle.folder), "digest": bundle.digest})
    else:
        print(bundle.digest)
    return 0
