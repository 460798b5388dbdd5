"""``polyconv bench --peers``: contenders and their processes, what a row says, random statistics of the networks."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from polyconv import Conv2d, cli
from polyconv.measure import environment
from polyconv.tools.bench import charts, model_zoo, suites
from polyconv.tools.bench.ab_compare import difference
from polyconv.tools.bench.cases import Case, Cases, Layout, Mode, Peer
from polyconv.tools.bench.model_zoo import Network, UNet
from polyconv.tools.bench.peers import contenders, contest, report
from polyconv.tools.bench.peers.contenders import BACKEND, EAGER, OPTIMIZE, PACKAGE, REPLACE, Job, RefusedError
from polyconv.tools.bench.peers.rows import Entry, PeerRow

TOY = Network("toy", partial(UNet, 2, channels=3, width=4, levels=2, classes=2), (3, 16, 16))
INFERENCE, TRAINING = (Case(mode, Layout.NCHW, 2, 1) for mode in Mode)


def job(contender: str, folder: Path, case: Case = INFERENCE, network: Network = TOY) -> Job:
    (folder / contenders.NETWORK).write_bytes(pickle.dumps(network))
    return Job(contender, case, folder)


def ready(contender: str, folder: Path, case: Case = INFERENCE) -> contenders.Ready:
    found = job(contender, folder, case)
    return contenders.build(found, *contenders.source(found))


def row(name: str = "net", case: Case = INFERENCE, **times: float) -> PeerRow:
    """Entries with these best times in odd rounds, and 1.25 times as long ones in even rounds."""
    names = {"replace": REPLACE, "optimize": OPTIMIZE}
    entries = [
        Entry(names.get(key, key), setup_s=2.0, error=1e-6, peak_bytes=10**9, samples_s=[1.25 * t, t], cpu_s=[t, t])
        for key, t in times.items()
    ]
    return PeerRow(name, "16×16", case, [*entries, Entry("openvino", "not installed: pip install")])


# ---- contenders


@pytest.mark.parametrize("case", [INFERENCE, TRAINING], ids=str)
@pytest.mark.parametrize("contender", [name for name in contenders.names([], 2) if name not in (OPTIMIZE, BACKEND)])
def test_contenders_agree_with_float64(contender: str, case: Case, tmp_path: Path) -> None:
    contest.write_reference(job(EAGER, tmp_path, case))
    reference = torch.load(tmp_path / contest.REFERENCE)
    assert reference.dtype == torch.float64
    assert 0 < difference(ready(contender, tmp_path, case).result, reference) < 1e-3


def test_compile_is_called_with_frozen_weights_in_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without checks of modules. polyconv's backend freezes by itself."""
    config = import_module("torch._inductor.config")
    calls: list[tuple[str, bool]] = []

    def compiled(module: nn.Module, backend: str, options: dict[str, object] | None = None) -> nn.Module:
        calls.append((backend, options is not None and "guard_filter_fn" in options))
        return module

    monkeypatch.setattr(torch, "compile", compiled)
    for contender in (Peer.COMPILE, BACKEND):
        for case in (INFERENCE, TRAINING):
            with config.patch(freezing=False):
                found = ready(contender, tmp_path, case)
                assert config.freezing is (contender == Peer.COMPILE and case is INFERENCE)
            with found.block():
                assert torch.is_grad_enabled() is (case is TRAINING)
    assert calls == [("inductor", True), ("inductor", False), ("polyconv", True), ("polyconv", False)]


@pytest.mark.parametrize("peer", contenders.EXPORTED)
def test_peers_that_read_the_exported_network(peer: Peer, tmp_path: Path) -> None:
    for package in ("onnxscript", peer):
        pytest.importorskip(package)
    contest.write_reference(job(peer, tmp_path))
    contenders.export(job(peer, tmp_path))
    found = ready(peer, tmp_path)
    found.call()
    assert difference(found.result, torch.load(tmp_path / contest.REFERENCE)) < 1e-4


def test_the_older_exporter_takes_what_the_newer_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def exporting(*_: object, dynamo: bool, **__: object) -> None:
        tried.append(dynamo)
        if dynamo or len(tried) > 2:
            raise ValueError("too new\nfor this")

    monkeypatch.setattr(torch.onnx, "export", exporting)
    contenders.export(job(Peer.ONNXRUNTIME, tmp_path))
    assert tried == [True, False]
    with pytest.raises(RefusedError, match="not exported: ValueError: too new; ValueError: too new"):
        contenders.export(job(Peer.ONNXRUNTIME, tmp_path))


def test_what_cannot_run_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for contender in (*contenders.EXPORTED, Peer.AOTINDUCTOR, PACKAGE):
        assert contenders.refusal(job(contender, tmp_path, TRAINING)) == "inference only"
    monkeypatch.setattr(contenders, "_version", lambda package: None)
    assert contenders.refusal(job(Peer.OPENVINO, tmp_path)) == "not installed: pip install 'polyconv[peers]'"
    assert contenders.refusal(job(Peer.COMPILE, tmp_path)) == ""
    for name, value in environment.ISAS["avx2"].items():
        monkeypatch.setenv(name, value)
    assert contenders.refusal(job(Peer.ONNXRUNTIME, tmp_path)).startswith("not limited: ONNX Runtime has no setting")
    suite = suites.of_peers(Cases(batches=(1,)), ["srcnn"], list(Peer))
    assert suite.name == "networks beside compile, aotinductor, onnxruntime (not installed), openvino (not installed)"
    assert [one.key for one in suite.contests] == [f"srcnn, {mode}, batch 1, 1 threads" for mode in Mode]


