"""``polyconv cache``: the compiled kernels on this machine."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .. import settings
from ..cuda.jit.bundle import MANIFEST, Bundle, BundleError
from ..cuda.jit.compile import search_path
from ..cuda.jit.fingerprint import Headers, identity
from ..cuda.jit.store import EntryError, Store, summary
from ..model.aot import wanted_by
from ..util.console import print_json, print_table, progress, size_text
from ._options import (
    FOLDERS,
    UsageError,
    add_arch_argument,
    add_examples,
    add_json_argument,
    add_pass_argument,
    completes,
)
from .warmup import add_shape_argument, archs_here, model_problems

ACTIONS = {
    "info": "where it is, how many kernels it has and how large it is (the default)",
    "list": "every kernel in it",
    "verify": "read every file and say which entries are not as they were stored",
    "clear": "delete the kernels; those that are wanted again are compiled again",
    "path": "print its folder, nothing else",
}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=list(ACTIONS), default="info", help="see below")
    parser.add_argument(
        "--older-than", metavar="AGE", type=_age, help="clear: only kernels at least this old: 30d, 12h, 90m"
    )
    folder = parser.add_argument(
        "--directory",
        metavar="FOLDER",
        type=Path,
        help="this folder instead of the settings' cache: another cache, or a bundle (POLYCONV_CACHE_DIR)",
    )
    completes(folder, FOLDERS)
    parser.add_argument(
        "--model", metavar="MODEL", help="verify: also that no kernel of this MODULE:ATTRIBUTE is missing"
    )
    add_shape_argument(parser, "verify --model: ")
    add_arch_argument(parser, help="verify --model: GPU architectures, separated by commas (default: of the GPUs here)")
    add_pass_argument(parser)
    add_json_argument(parser, "the answer")
    add_examples(
        parser,
        "polyconv cache",
        "polyconv cache verify --directory kernels/",
        "polyconv cache verify --model app.models:make --input-shape 8,3,512,512 --arch sm_80 --directory kernels/",
        "polyconv cache clear --older-than 30d",
        about="actions:\n" + "\n".join(f"  {name:<8}{what}" for name, what in ACTIONS.items()),
    )


def run(args: argparse.Namespace) -> int:
    if args.older_than is not None and args.action != "clear":
        raise UsageError("--older-than is for clear")
    if (args.model is not None) != (args.input_shape is not None) or (args.model and args.action != "verify"):
        raise UsageError("--model and --input-shape are for verify, and one needs the other")
    named: Path = args.directory or settings.cache_folder()
    bundle = Bundle(named)
    if args.directory is not None and not bundle.folder.is_dir():
        raise UsageError(f"{bundle.folder} is not a directory")
    is_bundle = (bundle.folder / MANIFEST).exists()
    if args.action == "clear":
        if is_bundle:
            raise UsageError(f"{bundle.folder} is a bundle, not a cache: delete it as a whole")
        return _clear(Store.of_cache(named), args.older_than, args.json)
    if args.action == "verify":
        return _verify(bundle.store if is_bundle else Store.of_cache(named), args, is_bundle=is_bundle)
    answers: dict[str, Callable[[Store, bool], int]] = {"info": _info, "list": _list, "path": _path}
    return answers[args.action](bundle.unlisted if is_bundle else Store.of_cache(named), args.json)


# ---- actions


def _path(store: Store, as_json: bool) -> int:
    if as_json:
        print_json({"directory": str(store.path)})
    else:
        print(store.path)
    return 0


def _info(store: Store, as_json: bool) -> int:
    found = summary(store)
    if store.shipped:
        with contextlib.suppress(BundleError):
            found["digest"] = Bundle(store.path).digest
    if as_json:
        print_json(found)
        return 0
    state = "" if found["writable"] else ", not writable: every process compiles its kernels again"
    if found["refused"]:
        state = f"; none of them is run: {found['refused']}"
    print(f"{store.path}: {found['kernels']} kernels, {size_text(found['bytes'])}{state}")
    if "digest" in found:
        print(f"digest {found['digest']}")
    if store.passed_over:
        print(f"kernels in {store.path.parent} are not run: {store.passed_over}")
    if found["archs"]:
        rows = [[arch, str(one["kernels"]), size_text(one["bytes"])] for arch, one in found["archs"].items()]
        print_table("", ("arch", "kernels", "size"), rows, left=1)
    return 0


def _list(store: Store, as_json: bool) -> int:
    rows = store.rows()
    if as_json:
        print_json(rows)
        return 0
    cells = [[row["kernel"], row["arch"], row["compiler"], size_text(row["bytes"]), row["compiled"]] for row in rows]
    print_table(f"Kernels in {store.path}", ("kernel", "arch", "compiler", "size", "compiled"), cells, left=3)
    return 0


def _verify(store: Store, args: argparse.Namespace, *, is_bundle: bool) -> int:
    kernels = len(store.folders())
    with progress() as shown:
        shown.expect(kernels)
        problems = store.check(lambda name: shown.step(f"read {name}"))
    if store.passed_over:
        problems[str(store.path.parent)] = f"its kernels are not run: {store.passed_over}"
    missing = _missing(store, args) if args.model else {}
    if args.json:
        about = {"missing": missing} if args.model else {}
        print_json({"directory": str(store.path), "kernels": kernels, "problems": problems, **about})
    else:
        for name, why in problems.items():
            print(f"{name}: {why}")
        print(f"{store.path}: {kernels} kernels, {len(problems)} of them damaged")
        if problems:
            advice = "make the bundle anew with polyconv warmup" if is_bundle else "polyconv cache clear removes them"
            print(f"damaged kernels are never run; {advice}", file=sys.stderr)
        for arch, found in missing.items():
            for symbol, why in found.items():
                print(f"{symbol} for {arch}: {why}")
        if args.model:
            _print_outcome(store, args, missing)
    return 1 if problems or any(missing.values()) else 0


def _missing(store: Store, args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Kernels that ``polyconv warmup`` would compile for a model and that may not run from here, by architecture."""
    headers = Headers(search_path())
    problems = model_problems(args.model, args.input_shape, args.passes)
    missing: dict[str, dict[str, str]] = {}
    for arch in args.archs or archs_here():
        wanted, missing[arch] = wanted_by(problems, arch), {}
        for spec in wanted.kernels:
            try:
                if store.find(identity(spec, arch, headers)) is None:
                    missing[arch][spec.symbol] = f"not in {store.path}"
            except EntryError as error:
                missing[arch][spec.symbol] = str(error)
        for problem, why in wanted.skipped.items():
            print(f"no kernel for {arch}: {problem}: {why}", file=sys.stderr)
    return missing


def _print_outcome(store: Store, args: argparse.Namespace, missing: Mapping[str, Mapping[str, str]]) -> None:
    number = sum(map(len, missing.values()))
    if not number:
        print(f"{args.model}: no kernel is missing for {', '.join(missing)}")
        return
    shapes = " ".join(f"--input-shape {','.join(map(str, shape))}" for shape in args.input_shape)
    print(
        f"{args.model}: {number} kernels are missing; polyconv warmup {args.model} {shapes} --arch {','.join(missing)} "
        f"-o {store.path} adds them",
        file=sys.stderr,
    )


def _clear(store: Store, age: float | None, as_json: bool) -> int:
    removed, freed = store.clear(math.inf if age is None else time.time() - age)
    if as_json:
        print_json({"directory": str(store.path), "removed": removed, "bytes": freed})
    else:
        print(f"{store.path}: removed {removed} kernels, {size_text(freed)}")
    return 0


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: expected a number with s, m, h, d or w, such as 30d")
    return float(match[1]) * UNITS[match[2]]
