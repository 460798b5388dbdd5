"""A/B comparisons of layers and networks: what is compared, figures, tables and charts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyconv import Conv2d, cli
from polyconv.autotune import preferences
from polyconv.cpu import native
from polyconv.dispatch import override
from polyconv.measure import layers as known_layers
from polyconv.measure import timing
from polyconv.measure.timing import Timing
from polyconv.measure.workloads import Workload, issues
from polyconv.tools.bench import ab_compare, ab_suites, charts, journal, model_zoo, suites, tables
from polyconv.tools.bench.ab_compare import AGAIN, OURS, TORCH, Duel, Memory
from polyconv.tools.bench.cases import Case, Cases, Layout, Mode
from polyconv.tools.bench.model_zoo import Network
from polyconv.tools.bench.results import losses

CASES = list(Cases(batches=(1, 2)))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORTEST", 0.0)


def small_layer(**changes: object) -> known_layers.Workload:
    layer = next(layer for layer in known_layers.every() if layer.kernel == (3, 3) and layer.groups == 1)
    return replace(layer, input=(1, 8, 9, 10), out_channels=12, **changes)  # type: ignore[arg-type]


def duel(name: str, ours: float, case: Case = CASES[0], kind: str = "3×3", uses: int = 1) -> Duel:
    times = {TORCH: Timing(1.0, 1.0, 1.0), AGAIN: Timing(1.25, 1.25, 0.8), OURS: Timing(ours, ours, 2 * ours)}
    memory = Memory(2**30, 2**30)
    return Duel(name, "8→12 3×3", kind, case, times, 1e-6, {"fprop direct": 1}, uses, memory)


# ---- what runs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_measured(case: Case) -> None:
    (contest,) = ab_suites.layer_contests(
        [small_layer()], Cases((case.mode,), (case.layout,), (case.batch,), (1,), repeats=1)
    )
    found = contest.run()
    assert found.key == contest.key == f"{small_layer().name}, {case}"
    assert found.timings.keys() == {TORCH, AGAIN, OURS}
    passes = {"fprop"} if case.mode is Mode.INFERENCE else {"fprop", "dgrad", "wgrad"}
    assert {plan.split()[0] for plan in found.plans} == passes
    if case.mode is Mode.INFERENCE:
        assert found.difference is not None
        assert found.difference < 1e-4
    else:
        assert found.difference is None
    assert Duel.from_json(json.loads(json.dumps(found.as_json()))).key == found.key


@pytest.mark.parametrize("mode", list(Mode), ids=str)
def test_ours_is_autotuned_before_it_is_measured(mode: Mode) -> None:
    if not native.is_available():
        pytest.skip(str(native.why_absent()))
    layer = replace(small_layer(), input=(1, 16, 21, 22), out_channels=24)
    cases = Cases((mode,), (Layout.NCHW,), (1,), (1,), repeats=1, benchmark=True)
    (contest,) = ab_suites.layer_contests([layer], cases)
    preferences.forget_outcomes()
    try:
        found = contest.run()
        chosen = {key.split()[0]: outcome.name for (_, key), outcome in preferences._outcomes.every().items()}
        assert set(found.plans) == {f"{kind} {choice}" for kind, choice in chosen.items()}
        assert chosen.keys() == ({"fprop"} if mode is Mode.INFERENCE else {"fprop", "dgrad", "wgrad"})
    finally:
        preferences.forget_outcomes()


def test_autotuned_rows_are_a_suite_of_their_own() -> None:
    names = [suites.of_layers(Cases(benchmark=tuned), (), 1, 0).name for tuned in (False, True)]
    assert names == ["layers", "layers, autotuned"]


class Doubled(nn.Conv2d):
    """A subclass that ``replace`` leaves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


