"""optimize: decisions with a fake timer, exact undoing, and pitfalls of fused activations."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyconv
from networks import DeepLab
from polyconv import settings
from polyconv.autotune import preferences, tuning_file
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.measure import candidate_timing, timing
from polyconv.measure.accuracy import Accuracy
from polyconv.measure.timing import Timing, Within
from polyconv.problem import Problem
from polyconv.runtime.frozen_weights import is_frozen, mark_frozen
from polyconv.tools.optimize import optimizer, recording
from polyconv.tools.optimize.fusion_trace import Flow
from polyconv.util import console
from told_times import FASTER, MODEL, Times, everything_faster

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, (3, 5), bias=False)).eval()


def optimize(model: nn.Module, inputs: Any, timer: Times, **options: Any) -> polyconv.OptimizationReport:
    same, report = polyconv.optimize(model, inputs, timer=timer, quiet=True, **options)
    assert same is model
    return report


def snapshot(model: nn.Module) -> list[Any]:
    """The state that undoing must restore."""
    return [(type(m), dict(m.__dict__.get("_buffers", {})), sorted(m.__dict__), m.training) for m in model.modules()]


X = torch.randn(2, 3, 12, 14)
FOLDED = "faster, with BatchNorm2d 1 inside"


# ---- decisions


def test_what_is_faster_is_swapped_and_the_rest_is_not() -> None:
    model = small()
    report = optimize(model, X, Times({"0": FASTER, MODEL: FASTER}))
    assert type(model[0]) is polyconv.Conv2d
    assert type(model[2]) is nn.Conv2d
    assert report.swapped == ("0",)
    first, second = report.rows
    assert (first.layer, first.before, first.after, first.swapped, first.why) == ("0", 1.0, 0.5, True, FOLDED)
    assert (second.layer, second.before, second.after, second.swapped) == ("2", 1.0, 1.0, False)
    assert second.why == "PyTorch is as fast"
    assert "3→8 3×3" in first.shape
    assert 0 < first.error < 1e-4
    assert 0 < first.torch_error < 1e-5
    assert report.speedup == 1.25
    assert report.mode == "inference"
    report.undo()


@pytest.mark.parametrize("training", [False, True])
def test_one_axis_and_transposed_convolutions(training: bool) -> None:
    """All are measured, as 2-D problems and with exchanged roles. A transposed one takes over no activation."""
    one_axis = [nn.Conv1d(4, 6, 5), nn.ReLU(), nn.ConvTranspose1d(6, 6, 4, 2), nn.ReLU(), nn.Unflatten(2, (5, 10))]
    model = nn.Sequential(*one_axis, nn.ConvTranspose2d(6, 3, 3)).train(training)
    x = torch.randn(2, 4, 28)
    expected = model(x)
    report = optimize(model, x, everything_faster("0", "2", "5"))
    assert report.swapped == ("0", "2", "5")
    assert [type(model[i]) for i in (0, 2, 5)] == [polyconv.Conv1d, polyconv.ConvTranspose1d, polyconv.ConvTranspose2d]
    assert [type(model[i]) for i in (1, 3)] == [nn.Identity, nn.ReLU]
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
    assert all(0 <= row.error < 1e-4 for row in report.rows)
    report.undo()
    assert type(model[2]) is nn.ConvTranspose1d


@pytest.mark.parametrize(
    ("ours", "swapped", "why"),
    [(0.969, True, FOLDED), (0.971, False, "PyTorch is as fast"), (1.1, False, "PyTorch is faster")],
)
def test_a_gain_within_the_scatter_is_none(ours: float, swapped: bool, why: str) -> None:
    model = small()
    report = optimize(model, X, Times({"0": {"polyconv": ours}, MODEL: FASTER}))
    assert isinstance(model[0], polyconv.Conv2d) is swapped
    assert report.rows[0].why == why
    report.undo()


@pytest.mark.parametrize("after", [1.0, 1.2])
def test_never_slower_the_whole_model_has_the_last_word(after: float) -> None:
    model = small()
    before, y = snapshot(model), model(X)
    report = optimize(model, X, Times({"0": FASTER, "2": FASTER, MODEL: {"before": 1.0, "after": after}}))
    assert report.swapped == ()
    assert report.after == report.before
    assert "undone" in report.verdict
    assert report.choices == {}
    assert {row.why for row in report.rows} == {"faster alone, but not in the whole model"}
    assert snapshot(model) == before
    assert torch.equal(model(X), y)


def test_large_gains_alone_may_be_what_helps_the_model() -> None:
    model = small()
    whole = {"before": 1.0, "after": 1.1, "after, large gains only": 0.9}
    report = optimize(model, X, Times({"0": FASTER, "2": {"polyconv": 0.9}, MODEL: whole}))
    assert report.swapped == ("0",)
    assert type(model[2]) is nn.Conv2d
    assert [row.why for row in report.rows] == [FOLDED, "faster alone, but not in the whole model"]
    assert report.after.best == 0.9
    report.undo()
    both = {"before": 1.0, "after": 0.8, "after, large gains only": 0.9}
    report = optimize(model, X, Times({"0": FASTER, "2": {"polyconv": 0.9}, MODEL: both}))
    assert report.swapped == ("0", "2")
    report.undo()
    assert {type(model[0]), type(model[2])} == {nn.Conv2d}


def test_the_median_counts_too() -> None:
    class Lucky(Times):
        def __call__(self, what: str, *rest: Any) -> Mapping[str, Timing]:
            timings = dict(super().__call__(what, *rest))
            if "after" in timings:
                timings["after"] = Timing(best=0.5, median=1.5)
            return timings

    model = small()
    assert optimize(model, X, Lucky({"0": FASTER, MODEL: FASTER})).swapped == ()
    assert type(model[0]) is nn.Conv2d


def test_a_machine_that_is_too_noisy_to_judge() -> None:
    """The same model, timed twice, differs by more than the gain."""
    model = small()
    whole = {"before": 1.0, "before, again": 1.2, "after": 0.9}
    report = optimize(model, X, Times({"0": FASTER, MODEL: whole}))
    assert report.swapped == ()
    assert report.spread == pytest.approx(0.2)
    assert report.verdict.startswith("the machine was too noisy to judge: with the swaps it is 11.1% faster, but the")
    assert "differed by 20.0% from itself" in str(report)
    assert report.as_json()["spread"] == report.spread
    whole["before, again"] = 1.05
    report = optimize(model, X, Times({"0": FASTER, MODEL: whole}))
    assert report.swapped == ("0",)
    report.undo()


def test_what_there_is_no_time_for_stays_and_is_named() -> None:
    model = small()
    report = optimize(model, X, everything_faster("0", "2"), seconds=0.0)
    assert report.swapped == ()
    assert set(report.left_alone) == {"0", "2"}
    assert all("seconds of measuring were spent" in why for why in report.left_alone.values())


def test_nothing_faster_nothing_done() -> None:
    model = small()
    before = snapshot(model)
    report = optimize(model, X, Times())
    assert snapshot(model) == before
    assert report.verdict == "no convolution is faster in polyconv"
    assert report.speedup == 1.0


def test_the_fastest_candidate_runs_afterwards() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)).eval()
    x = torch.randn(1, 16, 40, 40)

    class Picky(Times):
        def __call__(self, what: str, calls: Any, within: Within) -> Mapping[str, Timing]:
            timings = dict(super().__call__(what, calls, within))
            if what.startswith("fprop"):
                self.chosen = list(timings)[1]  # the model's second one
                timings[self.chosen] = Timing(0.1, 0.1)
            return timings

    timer = Picky({"0": FASTER, MODEL: FASTER})
    report = optimize(model, x, timer)
    assert report.rows[0].plan == timer.chosen
    assert list(report.choices.values()) == [timer.chosen]
    with torch.inference_mode(), preferences.watched() as seen:
        model(x)
    assert [decision.choice for decision in seen] == [timer.chosen]
    assert "measured in this process" in str(polyconv.explain(model, x))
    report.undo()
    assert "measured in this process" not in str(polyconv.explain(polyconv.Conv2d(16, 16, 3, padding=1), x))


def test_a_module_with_several_shapes_is_judged_by_all_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(F.interpolate(self.conv(x), scale_factor=2)))

    model = Twice().eval()
    report = optimize(model, X, everything_faster("conv"))
    assert [row.calls for row in report.rows] == [1, 2]
    assert [row.layer for row in report.rows] == ["conv", "conv"]
    assert report.rows[0].shape != report.rows[1].shape
    assert "1 of 1 convolutions swapped" in str(report)
    report.undo()


def test_what_cannot_be_considered_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Conv2d(3, 4, 3), "idle": nn.Conv2d(3, 4, 3), "halved": nn.Conv2d(3, 4, 3).half()})
    model["ours"] = polyconv.Conv2d(3, 4, 3)
    model["lazy"] = nn.LazyConv2d(3, 3)
    model["normed"] = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    model.eval()
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    report = optimize(model, X, everything_faster("used"))
    assert report.swapped == ("used",)
    assert report.left_alone["idle"] == "it does not run on these inputs"
    assert "float16" in report.left_alone["halved"]
    assert "already" in report.left_alone["ours"]
    assert "lazy" in report.left_alone["lazy"]
    assert "parametrised" in report.left_alone["normed"]


def test_a_model_that_is_polyconvs_already() -> None:
    model = nn.Sequential(polyconv.Conv2d(3, 4, 3)).eval()
    report = optimize(model, X, everything_faster("0"))
    assert report.verdict == "there was nothing to compare"
    assert "restore" in report.left_alone["0"]


def test_inputs_by_position_and_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"y": self.conv(input=x) * scale}

    for inputs in (X, (X,), (X, 2.0), [X, 2.0], {"x": X, "scale": 2.0}, X[0]):
        model = Two().eval()
        report = optimize(model, inputs, everything_faster("conv"))
        assert report.swapped == ("conv",)
        report.undo()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_modes(mode: str, training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode), nn.Conv2d(8, 4, 3)).train(training)
    report = optimize(model, X, everything_faster("0", "1"))
    assert report.swapped == ("0", "1")
    assert all(0 < row.error < 1e-4 for row in report.rows)
    report.undo()


def test_a_tuning_file_keeps_what_was_measured(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = small()
    report = optimize(model, X, Times({"0": FASTER, MODEL: FASTER}), tuning_file=tmp_path / "t.json")
    kept = tuning_file.load(tmp_path / "t.json")
    environment = backend_for(torch.device("cpu")).environment()
    assert len(kept) == 2
    for key, choice in report.choices.items():
        found = kept.find(key, environment)
        assert found is not None
        assert found.choice == choice
        assert found.torch_seconds == 1.0
    report.undo()


def test_what_strays_on_the_data_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(problem: Problem, *_: object, **__: object) -> list[Accuracy]:
        return [Accuracy(error, 1.0) for error in (1e-3 if problem.in_channels == 3 else 0.0, 1e-6, 1e-6)]

    monkeypatch.setattr(candidate_timing, "measure_all", measured)
    model = small()
    report = optimize(model, X, everything_faster("0", "2"))
    assert report.swapped == ("2",)
    assert "keeps the tolerance 0.0001 on this data" in report.left_alone["0"]
    assert type(model[0]) is nn.Conv2d
    report.undo()


def test_a_tuning_file_serves_the_fused_convolutions_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = Net(lambda n, x: n.relu(n.a(x)))
    report = optimize(model, X, everything_faster("a"), tuning_file=tmp_path / "t.json")
    report.undo()
    model.a.__class__, model.a.activation = polyconv.Conv2d, "relu"
    polyconv.freeze(model)  # as measured
    with settings.use(tuning_file=(tmp_path / "t.json",)), torch.inference_mode(), preferences.watched() as seen:
        model(X)
    assert [decision.key in report.choices for decision in seen] == [True]
    assert "relu" in seen[0].key
    assert tuning_file.load(tmp_path / "t.json").find(seen[0].key, backend_for(X.device).environment())


# ---- training


def test_training_measures_all_passes_and_leaves_no_trace() -> None:
    model = small().train()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    gradient = model[0].weight.grad
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    timer = everything_faster("0", "2")
    report = optimize(model, X.clone().requires_grad_(), timer)
    assert torch.equal(torch.randn(3), expected)
    assert model[0].weight.grad is gradient
    assert model[2].weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert report.mode == "training"
    assert {what.split()[0] for what in timer.asked} >= {"fprop", "dgrad", "wgrad"}
    assert "wgrad" in report.rows[0].plan
    report.undo()


class Counting(nn.Module):
    """Replaces a buffer at each call, and has one that cannot be copied into."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        result: Tensor = self.conv(x)
        return result


