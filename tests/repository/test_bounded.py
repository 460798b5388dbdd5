"""No table grows without bound with the shapes, weights or threads of a program."""

from __future__ import annotations

import ast
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import polyconv
from fresh import run_fresh
from nightly import NIGHTLY
from polyconv.autotune import online, preferences
from polyconv.cpu import native, planner
from polyconv.dispatch import prepare
from polyconv.problem import Problem
from polyconv.runtime import warn_once

SOURCE = Path(polyconv.__file__).parent
TOOLS = ("cli", "measure", "tools")
"""Modules whose objects are released before a program continues."""

GROWING = {
    "inductor/backend.py _listeners": "running `with` blocks",
    "inductor/choice.py Outcomes.measured": "layers of one graph, while it is compiled",
    "algebra/emit.py compile_matrix": "a transform of a scheme",
    "algebra/program.py Builder._known": "a step of a program that is being built",
    "algebra/segments.py schemes": "a number of taps",
    "algebra/cook_toom.py cook_toom": "a scheme",
    "backend.py _backends": "a device",
    "cpu/costs.py Costs._corrections": "a formula",
    "cpu/operators.py Judge._judged": "a cached weight that lives",
    "cpu/profiles/lines.py Lines._places": "a line of a file",
    "cpu/weight_cache.py TransformedWeights._kept": "four plans of a weight that lives, within a limit",
    "dispatch/fastpath.py _Signals._calls": "a length of five significant bits",
    "cuda/backend.py _given_up": "a kernel",
    "cuda/compile_log.py Compilations._spans": "a kernel that was compiled and is not reported yet",
    "cuda/jit/bundle.py installed": "nothing: there is one",
    "cuda/jit/bundle_writer.py BundleWriter._added": "a kernel of a bundle that is being written",
    "cuda/jit/cache.py KernelCache._bundles": "a bundle",
    "cuda/jit/cache.py KernelCache._busy": "a kernel",
    "cuda/jit/cache.py KernelCache._memory": "a kernel",
    "cuda/jit/fingerprint.py Headers._known": "a kernel's header",
    "cuda/jit/store.py Store.entries": "a kernel of a bundle",
    "cuda/device.py describe": "a device",
    "cuda/driver.py Device._kernels": "a kernel",
    "cuda/driver.py _devices": "a device",
    "cuda/driver.py bindings": "nothing: there is one",
    "cuda/driver.py bindings_version": "nothing: there is one",
    "cuda/driver.py entry_points": "nothing: there is one",
    "cuda/weight_cache.py PreparedWeights._kept": "a weight that lives, and no more bytes than the limit",
    "runtime/state_version.py _sources": "a module of polyconv",
    "runtime/state_version.py listeners": "a registration of native code",
    "dispatch/op.py PUBLIC": "an operator",
    "model/freeze.py Freezing.left_alone": "a module, in a report",
    "runtime/warn_once.py _said": "a text, up to MOST",
    "autotune/online.py AutotuningSession._runs": "a trial",
    "autotune/online.py AutotuningSession._warm": "a trial",
    "autotune/online.py _prepared": "a session, up to MOST_PREPARED",
    "util/lru.py LruTable.older": "half of the capacity",
    "model/replace.py _of_both": "a class of the program",
    "model/replace.py Replacement.left_alone": "a module, in a report",
    "settings.py _observers": "a module of polyconv",
    "autotune/tuning_lookup.py _loaded": "a file",
    "runtime/frozen_weights.py frozen_marks": "a weight that lives",
}
"""Meaning of each entry of an unbounded table: none is a shape or a call."""


def tables(tree: ast.Module) -> Iterator[str]:
    """Names of empty containers that outlive a call, and of functions with an unbounded cache."""
    for outer in tree.body:
        if isinstance(outer, (ast.Assign, ast.AnnAssign)) and is_empty(outer.value):
            yield ast.unparse(outer.targets[0] if isinstance(outer, ast.Assign) else outer.target)
        for inner in ast.walk(outer):
            decorators = map(ast.unparse, inner.decorator_list) if isinstance(inner, ast.FunctionDef) else ()
            if not {"cache", "lru_cache(maxsize=None)"}.isdisjoint(decorators):
                yield inner.name  # type: ignore[attr-defined]
            if isinstance(inner, (ast.Assign, ast.AnnAssign)) and isinstance(outer, ast.ClassDef):
                target = inner.targets[0] if isinstance(inner, ast.Assign) else inner.target
                if is_empty(inner.value) and ast.unparse(target).startswith("self."):
                    yield f"{outer.name}.{ast.unparse(target).removeprefix('self.')}"
            if isinstance(inner, ast.AnnAssign) and isinstance(outer, ast.ClassDef):
                factory = "default_factory=dict" in ast.unparse(inner.value or ast.Constant(None))
                yield from [f"{outer.name}.{ast.unparse(inner.target)}"] if factory else []