def test_the_override_reaches_what_replace_leaves() -> None:
    """Ours is PyTorch's module, with plans of polyconv; afterwards nothing is overridden."""
    case = Case(Mode.INFERENCE, Layout.NCHW, 1, 1)
    types: list[type[nn.Module]] = []

    def prepare(module: nn.Module, x: torch.Tensor, mode: Mode) -> object:
        types.append(type(module))
        return lambda: module(x)

    plans = {}
    for enable in (False, True):
        cases = Cases(repeats=1, enable=enable)
        found = ab_compare.fight(Doubled(8, 8, 3), torch.randn(1, 8, 9, 9), case, cases, prepare)  # type: ignore[arg-type]
        plans[enable] = found["plans"]
        assert found["difference"] < 1e-4
    assert set(types) == {Doubled}
    assert not plans[False]
    assert [name.split()[0] for name in plans[True]] == ["fprop"]
    assert not override.is_enabled()
    assert suites.of_networks(Cases(enable=True), ["nnu-net"]).name == "networks, enabled"


def test_the_image_of_a_network_needs_no_gradient() -> None:
    stem = replace(small_layer(), input=(1, 3, 9, 10))
    (contest,) = ab_suites.layer_contests([stem], Cases((Mode.TRAINING,), (Layout.NCHW,), (1,), (1,), repeats=1))
    assert {plan.split()[0] for plan in contest.run().plans} == {"fprop", "wgrad"}


@pytest.mark.parametrize("layout", list(Layout), ids=str)
def test_both_sides_have_their_layout_and_their_convolutions(layout: Layout) -> None:
    seen: list[tuple[type[nn.Module], bool]] = []

    def prepare(module: nn.Module, x: torch.Tensor, mode: Mode) -> object:
        first = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
        seen.append((type(first), x.is_contiguous(memory_format=torch.channels_last)))
        return lambda: module(x)

    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    case = Case(Mode.INFERENCE, layout, 2, 1)
    ab_compare.fight(net, torch.randn(2, 4, 8, 8), case, Cases(repeats=1), prepare)  # type: ignore[arg-type]
    last = layout is Layout.CHANNELS_LAST
    assert seen == [(nn.Conv2d, last), (nn.Conv2d, last), (Conv2d, last)]


def test_a_single_image_is_normalised_by_what_is_known() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Dropout())

    one, _ = ab_compare.prepared(net(), torch.randn(1, 3, 4, 4), Case(Mode.TRAINING, Layout.NCHW, 1, 1))
    assert [part.training for part in one] == [True, False, True]  # type: ignore[union-attr]
    two, _ = ab_compare.prepared(net(), torch.randn(2, 3, 4, 4), Case(Mode.TRAINING, Layout.NCHW, 2, 1))
    assert [part.training for part in two] == [True, True, True]  # type: ignore[union-attr]


def test_differences_are_found() -> None:
    y = torch.tensor([1.0, -1.0, 1.0])
    assert ab_compare.difference(y + torch.tensor([0.0, 0.5, 0.0]), y) == pytest.approx(0.5)


# ---- issues


def issue(name: str, **changes: object) -> Workload:
    return replace(next(layer for layer in issues() if layer.name == name), **changes)  # type: ignore[arg-type]


ISSUES = [
    issue("pt#183815 bf16 7x7 dilated", input=(2, 5, 17, 18), out_channels=6),
    issue("hf#45750 patches of 2x14x14", input=(2, 3, 2, 14, 14), out_channels=6),
    issue("sglang#12309 causal", input=(1, 24, 33), out_channels=24, groups=24),
    issue("pt#19651 depthwise denormal", input=(1, 8, 12, 13), out_channels=8, groups=8),
    issue("kokoro#291 upsampling 16/8", input=(1, 8, 9), out_channels=5),
]


@pytest.mark.parametrize("mode", list(Mode), ids=str)
@pytest.mark.parametrize("layer", ISSUES, ids=lambda layer: layer.name)
def test_an_issue_is_measured_with_its_errors(layer: Workload, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_suites, "_alone", lambda measured, packages=(): measured())
    cases = Cases((mode,), tuple(Layout), (99,), (1,), repeats=1)
    contest, *last = ab_suites.issue_contests([layer], cases)
    assert len(last) == (layer.rank > 1)
    found = contest.run()
    assert (found.key, found.case.batch) == (contest.key, layer.input[0])
    assert found.errors is not None
    assert found.errors.keys() == {TORCH, OURS}
    assert all(0 < error < 100 for error in found.errors.values())  # roundings of the layer's own dtype
    assert found.memory is not None
    assert Duel.from_json(json.loads(json.dumps(found.as_json()))) == found