@pytest.mark.parametrize("training", [False, True])
def test_buffers_and_the_gradients_of_inputs_are_put_back(training: bool) -> None:
    model, x = Counting().train(training), X.clone().requires_grad_()
    calls = model.calls
    optimize(model, x, everything_faster("conv"))
    assert model.calls is calls
    assert float(calls) == 0
    assert x.grad is None
    x.grad = gradient = torch.ones_like(x)
    optimize(model, x, everything_faster("conv"))
    assert x.grad is gradient
    assert torch.equal(gradient, torch.ones_like(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
def test_weights_that_a_hook_makes_are_left_alone(training: bool) -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 8, 3)), nn.Conv2d(8, 4, 3)).train(training)
    report = optimize(model, X, everything_faster("0", "1"))
    assert report.swapped == ("1",)
    assert "made anew before each call" in report.left_alone["0"]


def test_a_tuning_file_that_cannot_be_written_changes_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.json"
    path.write_text("{}")
    model = small()
    before = snapshot(model)
    with pytest.raises(tuning_file.TuningError, match="not overwritten"):
        optimize(model, X, everything_faster("0", "2"), tuning_file=path)
    assert snapshot(model) == before


def test_no_gradient_that_nobody_wants_is_timed() -> None:
    model = small().train()
    model[2].weight.requires_grad_(False)
    timer = everything_faster("0", "2")
    optimize(model, X, timer).undo()
    asked = [what for what in timer.asked if what.split()[0] in ("fprop", "dgrad", "wgrad")]
    assert [what.split()[0] for what in asked if "x3x" in what] == ["fprop", "wgrad"]
    assert [what.split()[0] for what in asked if "x8x" in what] == ["fprop", "dgrad"]


