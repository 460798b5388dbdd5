"""Bits of the CPU kernels' results, for changes that must not affect them.

Hashes the outputs of every polyconv candidate on every named suite of ``machine_suites``, by instruction set. They
depend on the compiler and the processor's caches, so none are recorded: write them before and after a change on one
machine, and compare.

    python tests/golden/cpu_bits.py before.json
    python tests/golden/cpu_bits.py after.json --against before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from machine_suites import SUITES, Shape
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native
from polyconv.problem import Pass
from polyconv.selection import Preference

READ = {Pass.FPROP: ("x", "w", "bias"), Pass.DGRAD: ("y", "w"), Pass.WGRAD: ("x", "y")}


def hashes(shape: Shape) -> Iterator[tuple[str, str]]:
    """Hash of the output of each pass and candidate."""
    torch.manual_seed(0)
    x, w, bias, dy = shape.tensors()
    given = {"x": x, "w": w, "y": dy, **({} if bias is None else {"bias": bias})}
    backend = backend_for(torch.device("cpu"))
    if shape.mode != "zeros" and min(shape.padding) < 0:  # cropped before it reaches a backend
        return
    for kind in Pass:
        problem = shape.problem(kind, x, w, dy)
        written = {
            Pass.FPROP: {"y": torch.empty_strided(dy.shape, shape.y_strides(kind, dy))},
            Pass.DGRAD: {"x": torch.empty(x.shape)},
            Pass.WGRAD: {"dw": torch.empty(w.shape), **({"db": torch.empty(w.shape[0])} if problem.bias else {})},
        }[kind]
        read = {name: given[name] for name in READ[kind] if name in given}
        for name in candidate_names(backend, problem):
            if "ATen" not in name:
                tensors = {**read, **{key: out.fill_(torch.nan) for key, out in written.items()}}
                backend.prepare(backend.plan(problem, prefer=Preference(name)), trial=True)(tensors)
                digest = hashlib.sha256()
                for key in written:
                    digest.update(tensors[key].contiguous().numpy().tobytes())
                yield f"{kind}, {name}", digest.hexdigest()[:16]


def record() -> dict[str, str]:
    found: dict[str, str] = {}
    for isa in ("avx2", "avx512"):
        try:
            native.instruction_set(isa)
        except RuntimeError:
            continue
        for suite, cases in SUITES.items():
            for name, shape in cases.items():
                found |= {f"{isa}, {suite}: {name}, {key}": value for key, value in hashes(shape)}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = record()
    options.file.write_text(json.dumps(found, indent=1, sort_keys=True))
    print(f"{len(found)} results")
    if options.against is not None:
        before = json.loads(options.against.read_text())
        changed = sorted(key for key in before.keys() | found.keys() if before.get(key) != found.get(key))
        sys.exit("\n".join([f"{len(changed)} differ", *changed[:20]]) if changed else 0)