@pytest.mark.parametrize("layer", ISSUES, ids=lambda layer: layer.name)
def test_wrong_results_have_large_errors(layer: Workload) -> None:
    """Flushed denormals, too: their unit is not below their spacing."""
    case = Case(Mode.INFERENCE, Layout.NCHW, layer.input[0], 1)
    module, x = ab_suites.layer_of(layer, case)
    y = module(x).detach()
    flushed = torch.zeros_like(y) if layer.weight_scale < 1 else y * 1.25
    found = ab_suites.errors_of(layer, case, module, x)({"right": y, "wrong": flushed})
    assert found["right"] < 100
    assert found["wrong"] > 10 * found["right"]


def test_layers_that_are_not_trained_are_only_called() -> None:
    suite = suites.of_issues(Cases(layouts=(Layout.NCHW,)), ["pt#146508"])
    assert [contest.key for contest in suite.contests] == ["pt#163347 fp16 3x3, inference, nchw, batch 1, 1 threads"]


@pytest.mark.parametrize("name", ["pt#27971 5,000 lengths", "pt#120982 ISTFT, 5,000 lengths"])
def test_changing_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(ab_suites, "_alone", lambda measured, packages=(): measured())
    monkeypatch.setattr(nn.Conv1d, "forward", lambda self, x: lengths.append(x.shape[2]))
    monkeypatch.setattr(nn.ConvTranspose1d, "forward", lambda self, x: lengths.append(x.shape[2]))
    layer = issue(name, lengths=5)
    (contest,) = ab_suites.issue_contests([layer], Cases(layouts=(Layout.NCHW,)))
    found = contest.run()
    first = layer.input[-1]
    assert sorted(lengths) == sorted(2 * [*range(first, first + 5)])  # PyTorch's side, and again
    assert found.what.endswith("at 5 lengths")
    assert found.memory is not None
    assert found.memory.ours > 50 * 2**20


def test_issues_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--suite", "issues", "--only", "193951", "--repeats", "1", "--threads", "1", "-o", str(out)]
    assert cli.main(["bench", *arguments]) == 0
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["errors"].keys() == {TORCH, OURS}
    assert row["torch_bytes"] > 0
    printed = capsys.readouterr().out
    assert "pt#193951 bf16 2x2" in printed
    assert "ours error" in printed


# ---- networks


def test_the_zoo_is_large_enough() -> None:
    assert len(model_zoo.NETWORKS) >= 30
    assert model_zoo.NETWORKS["resnet50"].input(1) == (1, 3, 224, 224)
    assert model_zoo.NETWORKS["resnet50"].input(8) == (8, 3, 128, 128)
    assert model_zoo.NETWORKS["dcgan"].input(8) == (8, 100, 1, 1)
    assert model_zoo.NETWORKS["unet-volumes"].input(8) == (8, 1, 32, 32, 32)


@pytest.mark.parametrize("name", [name for name, network in model_zoo.NETWORKS.items() if not network.package])
def test_networks_of_our_own(name: str) -> None:
    network = model_zoo.NETWORKS[name]
    module = network.build().eval()
    if not network.kind:
        with torch.inference_mode():
            assert module(torch.randn(2, network.image[0], 32, 32)).isfinite().all()
    with torch.device("meta"):
        module = module.to("meta")
        for batch in (1, 8):
            assert isinstance(module(torch.empty(network.input(batch))), torch.Tensor)


def test_the_family_is_found_by_one_word() -> None:
    """Signals have no channels_last, volumes have their own."""
    suite = suites.of_networks(Cases(batches=(1,)), ["family"])
    assert suite.subjects == ["vocoder", "demucs", "dcgan", "unet-transposed", "unet-volumes"]
    layouts = {name: [c.key for c in suite.contests if c.key.startswith(name)] for name in suite.subjects}
    assert {name: len(keys) for name, keys in layouts.items()} == dict(
        zip(suite.subjects, (2, 2, 4, 4, 4), strict=True)
    )
    case = Case(Mode.INFERENCE, Layout.CHANNELS_LAST, 1, 1)
    _, x = ab_compare.prepared(torch.nn.Conv3d(2, 3, 3), torch.randn(1, 2, 4, 4, 4), case)
    assert x.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("name", [name for name, network in model_zoo.NETWORKS.items() if network.package])