def test_a_loss_of_ones_own_and_none_at_all() -> None:
    model = small().train()
    seen = []
    optimize(model, X, everything_faster("0"), loss=lambda y: (seen.append(y.shape), y.square().mean())[1]).undo()
    assert seen
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        optimize(model, X, Times())


# ---- undoing


@pytest.mark.parametrize("training", [False, True])
def test_weights_of_what_is_swapped_are_frozen_in_inference(training: bool) -> None:
    """Only those; also while measuring, so that choices are made for frozen weights."""
    model = small().train(training)
    report = optimize(model, X, Times({"0": FASTER, MODEL: FASTER}))
    assert [is_frozen(model[0]), is_frozen(model[2])] == [not training, False]
    assert any("frozen weights" in key for key in report.choices) == (not training)
    report.undo()
    assert not is_frozen(model[0])


def test_a_promise_that_was_made_before_outlives_undo() -> None:
    model = small()
    mark_frozen(model[0].weight)
    optimize(model, X, Times({"0": FASTER, MODEL: FASTER})).undo()
    assert is_frozen(model[0])


def test_what_stops_on_the_way_leaves_no_promise() -> None:
    def stop(*_: object) -> Any:
        raise KeyboardInterrupt

    model = small()
    with pytest.raises(KeyboardInterrupt):
        polyconv.optimize(model, X, timer=stop, quiet=True)
    assert not any(map(is_frozen, model))


