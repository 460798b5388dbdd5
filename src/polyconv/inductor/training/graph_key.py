"""Key of training graphs in the caches of Inductor and AOTAutograd: all that decides on the calls in a graph beside the
graph itself. In any process with the same key the same graph would be compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from ... import settings
from ...autotune import preferences, rank_consensus
from ...backend import backend_for
from ...cpu import planner
from ...problem import Pass, Shape
from ...util import tf32
from ..private import hint

PACKAGE = Path(__file__).parents[2]


def sizes_of_tensors(gm: GraphModule) -> frozenset[Shape]:
    """Sizes of all tensors of a graph of Dynamo's, its weights among them."""
    graphs = [each.graph for each in gm.modules() if isinstance(each, GraphModule)]
    values = [node.meta.get("example_value") for graph in graphs for node in graph.nodes]
    return frozenset(tuple(map(hint, value.shape)) for value in values if isinstance(value, Tensor))


def key_of_plans(weights: Iterable[Shape]) -> str | None:
    """Digest of all that plans for weights of these sizes depend on. None if anything else decides on them: other
    ranks of a process group, or a block that forces or watches plans."""
    if preferences.are_forced() or rank_consensus.ranks() > 1:
        return None
    backend, device = backend_for(torch.device("cpu")), planner.here()
    sizes = {"x".join(map(str, shape)) for shape in weights}
    measured = preferences.measured(backend.environment())
    parts = (
        _digest_of_code(),
        type(backend),
        settings.current(),
        backend.environment(),
        device,
        device.profile and device.profile.identity,
        torch.backends.cpu.get_cpu_capability(),
        preferences.determinism_is_asked_for(),
        tf32.is_allowed(),
        sorted((key, choice) for key, choice in measured.items() if _weight_of(key) in sizes),
    )
    return sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _weight_of(key: str) -> str | None:
    """Size of the weight of a problem, by its key in tuning files (:func:`~polyconv.tuning_key.problem_key`). None for
    keys of compiled layers, which decide what the graph calls, not how."""
    kind, _, sizes = key.partition(" x ")
    return sizes.partition(" w ")[2].partition(",")[0] if kind in _KINDS else None


_KINDS = frozenset(map(str, Pass))


@lru_cache(maxsize=1)
def _digest_of_code() -> str:
    """Digest of the package: Python, native code, and what the cost model has measured."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".so", ".pyd", ".json"):
            digest.update(f"{path.relative_to(PACKAGE)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