def is_empty(value: ast.expr | None) -> bool:
    if value is None:
        return False
    return ast.unparse(value) in ("{}", "[]", "set()", "dict()", "list()", "OrderedDict()", "defaultdict(list)")


def test_every_table_without_a_bound_is_known() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.parts[0] not in TOOLS and str(place) not in ("model/aot.py", "model/dry_run.py", "model/explain.py"):
            found |= {f"{place} {name}" for name in tables(ast.parse(path.read_text()))}
    assert found - GROWING.keys() == set(), "bound it, or say in GROWING what its entries stand for"
    assert GROWING.keys() - found == set(), "no longer there"


ONE_PRIMITIVE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
"""oneDNN's primitives are PyTorch's to bound. Replacing a thousand of them fragments the heap, without polyconv too."""


@pytest.mark.skipif(not native.is_available(), reason=str(native.why_absent()))
@pytest.mark.parametrize("tuned", [False, True], ids=["default", "autotuned"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_many_shapes_are_forgotten(training: bool, tuned: bool) -> None:
    """Nightly 20,000 shapes in inference and 5,000 in training, else enough to fill smaller tables."""
    count, capacity = (5_000, 1_024) if training else (20_000, None)
    if not NIGHTLY:
        count, capacity = 200, 64
    assert run_fresh(_growth, training, tuned, count, capacity, timeout=7200, **ONE_PRIMITIVE) < 16 * 2**20


def _growth(training: bool, tuned: bool, count: int, capacity: int | None) -> int:
    """Memory that the second half of the shapes adds [bytes]."""
    bounded = (prepare.known, preferences._outcomes, online._sessions, online._passes)
    if capacity is not None:
        online.MOST_PREPARED = capacity // 4
        for table in bounded:
            table.capacity = capacity
    shapes = [(rows, columns) for rows in range(3, 203) for columns in range(3, 103)]
    random.Random(0).shuffle(shapes)
    conv, half = polyconv.Conv2d(4, 8, 3, padding=1), 0
    with polyconv.benchmark(tuned), torch.set_grad_enabled(training):
        for number, shape in enumerate(shapes[:count]):
            y = conv(torch.zeros(1, 4, *shape, requires_grad=training))
            if training:
                y.sum().backward()
            if number == count // 2:
                gc.collect()
                half = anonymous()
            assert all(len(table) <= table.capacity for table in bounded)
            assert len(online._prepared) <= online.MOST_PREPARED
    gc.collect()
    return anonymous() - half


def anonymous() -> int:
    """Memory that this process has written, resident or swapped [bytes]."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status.get(name, "0 kB").split()[0]) for name in ("RssAnon", "VmSwap")) * 2**10


def test_outcomes_are_found_in_constant_time() -> None:
    """Lookup by key, independent of size: no table is scanned."""
    backend_environment = Environments("cpu")
    preferences.forget_outcomes()
    remembered = len(preferences._measured.entries)
    try:
        for number in range(200):
            preferences.settle(backend_environment, f"problem {number}", "a kernel", "a session")
        compared = Environments.compared
        found = preferences._own("problem 100", backend_environment)
        assert found is not None
        assert found.name == "a kernel"
        assert Environments.compared - compared <= 2
        assert len(preferences._measured.entries) == remembered
    finally:
        preferences.forget_outcomes()


class Environments(str):
    """Counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Environments.compared += 1
        return str.__eq__(self, str(other))


def test_plans_are_small() -> None:
    """A plan stores the chosen candidate. Rejected ones and their reasons are computed for ``explain``."""
    plan = planner.plan_cpu(Problem.make("fprop", (2, 64, 50, 51), (64, 64, 3, 3)))
    assert planner._plan.cache_info().maxsize is not None
    assert planner._offered_here.cache_info().maxsize <= 64
    assert not any(isinstance(getattr(plan, name), (tuple, list)) for name in type(plan).__slots__)


def test_warnings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "_said", {})
    for number in range(3 * warn_once.MOST):
        with pytest.warns(RuntimeWarning, match=str(number)):
            warn_once.warn_once(f"shape {number}")
        assert len(warn_once._said) <= warn_once.MOST
