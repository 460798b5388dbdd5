"""Benchmark suites: contests, and how their rows are read, printed and plotted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from ...measure import layers as known_layers
from ...measure.workloads import Workload, issues
from . import ab_suites, charts, model_zoo, passes, tables
from .ab_compare import Duel
from .cases import Cases, Layout, Peer
from .charts import Panel
from .model_zoo import Network
from .peers import contenders, contest, report
from .peers.rows import PeerRow
from .results import Row
from .runner import Contest, Result

R = TypeVar("R", bound=Result)


class NothingError(ValueError):
    """No item of a suite matches the requested words. The message lists the names."""


@dataclass(frozen=True, slots=True)
class Suite(Generic[R]):
    name: str
    subjects: Sequence[str]
    """Names of the workloads, layers or networks."""
    contests: Sequence[Contest[R]]
    read: Callable[[Mapping[str, Any]], R]
    show: Callable[[Sequence[R], str], None]
    """Prints rows; the text describes machine and versions."""
    panels: Callable[[Sequence[R]], list[list[Panel]]]
    legend: str
    title: str = charts.TITLE
    """Of a plot."""


def of_passes(name: str, workloads: Sequence[Workload], options: passes.Options, only: Sequence[str]) -> Suite[Row]:
    """Single passes of named workloads, in both layouts."""
    chosen = {workload.name: workload for workload in workloads}
    chosen = {name: chosen[name] for name in _selected(chosen, chosen, only)}
    contests = passes.contests(list(chosen.values()), options)
    read, show, drawn = Row.from_json, tables.print_passes, charts.of_passes
    return Suite(name, list(chosen), contests, read, show, drawn, charts.PASSES_LEGEND)


def of_networks(cases: Cases, only: Sequence[str]) -> Suite[Duel]:
    """Whole networks; words match name or kind."""
    chosen = _networks(only)
    names, contests = [network.name for network in chosen], ab_suites.network_contests(chosen, cases)
    read, show, drawn = Duel.from_json, tables.print_networks, charts.of_networks
    return Suite(_named("networks", cases), names, contests, read, show, drawn, charts.NETWORKS_LEGEND)


def of_peers(cases: Cases, only: Sequence[str], peers: Sequence[Peer]) -> Suite[PeerRow]:
    """Whole networks beside the graph compilers. The suite's name has their versions, which resumed rows share."""
    chosen = _networks(only)
    versions, subjects = contenders.versions(peers), [network.name for network in chosen]
    contests = contest.contests(chosen, replace(cases, layouts=(Layout.NCHW,)), peers)
    read, show, drawn = PeerRow.from_json, partial(report.print_peers, versions), report.panels
    return Suite(f"networks beside {versions}", subjects, contests, read, show, drawn, report.LEGEND, report.TITLE)


def _networks(only: Sequence[str]) -> list[Network]:
    described = [network.described for network in model_zoo.NETWORKS.values()]
    chosen = [model_zoo.NETWORKS[name] for name in _selected(model_zoo.NETWORKS, described, only)]
    model_zoo.require(chosen)
    return chosen


def of_layers(cases: Cases, only: Sequence[str], size: int, seed: int) -> Suite[Duel]:
    """Random sample of the layers of a hundred networks; words match name or class."""
    every = {layer.name: layer for layer in known_layers.every()}
    found = _selected(every, map(known_layers.described, every.values()), only)
    chosen = known_layers.sample((every[name] for name in found), size, seed)
    names, contests = [layer.name for layer in chosen], ab_suites.layer_contests(chosen, cases)
    read, show, drawn = Duel.from_json, tables.print_layers, charts.of_layers
    return Suite(_named("layers", cases), names, contests, read, show, drawn, charts.LAYERS_LEGEND)


def of_issues(cases: Cases, only: Sequence[str]) -> Suite[Duel]:
    """Layers that issues report; words match the name and the other issues."""
    every = {layer.name: layer for layer in issues()}
    names = _selected(every, [f"{layer.name} {layer.note}" for layer in every.values()], only)
    contests = ab_suites.issue_contests([every[name] for name in names], cases)
    read, show, drawn = Duel.from_json, tables.print_issues, charts.of_issues
    return Suite(_named("issues", cases), names, contests, read, show, drawn, charts.NETWORKS_LEGEND)


def _named(name: str, cases: Cases) -> str:
    """Separate suite name for rows that are autotuned or by the override, which are not resumed into another run."""
    return name + ", enabled" * cases.enable + ", autotuned" * cases.benchmark


def _selected(names: Iterable[str], texts: Iterable[str], words: Sequence[str]) -> list[str]:
    """Names whose texts contain one of the words; all names without words."""
    every = list(names)
    found = [name for name, text in zip(every, texts, strict=True) if known_layers.has_any(text, words)]
    if not found:
        some = ", ".join(every[:40]) + (f" and {len(every) - 40} more" if every[40:] else "")
        raise NothingError(f"nothing has {' or '.join(map(repr, words))} in its name; there are {some}")
    return found
