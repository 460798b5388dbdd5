"""The kinds of benchmark there are: what each measures, how its rows are read again, printed and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..measure import layers as known_layers
from ..measure.workloads import Workload
from . import layers, networks, panels, passes, tables, zoo
from .cases import Cases
from .contests import Contest, Result
from .duels import Duel
from .plot import Panel
from .rows import Row

R = TypeVar("R", bound=Result)


class NothingError(ValueError):
    """No name of a suite has one of the words that were asked for. The message has the names."""


@dataclass(frozen=True, slots=True)
class Suite(Generic[R]):
    """One benchmark, of rows of one kind."""

    name: str
    subjects: Sequence[str]
    """What is measured, by name."""
    contests: Sequence[Contest[R]]
    read: Callable[[Mapping[str, Any]], R]
    """A row from its JSON."""
    show: Callable[[Sequence[R], str], None]
    """Prints rows; the text says where they were measured."""
    panels: Callable[[Sequence[R]], list[list[Panel]]]
    legend: str


def of_passes(name: str, workloads: Sequence[Workload], options: passes.Options, only: Sequence[str]) -> Suite[Row]:
    """Single passes of named workloads, in both layouts."""
    chosen = {workload.name: workload for workload in workloads}
    chosen = {name: chosen[name] for name in _selected(chosen, chosen, only)}
    contests = passes.contests(list(chosen.values()), options)
    read, show, drawn = Row.from_json, tables.print_passes, panels.of_passes
    return Suite(name, list(chosen), contests, read, show, drawn, panels.PASSES_LEGEND)


def of_networks(cases: Cases, only: Sequence[str]) -> Suite[Duel]:
    """Whole networks; words are sought in the kind of a network, too."""
    described = [network.described for network in zoo.NETWORKS.values()]
    chosen = [zoo.NETWORKS[name] for name in _selected(zoo.NETWORKS, described, only)]
    zoo.require(chosen)
    names, contests = [network.name for network in chosen], networks.contests(chosen, cases)
    read, show, drawn = Duel.from_json, tables.print_networks, panels.of_networks
    return Suite(_named("networks", cases), names, contests, read, show, drawn, panels.NETWORKS_LEGEND)


def of_layers(cases: Cases, only: Sequence[str], size: int, seed: int) -> Suite[Duel]:
    """A sample of the layers of a hundred networks; words are sought in the class of a layer, too."""
    every = {layer.name: layer for layer in known_layers.every()}
    found = _selected(every, map(known_layers.described, every.values()), only)
    chosen = known_layers.sample((every[name] for name in found), size, seed)
    names, contests = [layer.name for layer in chosen], layers.contests(chosen, cases)
    read, show, drawn = Duel.from_json, tables.print_layers, panels.of_layers
    return Suite(_named("layers", cases), names, contests, read, show, drawn, panels.LAYERS_LEGEND)


def _named(name: str, cases: Cases) -> str:
    """Rows that were raced are no part of a run whose rows were not."""
    return f"{name}, raced" if cases.benchmark else name


def _selected(names: Iterable[str], texts: Iterable[str], words: Sequence[str]) -> list[str]:
    """The names whose texts have one of the words; all, if there are none."""
    every = list(names)
    found = [name for name, text in zip(every, texts, strict=True) if known_layers.has_any(text, words)]
    if not found:
        some = ", ".join(every[:40]) + (f" and {len(every) - 40} more" if every[40:] else "")
        raise NothingError(f"nothing has {' or '.join(map(repr, words))} in its name; there are {some}")
    return found