def test_networks_of_others(name: str) -> None:
    network = model_zoo.NETWORKS[name]
    pytest.importorskip(network.package.partition(".")[0])
    with torch.device("meta"):
        module = network.build().eval()
        for batch in (1, 8):
            assert isinstance(module(torch.empty(network.input(batch))), torch.Tensor)


def test_a_network_is_measured_with_its_memory() -> None:
    network = Network("srcnn", model_zoo.NETWORKS["srcnn"].build, (1, 32, 32))
    cases = Cases((Mode.TRAINING,), (Layout.CHANNELS_LAST,), (1,), (1,), repeats=1)
    (contest,) = ab_suites.network_contests([network], cases)
    found = contest.run()
    assert found.key == contest.key
    assert found.what == "32×32"
    assert sum(found.plans.values()) == 8  # three convolutions, the first without an input gradient
    assert found.memory is not None
    assert min(found.memory.torch, found.memory.ours) > 50 * 2**20
    assert Duel.from_json(found.as_json()).memory == found.memory


def test_memory_that_is_too_much() -> None:
    torchs = 2**30
    most = int(1.1 * torchs) + 256 * 2**20
    assert not Memory(torchs, most).too_much
    assert Memory(torchs, most + 2**20).too_much


def test_without_the_zoo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model_zoo, "find_spec", lambda name: None)
    assert cli.main(["bench", "--suite", "networks", "--only", "resnet18,unet"]) == 2
    message = capsys.readouterr().err
    assert "need timm and segmentation_models_pytorch" in message
    assert "pip install 'polyconv[zoo]'" in message
    assert suites.of_networks(Cases(), ["srcnn"]).subjects == ["srcnn"]


# ---- figures


def test_ratios_are_pytorchs_time_over_ours() -> None:
    one = duel("a", 0.5)
    assert (one.ratio, one.ratio_cpu) == (2.0, 1.0)
    assert (one.noise, one.noise_cpu) == (0.8, 1.25)


def test_summaries_have_the_noise_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    last = replace(CASES[0], layout=Layout.CHANNELS_LAST)
    tables._print_summaries([duel("a", 0.25), duel("b", 1.0), duel("c", 1.0, last)], "networks")
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    first, itself, second, _ = (line for line in lines if "inference" in line)
    assert first == "inference nchw 1 polyconv 2 2.00 (1.00 to 4.00) 1.00 (0.50 to 2.00) 1"
    assert itself == "inference nchw 1 torch itself (A/A) 2 0.80 (0.80 to 0.80) 1.25 (1.25 to 1.25)"
    assert second == "inference channels_last 1 polyconv 1 1.00 (1.00 to 1.00) 0.50 (0.50 to 0.50) 1"


def test_losses_are_counted_for_all_that_a_layer_stands_for() -> None:
    found = losses([duel("a", 1.0, uses=3), duel("b", 0.25), duel("c", 2.0, kind="1×1"), duel("d", 0.25, kind="7×7")])
    assert [(loss.kind, loss.lost) for loss in found] == [("3×3", 3.0), ("1×1", 3.0)]
    assert found[0].worst.name == "a"
    assert found[0].plan == "fprop direct"


def test_words_find_layers_by_their_class() -> None:
    suite = suites.of_layers(Cases(), ["depthwise 5x5"], 5, 0)
    every = {layer.name: layer for layer in known_layers.every()}
    assert len(suite.subjects) == 5
    assert all(known_layers.class_of(every[name]).startswith("depthwise 5×5") for name in suite.subjects)
    assert len(suite.contests) == 5 * 8