@pytest.mark.parametrize("training", [False, True])
def test_undo_brings_everything_back(training: bool) -> None:
    torch.manual_seed(0)
    model = DeepLab(4, classes=3).train(training)
    before, keys = snapshot(model), list(model.state_dict())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    x = torch.randn(1, 3, 32, 32)
    y = model(x)
    model.train(training)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    report = optimize(model, x, everything_faster(*names))
    assert len(report.swapped) == len(names)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.eval()
    torch.testing.assert_close(model(x), y, rtol=1e-3, atol=1e-4)
    model.train(training)
    report.undo()
    report.undo()
    assert snapshot(model) == before
    model.eval()
    assert torch.equal(model(x), y)
    pooled = next(row for row in report.rows if row.layer == "pyramid.pooled.0")
    assert pooled.why == "faster, with relu inside"


# ---- the report


def test_the_report_prints_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    report = optimize(model, X, Times({"0": FASTER, MODEL: FASTER}))
    text = str(report)
    assert text.splitlines()[0] == "inference on cpu: 1 of 2 convolutions swapped"
    assert "swapped: faster" in text
    assert text.splitlines()[-1] == "the model: 1000 ms before, 800 ms now: 1.25 times as fast"
    assert repr(report) == text
    assert report.table().row_count == 2
    assert report.__rich__().row_count == 2
    monkeypatch.setattr(console, "rich", lambda _: None)
    assert str(report) == text
    with pytest.raises(ModuleNotFoundError, match=r"polyconv\[cli\]"):
        report.table()
    found = json.loads(json.dumps(report.as_json()))
    assert found["speedup"] == 1.25
    assert found["rows"][0]["layer"] == "0"
    report.undo()


