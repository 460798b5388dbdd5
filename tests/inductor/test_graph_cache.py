"""Compiled training graphs in the caches of Inductor and AOTAutograd, from one process to the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from commands import python
from polyconv import settings
from polyconv.autotune import preferences, rank_consensus, tuning_lookup
from polyconv.autotune.tuning_file import Entry, Tuning, update
from polyconv.cpu import native
from polyconv.inductor import choice, graph_pass, private
from polyconv.inductor.training import graph_key

pytestmark = [
    pytest.mark.usefixtures("_fresh"),
    pytest.mark.skipif(private.missing() is not None or not native.is_available(), reason="needs Inductor"),
]

_PROCESS = """
import hashlib, json, torch
from torch import nn
from torch._dynamo.utils import counters
from polyconv.inductor import swap
swap.MARGIN = swap.COLD = swap.COLD_OPERATORS = 1e-9  # polyconv's operators run, in any layout
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=2))
x = torch.randn(2, 8, 12, 12, requires_grad=True)
y = torch.compile(model, backend="polyconv")(x)
y.square().sum().backward()
found = [y, x.grad, *(p.grad for p in model.parameters())]
bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in found)).hexdigest()
kinds = {kind: counters["aot_autograd"]["autograd_cache_" + kind] for kind in ("hit", "miss", "bypass")}
print(json.dumps([[kind for kind, count in kinds.items() for _ in range(count)], bits]))
"""


def step(folder: Path, **variables: str) -> tuple[list[str], str]:
    """Run a training step in a new process. Returns hits and misses of the graph cache, and a digest of the results."""
    caches = {name: str(folder / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "POLYCONV_CACHE_DIR")}
    said, bits = json.loads(python(_PROCESS, **caches, POLYCONV_TUNING_FILE="", **variables))
    return said, bits


def test_the_next_process_loads_the_graph_unless_its_kernels_would_differ(tmp_path: Path) -> None:
    said, bits = step(tmp_path)
    assert said == ["miss"]
    assert step(tmp_path) == (["hit"], bits)
    assert step(tmp_path, POLYCONV_TOLERANCE="0")[0] == ["miss"]
    file = tmp_path / "POLYCONV_CACHE_DIR" / "tuning.json"
    document = json.loads(file.read_text())
    for section in document["sections"]:
        for key, entry in section["entries"].items():
            if key.startswith("wgrad"):
                entry["choice"] = "direct, ATen"
    file.write_text(json.dumps(document))
    assert step(tmp_path)[0] == ["miss"]


WEIGHTS = frozenset({(16, 8, 3, 3)})


def key() -> str | None:
    return graph_key.key_of_plans(WEIGHTS)


def in_tuning_file(w: str, name: str) -> None:
    entry = Entry(name, {name: 1.0}, 2.0, "2026-01-01T00:00:00Z")
    problem = f"fprop x 2x8x12x12 w {w}, stride 1x1"
    update(tuning_lookup.default_file(), Tuning.of(choice.outcomes_here().environment, {problem: entry}))


@pytest.mark.parametrize(
    "state",
    [
        lambda: settings.use(tolerance=0.0),
        lambda: settings.use(workspace_bytes=0),
        lambda: settings.use(instruction_set="sse4"),
        lambda: settings.use(benchmark=True),
        lambda: torch.backends.cudnn.flags(deterministic=True),
    ],
)
def test_the_key_follows_the_state(state: Callable[[], AbstractContextManager[Any]]) -> None:
    before = key()
    with state():
        assert key() not in (before, None)
    assert key() == before


def test_the_key_has_choices_for_weights_of_the_graph() -> None:
    keys = [key()]
    in_tuning_file("16x8x3x3", "one")
    keys.append(key())
    in_tuning_file("32x8x3x3", "one")
    assert key() == keys[-1]
    environment = choice.outcomes_here().environment
    problem = "dgrad x 2x8x12x12 w 16x8x3x3, stride 1x1"
    preferences.settle(environment, problem, "another", "a test")
    keys.append(key())
    preferences.forget_outcomes()
    assert key() == keys[1]
    remembered = preferences.remember(environment, {problem: "a third"})
    keys.append(key())
    preferences.forget(remembered)
    assert key() == keys[1]
    assert len({*keys}) == 4


def test_without_a_key_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with preferences.watched():
        assert key() is None
    monkeypatch.setattr(rank_consensus, "ranks", lambda: 2)
    assert key() is None


class OfUser(CustomGraphPass):
    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, graph: Graph) -> None: ...

    def uuid(self) -> str | None:
        return self.key


def test_a_key_names_the_passes_of_the_user_and_holds_while_the_state_does() -> None:
    def keys(*given: Any) -> Any:
        options = private.pass_options(print, {"post_grad_custom_pre_pass": list(given)}, lambda: state[0])
        return options["post_grad_custom_pre_pass"].uuid

    state: list[str | None] = ["key"]
    found = keys(OfUser("a"), OfUser("b"))
    assert found() == ("a", "b", "key")
    for unknown in (OfUser(None), print):
        assert keys(unknown)() is None
    state[0] = "another"
    assert found() is None


def test_frozen_graphs_are_not_kept() -> None:
    options = graph_pass.LayerPass(choice.outcomes_here()).options()
    assert options["post_grad_custom_pre_pass"].uuid() is None