# ---- tables and charts


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    much = replace(duel("net", 0.5), memory=Memory(2**30, 2**31))
    tables.print_networks([duel("a", 0.5), much], "somewhere")
    printed = capsys.readouterr().out
    assert "torch itself (A/A)" in printed
    assert "2147!" in printed
    assert "! more than 1.1 times PyTorch's memory and 256 MiB: net, inference" in printed
    tables.print_layers([duel("a", 1.0), duel("b", 0.2, kind="1×1")], "somewhere")
    printed = capsys.readouterr().out
    assert "Where time is lost" in printed
    assert "The slowest layers" in printed


def test_a_chart_of_issues_has_all_batches() -> None:
    found = [duel("a", 0.5), duel("b", 0.25, CASES[1])]
    ((panel,),) = charts.of_issues(found)
    assert [bar.name for bar in panel.bars] == ["a", "b"]
    assert panel.below.startswith("1 thread, mean ")


@pytest.mark.parametrize("draw", [charts.of_networks, charts.of_layers], ids=["networks", "layers"])
@pytest.mark.parametrize("count", [1, 20])
def test_charts(draw: object, count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [duel(f"net {n}", 0.3 + n / 10, case, f"kind {n}") for n in range(count) for case in CASES]
    shown = draw(found)  # type: ignore[operator]
    assert [len(row) for row in shown] == [4, 4]
    assert shown[0][0].noise == (1.25, 1.25)
    path = tmp_path / "out.png"
    charts.draw(shown, path, "legend", "somewhere")
    assert path.read_bytes().startswith(b"\x89PNG")


def figure(shown: object, legend: str) -> Any:
    """A chart with a long machine name, in the widest of the usual fonts."""
    pyplot = charts.require(Path("out.png"))
    where = {**journal.setting(), "processor": "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz"}
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        found = charts.figure_of(pyplot, shown, legend, journal.in_words(where, (1, 2, 4, 8)))
        found.draw_without_rendering()
        return found


@pytest.mark.parametrize(
    ("draw", "legend"),
    [(charts.of_networks, charts.NETWORKS_LEGEND), (charts.of_layers, charts.LAYERS_LEGEND)],
    ids=["networks", "layers"],
)
@pytest.mark.parametrize("cases", [CASES[:1], CASES], ids=["one panel", "eight"])
@pytest.mark.parametrize("count", [1, 20])
def test_no_text_leaves_a_chart(draw: Any, legend: str, cases: list[Case], count: int) -> None:
    pytest.importorskip("matplotlib")
    found = [duel(f"a network {n}", 0.3 + n / 10, case, f"a kind {n}") for n in range(count) for case in cases]
    shown = figure(draw(found), legend)
    texts = [text for text in shown.findobj(lambda one: hasattr(one, "get_text")) if text.get_text()]
    assert any("huge pages" in text.get_text() or "small pages" in text.get_text() for text in texts)
    assert any("PyTorch against itself" in text.get_text() for text in texts)
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= shown.bbox.x1, text
        assert box.y1 <= shown.bbox.y1, text


@pytest.mark.parametrize("count", [1, 3])
def test_a_chart_of_networks_has_its_band(count: int) -> None:
    """Also for one network: as far to both sides of 1 as PyTorch against itself."""
    pytest.importorskip("matplotlib")
    shown = figure(charts.of_networks([duel(f"net {n}", 0.5) for n in range(count)]), charts.NETWORKS_LEGEND)
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    (axes,) = shown.axes
    (band,) = (patch for patch in axes.patches if to_hex(patch.get_facecolor()) == charts.BAND)
    ends = axes.transData.inverted().transform(band.get_window_extent())[:, 0]
    assert ends == pytest.approx([0.8, 1.25], rel=0.05)
    assert any("A/A 1.25×" in text.get_text() for text in axes.texts)


def test_layers_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--suite", "layers", "--only", "one pixel", "--sample", "1", "--batch", "1", "--repeats", "1"]
    assert cli.main(["bench", *arguments, "--threads", "1", "-o", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["mode"], row["layout"]) for row in rows] == [(str(m), str(f)) for m in Mode for f in Layout]
    assert all(row["ratio_cpu"] > 0 and row["noise"] > 0 for row in rows)
    assert "torch itself (A/A)" in capsys.readouterr().out