def test_by_the_clock() -> None:
    """With real times: the model computes the same, and can be undone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, (5, 9), padding=(2, 4)), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    x = torch.randn(1, 8, 48, 48)
    before, y = snapshot(model), model(x)
    _, report = polyconv.optimize(model, x, quiet=True, candidates=2)
    torch.testing.assert_close(model(x), y, rtol=1e-3, atol=1e-4)
    assert report.after.best <= report.before.best
    report.undo()
    assert snapshot(model) == before
    assert torch.equal(model(x), y)


def test_work_on_a_gpu_is_finished_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(recording, "now", lambda _: timing.now(torch.device("cuda", 1)))
    recording.record(model := nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), {"0": model[0]}, X, None)
    assert waited == [torch.device("cuda", 1)] * 4


# ---- fused activations: what may be fused, and the traps


def groups(model: nn.Module, x: Tensor = X) -> tuple[list[tuple[str, list[str], list[str]]], Callable[[str], str]]:
    """Fusions that the data flow allows, by name; and the reasons against, by convolution."""
    names = {module: name for name, module in model.named_modules()}
    convolutions = {name: m for m, name in names.items() if type(m) is nn.Conv2d}
    flow: Flow = recording.record(model, convolutions, x, None).flow
    found = [(kind, [names[c] for c in convs], sorted(names[a] for a in acts)) for kind, convs, acts in flow.groups()]
    return found, lambda name: flow.why_not(convolutions[name])


class Net(nn.Module):
    """Two convolutions and two activations, combined by a function."""

    def __init__(self, body: Callable[[Net, Tensor], Any], inplace: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.relu, self.silu = nn.ReLU(inplace), nn.SiLU(inplace)
        self.body = body
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_plain_chains_are_fused(training: bool, inplace: bool) -> None:
    model = Net(lambda n, x: n.silu(n.b(n.relu(n.a(x)))), inplace).train(training)
    assert groups(model)[0] == [("relu", ["a"], ["relu"]), ("silu", ["b"], ["silu"])]


def test_one_activation_after_two_convolutions_is_one_group() -> None:
    model = Net(lambda n, x: n.relu(n.b(n.relu(n.a(x)))))
    assert groups(model)[0] == [("relu", ["a", "b"], ["relu"])]


TRAPS: dict[str, tuple[Callable[[Net, Tensor], Any], str, str]] = {
    "relu shared with an addition": (lambda n, x: n.relu(n.relu(n.a(x)) + x), "a", "relu is also called on something"),
    "output used twice": (lambda n, x: (y := n.a(x), n.relu(y) + y)[1], "a", "its output is read by aten::add"),
    "output viewed": (lambda n, x: (y := n.a(x), n.relu(y), y[0])[1], "a", "its output is read by aten::select"),
    "two activations": (lambda n, x: (y := n.a(x), n.relu(y) + n.silu(y))[1], "a", "its output is read by aten::silu"),
    "activated twice": (lambda n, x: (y := n.a(x), n.relu(y) + n.relu(y))[1], "a", "its output is read by aten::relu"),
    "output returned": (lambda n, x: (y := n.a(x), [n.relu(y), y])[1], "a", "returned by the model"),
    "function instead of a module": (lambda n, x: F.relu(n.a(x)), "a", "its output is read by aten::relu"),
    "forward called by hand": (lambda n, x: n.relu.forward(n.a(x)), "a", "its output is read by aten::relu"),
    "something in between": (lambda n, x: n.relu(n.a(x) * 2), "a", "its output is read by aten::mul"),
    "a convolution in between": (lambda n, x: n.relu(n.b(n.a(x))), "a", "its output is read by aten::convolution"),
    "two kinds": (lambda n, x: n.silu(n.a(n.relu(n.a(x)))), "a", "different activations follow it"),
    "kept": (lambda n, x: (n.__dict__.update(kept=n.a(x)), n.relu(n.kept))[1], "a", "kept after the call"),
    "once without": (lambda n, x: n.a(n.relu(n.a(x))), "a", "returned by the model"),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("trap", TRAPS)
def test_traps(trap: str, training: bool) -> None:
    body, name, why = TRAPS[trap]
    found, why_not = groups(Net(body).train(training))
    assert not [group for group in found if name in group[1]]
    assert why in why_not(name)


def test_in_place_and_read_before() -> None:
    model = Net(lambda n, x: (y := n.a(x), s := y.sum(), n.relu(y) + s)[2], inplace=True)
    found, why_not = groups(model)
    assert found == []
    assert "aten::sum" in why_not("a")


def test_in_place_and_read_afterwards_reads_what_was_activated() -> None:
    model = Net(lambda n, x: (y := n.a(x), n.relu(y), y + 1)[2], inplace=True)
    assert groups(model)[0] == [("relu", ["a"], ["relu"])]
    y = model(X)
    report = optimize(model, X, everything_faster("a"))
    assert type(model.relu) is nn.Identity
    torch.testing.assert_close(model(X), y, rtol=1e-4, atol=1e-5)
    report.undo()
    assert torch.equal(model(X), y)


@pytest.mark.parametrize("where", ["a", "relu"])
def test_modules_with_hooks_are_not_fused(where: str) -> None:
    model = Net(lambda n, x: n.relu(n.a(x)))
    model.get_submodule(where).register_forward_hook(lambda *_: None)
    assert groups(model)[0] == []


@pytest.mark.parametrize("where", ["a", "silu"])
def test_modules_with_a_forward_of_their_own_are_not_fused(where: str) -> None:
    """Another class does not change such a module's result: SiLU would be applied twice."""
    model = Net(lambda n, x: n.silu(n.a(x)))
    module = model.get_submodule(where)
    module.forward = module.forward  # as a removed wrapper leaves it
    y = model(X)
    assert groups(model)[0] == []
    optimize(model, X, everything_faster("a"))
    assert type(model.a) is polyconv.Conv2d
    torch.testing.assert_close(model(X), y, rtol=1e-4, atol=1e-5)