def test_signals_have_one_layout() -> None:
    assert contenders.names([Peer.COMPILE], 1) == [EAGER, "compile", REPLACE, OPTIMIZE, BACKEND]


def test_packages_are_compared_with_packages() -> None:
    ours = [REPLACE, OPTIMIZE, BACKEND, PACKAGE]
    assert contenders.names([Peer.AOTINDUCTOR], 1) == [EAGER, "aotinductor", *ours]


# ---- processes


def test_a_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders in processes of their own; one of them is unknown there, and one is not installed."""
    monkeypatch.setattr(contest, "names", lambda peers, axes: [EAGER, REPLACE, "unknown", *peers])
    monkeypatch.setattr(contenders, "_version", lambda package: None)
    (one,) = contest.contests([TOY], Cases((Mode.INFERENCE,), (Layout.NCHW,), (2,), repeats=3), [Peer.OPENVINO])
    found = one.run()
    assert found.key == one.key == "toy, inference, batch 2, 1 threads"
    eager, ours, unknown, absent = found.entries
    for entry in (eager, ours):
        assert entry.error is not None
        assert 0 < entry.error < 1e-4
        assert len(entry.samples_s) == len(entry.cpu_s) == 3
        assert min(*entry.samples_s, entry.setup_s) > 0
        assert entry.peak_bytes > 50 * 2**20
    assert unknown.refused == "KeyError: 'unknown'"
    assert absent.refused.startswith("not installed")
    assert PeerRow.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_process_that_ends_is_reported(tmp_path: Path) -> None:
    deadly = Network("deadly", partial(os._exit, 3), (3, 16, 16))
    found = contest.Contender(job(EAGER, tmp_path, network=deadly), 0)
    found.start(0.0, "")
    found.sample()
    assert found.entry() == Entry(EAGER, "it ended its process")
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("contender", [Peer.COMPILE, PACKAGE])
def test_torch_compiles(contender: str, tmp_path: Path) -> None:
    contest.write_reference(job(EAGER, tmp_path))
    found = contest.Contender(job(contender, tmp_path), 0)
    try:
        found.start(0.0, "")
        found.sample()
        entry = found.entry()
    finally:
        found.close()
    assert not entry.refused
    assert entry.error is not None
    assert entry.error < 1e-4


def test_all_libraries_get_threads_and_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.HUGE_PAGES, "1")
    monkeypatch.setenv("GLIBC_TUNABLES", "a=1")
    found = environment.for_any_library(2)
    assert found == {"OMP_NUM_THREADS": "2", "GLIBC_TUNABLES": "a=1:glibc.malloc.hugetlb=1"}
    monkeypatch.setenv(environment.HUGE_PAGES, "0")
    assert environment.for_any_library(2) == {"OMP_NUM_THREADS": "2"}


# ---- rows, tables and pictures


def test_polyconv_is_compared_with_the_best_of_the_others() -> None:
    found = row(eager=4.0, compile=2.0, replace=3.0, optimize=2.5)
    assert found.peer is not None
    assert found.ours is not None
    assert (found.peer.contender, found.ours.contender) == ("compile", OPTIMIZE)
    assert found.of_the_best_peer == found.headline == found.by_rounds == 0.8
    assert found.entries[0].noise == 1.25
    assert row(eager=4.0).of_the_best_peer is None
    assert found.as_json()["entries"][-1] == {"contender": "openvino", "refused": "not installed: pip install"}


def test_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a", eager=4.0, compile=2.0, replace=2.5), row("b", TRAINING, eager=4.0, replace=2.5), row("c")]
    report.print_peers("compile", rows, "somewhere")
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "a inference 2 1 4000 1.00 2.00 1.60 not installed 0.80 0.80" in lines
    assert "c inference 2 1 – – – – – – –" in lines
    assert "a inference 2 1 compile 2000 2000 1.25 1.0e-06 2.0 1000" in lines
    assert "a inference 2 1 openvino not installed: pip install" in lines
    for name in ("of the best peer", "by rounds"):
        assert f"{name}, geometric mean, lowest and highest: 1.13 (0.80 to 1.60)" in lines
    pytest.importorskip("matplotlib")
    charts.draw(report.panels(rows), tmp_path / "out.png", report.LEGEND, "somewhere", report.TITLE)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "layers"], "--peers: for networks only"),
        (["--suite", "networks", "--layout", "nchw", "--benchmark"], "--layout and --benchmark: not with --peers"),
    ],
)
def test_options_that_do_not_go_with_it(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments, "--peers", "compile"]) == 2
    assert message in capsys.readouterr().err


def test_the_override_is_measured_for_networks(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--suite", "issues"], ["W1"], ["--suite", "networks", "--peers", "compile"]):
        assert cli.main(["bench", *arguments, "--enable"]) == 2
        assert "--enable: for networks only" in capsys.readouterr().err


# ---- random statistics


def test_statistics_of_networks_are_random() -> None:
    """So an error in a residual branch reaches the output, whose last normalisation or layer scale is about zero."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.gamma = nn.Parameter(torch.full((3, 1, 1), 1e-6))
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gamma * self.norm(self.conv(x))

    torch.manual_seed(0)
    found, x = model_zoo.randomised(Branch()).eval(), torch.randn(1, 3, 5, 5)
    assert isinstance(found, Branch)
    norm = found.norm
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var, found.gamma):
        assert tensor is not None
        assert tensor.unique().numel() == tensor.numel()
    with torch.no_grad():
        before = found(x)
        found.conv.weight *= 2
        assert difference(found(x), before) > 0.1
    plain = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    assert model_zoo.randomised(plain) is plain