def test_a_hook_of_a_container_sees_the_output() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 3)), nn.ReLU()).eval()
    assert groups(model)[0] == [("relu", ["0.0"], ["1"])]
    model[0].register_forward_hook(lambda *_: None)
    found, why_not = groups(model)
    assert found == []
    assert why_not("0.0") == "a hook of 0 sees its output"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_fused_model_computes_the_same(training: bool, inplace: bool) -> None:
    model = Net(lambda n, x: n.silu(n.b(n.relu(n.a(x)))), inplace).train(training)

    def gradients() -> list[Tensor]:
        y = model(X)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]

    expected, before = gradients(), snapshot(model)
    report = optimize(model, X, everything_faster("a", "b"))
    assert [(type(m), getattr(m, "activation", None)) for m in (model.a, model.b, model.relu, model.silu)] == [
        (polyconv.Conv2d, "relu"),
        (polyconv.Conv2d, "silu"),
        (nn.Identity, None),
        (nn.Identity, None),
    ]
    assert [row.why for row in report.rows] == ["faster, with relu inside", "faster, with silu inside"]
    assert [row.after for row in report.rows] == [0.4, 0.4]
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    report.undo()
    assert snapshot(model) == before
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_a_group_is_fused_whole_or_not_at_all() -> None:
    model = Net(lambda n, x: n.relu(n.b(n.relu(n.a(x)))))
    slow = {"PyTorch": 1.0, "polyconv": 0.9, "polyconv, fused": 3.0}
    report = optimize(model, X, Times({"a": FASTER, "b": slow, MODEL: FASTER}))
    assert type(model.relu) is nn.ReLU
    assert [row.why for row in report.rows] == ["faster", "faster"]
    assert not any("activation" in module.__dict__ for module in model.modules())
    report.undo()


def test_fusing_can_be_declined() -> None:
    model = Net(lambda n, x: n.relu(n.a(x)))
    report = optimize(model, X, everything_faster("a"), fuse=False)
    assert type(model.relu) is nn.ReLU
    assert report.rows[0].why == "faster"
    report.undo()


def test_imported_on_demand() -> None:
    assert polyconv.optimize is optimizer.optimize
