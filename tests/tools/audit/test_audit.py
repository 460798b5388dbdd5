"""audit: errors against float64, the tolerance that keeps a limit, and an unchanged model."""

from __future__ import annotations

import copy
import json
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyconv
from geometries import CASES, Case
from networks import ResNet18
from polyconv.backend import override
from polyconv.cpu import native
from polyconv.dispatch.prepare import Ran, observed
from polyconv.numerics import reference
from polyconv.problem import Pass
from polyconv.tools.audit import Row, auditor
from polyconv.tools.audit.figures import Yardstick, slabs
from polyconv.util import console
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)


def only(report: polyconv.Audit, layer: str = "", kind: str = "forward") -> Row:
    (row,) = (row for row in report.rows if (row.layer, row.kind) == (layer, kind))
    return row


def fast() -> polyconv.Conv2d:
    """A convolution with a fast plan."""
    return polyconv.Conv2d(16, 32, 3, padding=1)


IMAGE = (2, 16, 48, 64)


# ---- errors


def all_passes(case: Case) -> list[Ran]:
    """The passes of a call, as executed."""
    x, w, bias = case.tensors(torch.float32)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w, bias) if tensor is not None]
    passes: list[Ran] = []
    with observed(passes.append):
        y = polyconv.conv2d(*leaves, **case.kwargs)
        y.backward(torch.randn_like(y))
    return passes


@pytest.mark.parametrize("products", [1, reference.PRODUCTS], ids=["a row at a time", "whole images"])
@pytest.mark.parametrize("name", CASES)
def test_slabs_are_the_reference(name: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output element in float64, and the same pass of the squares for its neighbourhood."""
    monkeypatch.setattr(reference, "PRODUCTS", products)
    for ran in all_passes(CASES[name]):
        expected = _reference(ran, 1), _reference(ran, 2)
        seen = {name: torch.zeros_like(value) for name, value in expected[0].items()}
        for slab in slabs(ran.problem, ran.tensors):
            value, squares = (one[slab.output][slab.place] for one in expected)
            torch.testing.assert_close(slab.exact, value, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(slab.own.square(), squares, rtol=1e-10, atol=1e-10)
            seen[slab.output][slab.place] += 1
        assert all(bool((count == 1).all()) for count in seen.values())


def _reference(ran: Ran, power: int) -> dict[str, Tensor]:
    problem = ran.problem
    t = {name: tensor.double().pow(power) for name, tensor in ran.tensors.items()}
    if problem.kind is Pass.FPROP:
        return {"y": reference.fprop(problem, t["x"], t["w"], t.get("bias"))}
    if problem.kind is Pass.DGRAD:
        return {"x": reference.dgrad(problem, t["y"], t["w"], problem.x_shape)}
    dw, db = reference.wgrad(problem, t["x"], t["y"], problem.w_shape)
    return {"dw": dw, "db": db} if problem.bias else {"dw": dw}


def test_figures_are_what_the_documentation_defines() -> None:
    conv, x = fast().eval(), torch.randn(IMAGE)
    row = only(polyconv.audit(conv, x))
    with torch.no_grad():
        ours, theirs = conv(x).double(), F.conv2d(x, conv.weight, conv.bias, padding=1).double()
    w, bias = conv.weight.detach().double(), conv.bias.detach().double()  # type: ignore[union-attr]
    y = F.conv2d(x.double(), w, bias, padding=1)
    images, filters = x.double().square().mean((1, 2, 3), keepdim=True), w.square().mean((1, 2, 3)).reshape(1, -1, 1, 1)
    scale = (16 * 9 * images * filters + bias.square().reshape(1, -1, 1, 1)).sqrt()
    own = F.conv2d(x.double().square(), w.square(), bias.square(), padding=1).sqrt()
    for result, error, local in (
        (ours, row.error, row.local_error),
        (theirs, row.torch_error, row.torch_local_error),
    ):
        assert error == pytest.approx(float(((result - y).abs() / scale).max()), rel=1e-6)
        assert local == pytest.approx(float(((result - y).abs() / own).max()), rel=1e-6)
    assert row.error <= row.predicted <= row.tolerance == 1e-4
    assert row.plan in str(polyconv.explain(conv, x))
    assert row.shape == "16→32 3×3"


def test_an_element_of_nothing_but_zeros_is_compared_with_the_last_place_of_the_scale() -> None:
    """A quotient by zero would be infinite for any leak; leaving it out would hide a leak into black."""
    x = torch.zeros(IMAGE)
    x[:, :, 24, 32] = 1.0
    row = only(polyconv.audit(fast().eval(), x))
    assert row.error < row.local_error < inf
    assert only(polyconv.audit(polyconv.Conv2d(16, 32, 3, bias=False).eval(), torch.zeros(IMAGE))).local_error == 0


def test_wrong_or_missing_numbers_are_infinitely_wrong() -> None:
    passes: list[Ran] = []
    with torch.no_grad():
        with observed(passes.append):
            fast()(torch.randn(IMAGE))
        (ran,) = passes
        yardstick = Yardstick(ran.problem, ran.tensors)
    for spoilt in (torch.nan, inf):
        y = ran.tensors["y"].clone()
        y[1, 2, 3, 4] = spoilt
        assert yardstick.measure({"": {"y": y}})[""].error == inf


def test_what_no_float32_can_hold_is_no_error() -> None:
    """The exact sum exceeds the largest number: infinity is correct."""
    conv = polyconv.Conv2d(1, 1, 1, bias=False).eval()
    nn.init.constant_(conv.weight, 10.0)
    row = only(polyconv.audit(conv, torch.full((1, 1, 4, 4), 1e38)))
    assert (row.error, row.local_error) == (0.0, 0.0)


# ---- uneven data, and the tolerance that fixes it


def test_one_loud_pixel_shows_beside_its_quiet_neighbours_and_tolerance_0_mends_it() -> None:
    conv, x = fast().eval(), torch.randn(IMAGE)
    x[0, 3, 20, 30] = 1e8
    report = polyconv.audit(conv, x, local_limit=1e-5)
    row = only(report)
    assert row.error < 3e-4
    assert row.local_error > 1
    assert row.torch_local_error < 1e-5
    assert row.remedy is not None
    assert row.remedy.tolerance == 0
    assert not report.ok()
    assert report.ok(limit=1e-3)
    assert report.apply() == {"": 0.0}
    assert conv.tolerance == 0
    mended = polyconv.audit(conv, x, local_limit=1e-5)
    assert mended.ok()
    assert only(mended).local_error == pytest.approx(row.remedy.local_error)
    assert only(mended).plan == row.remedy.plan


def test_every_output_map_is_measured_in_its_own_scale() -> None:
    """Weights from 1 down to 1e-12: in the scale of the whole output, the quietest channel's error would vanish, and
    the loudest one's exceed its prediction."""
    conv, x = fast().eval(), torch.randn(IMAGE)
    with torch.no_grad():
        conv.weight.mul_(torch.logspace(0, -12, 32).reshape(-1, 1, 1, 1))
        conv.bias.zero_()  # type: ignore[union-attr]
        y = conv(x).double()
    w = conv.weight.detach().double()
    deviation = (y - F.conv2d(x.double(), w, padding=1)).abs()
    own = F.conv2d(x.double().square(), w.square(), padding=1).sqrt()[:, -1]
    whole = float((16 * 9 * x.double().square().mean() * w.square().mean()).sqrt())
    row = only(polyconv.audit(conv, x))
    assert float(deviation[:, -1].max()) / whole < row.error / 1e3
    assert row.error <= row.predicted < float(deviation.max()) / whole
    assert row.error / 1e3 < float((deviation[:, -1] / own).max()) <= row.local_error < 1e-3


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_a_dead_filter_is_measured_by_its_bias(activation: str) -> None:
    """Pruned or decayed to nothing: only the bias remains, which rounds to its own precision in any algorithm."""
    conv = polyconv.Conv2d(16, 32, 3, padding=1, activation=activation).eval()
    with torch.no_grad():
        conv.weight[:4] = 0
        conv.weight[4:8] *= 1e-12
        conv.bias[8:10], conv.weight[8:10] = 0, 0  # type: ignore[index]
    row = only(polyconv.audit(conv, torch.randn(IMAGE)))
    assert 0 < row.error <= row.predicted
    assert row.torch_error <= row.predicted


def test_the_tolerance_that_is_reported_keeps_the_limit() -> None:
    conv, x = fast(), torch.randn(IMAGE)
    report = polyconv.audit(conv, x, limit=1e-5)
    exceeding = [row for row in report.rows if row.error > 1e-5]
    assert exceeding
    assert all((row.remedy is not None) == (row in exceeding) for row in report.rows)
    for row in exceeding:
        assert row.remedy is not None
        assert row.remedy.tolerance is not None
        assert row.remedy.error <= 1e-5
        assert row.remedy.tolerance < row.predicted
        assert row.remedy.plan != row.plan
    assert report.tolerances == {"": min(row.remedy.tolerance for row in exceeding if row.remedy)}
    report.apply()
    again = polyconv.audit(conv, x, limit=1e-5)
    assert again.ok()
    assert "every pass keeps the limit" in str(again)


def test_the_tolerance_is_no_smaller_than_needed() -> None:
    """Slightly above the reported one the plan differs, up to the printed digits."""
    conv, x = fast().eval(), torch.randn(IMAGE)
    row = only(polyconv.audit(conv, x, limit=1e-5))
    assert row.remedy is not None
    assert row.remedy.tolerance
    for tolerance, kept in ((row.remedy.tolerance, True), (row.predicted, False)):
        conv.tolerance = tolerance
        assert polyconv.audit(conv, x).ok(1e-5) == kept


def test_pytorchs_error_as_a_tolerance() -> None:
    """Its name is printed, not the number that stands for it, and smaller tolerances are tried from its value down."""
    conv, x = polyconv.Conv2d(16, 64, 3, padding=1, tolerance="torch").eval(), torch.randn(1, 16, 32, 32)
    row = only(polyconv.audit(conv, x))
    report = polyconv.audit(conv, x, limit=row.error / 1.001)
    assert "  torch -> " in str(report)
    tried = only(report).remedy
    assert tried is not None
    assert tried.plan != row.plan
    assert tried.tolerance is None or 0 <= tried.tolerance < row.predicted


def test_a_limit_that_nothing_keeps() -> None:
    conv, x = fast().eval(), torch.randn(IMAGE)
    report = polyconv.audit(conv, x, limit=1e-9)
    row = only(report)
    assert row.remedy is not None
    assert row.remedy.tolerance is None
    assert 1e-9 < row.remedy.error < row.error
    assert report.tolerances == report.apply() == {}
    assert conv.tolerance is None
    assert report.code() == ""
    assert "no tolerance keeps the limit: direct summation itself" in str(report)
    conv.tolerance = 0
    assert only(polyconv.audit(conv, x)).error == pytest.approx(row.remedy.error)


# ---- whole models


def test_a_network_forward_and_backward() -> None:
    model, x = ResNet18(width=8, classes=10), torch.randn(2, 3, 64, 64)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    report = polyconv.audit(model, x, quiet=True)
    assert list(dict.fromkeys(row.layer for row in report.rows)) == convolutions
    kinds = ["forward", "input gradient", "weight gradient"]
    for name in convolutions:
        expected = kinds if name != convolutions[0] else ["forward", "weight gradient"]  # the image has no gradient
        assert [row.kind for row in report.rows if row.layer == name] == expected
    assert report.mode == "forward and backward"
    assert all(0 < row.error < row.tolerance and row.local_error < 1e-3 for row in report.rows)
    assert report.worst.error == max(row.error for row in report.rows)
    assert report.worst_local.local_error == max(row.local_error for row in report.rows)
    assert all(type(module) is not polyconv.Conv2d for module in model.modules())
    assert {row.kind for row in polyconv.audit(model, x, backward=False, quiet=True).rows} == {"forward"}
    assert {row.kind for row in polyconv.audit(model.eval(), x, quiet=True).rows} == {"forward"}
    assert {row.kind for row in polyconv.audit(model, x, backward=True, quiet=True).rows} == set(kinds)


class Branches(nn.Module):
    """Two convolutions of one input and one shape, one module called twice, one never, one function call."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.never = nn.Conv2d(4, 4, 1)
        self.kernel = nn.Parameter(torch.randn(4, 4, 5, 5))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        y = self.twice(self.twice(self.left(x) + gain * self.right(x)))
        z: Tensor = polyconv.conv2d(y, self.kernel, padding=2)
        return z


def test_each_pass_is_told_under_the_name_of_its_layer() -> None:
    model, x = Branches(), torch.randn(1, 4, 24, 24, requires_grad=True)
    report = polyconv.audit(model, {"x": x, "gain": 2.0})
    names = ["left", "right", "twice", ""]
    assert list(dict.fromkeys(row.layer for row in report.rows)) == names
    for name in names:
        calls = 2 if name == "twice" else 1
        assert [row.calls for row in report.rows if row.layer == name] == [calls] * 3
    assert report.left_alone == {"never": "it does not run on these inputs"}
    assert "forward, 2 calls" in str(report)


def test_gradients_of_branches_are_told_apart_by_the_weight_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules read the same input in the same shape: only the order of the backward pass tells them apart."""
    model = Branches()
    owners = {module.weight.data_ptr(): name for name, module in model.named_children()}
    told: list[tuple[str, str]] = []
    name_of = auditor._Inspector._name

    def inspect(self: auditor._Inspector, ran: Ran) -> None:
        if "w" in ran.tensors:  # the weight gradient reads none; it follows the input's
            told.append((name_of(self, ran.problem), owners.get(ran.tensors["w"].data_ptr(), "")))

    monkeypatch.setattr(auditor._Inspector, "inspect", inspect)
    with pytest.raises(ValueError, match="no convolution ran"):  # nothing was measured
        polyconv.audit(model, torch.randn(1, 4, 24, 24, requires_grad=True))
    assert len(told) == 10
    assert all(name == owner for name, owner in told)


def test_threads_of_autograd_change_the_tables_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    name = auditor._Inspector._name
    monkeypatch.setattr(auditor._Inspector, "_name", lambda self, p: name(self, p) if self._lock.locked() else "racy")
    assert {row.layer for row in polyconv.audit(fast(), torch.randn(IMAGE), backward=True).rows} == {""}


def test_recomputed_layers_keep_their_names() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y

    report = polyconv.audit(Checkpointed(), torch.randn(1, 4, 24, 24, requires_grad=True))
    assert [(row.layer, row.kind, row.calls) for row in report.rows] == [
        (layer, kind, 2 if kind == "forward" else 1)
        for layer in ("inner.0", "inner.2")
        for kind in ("forward", "input gradient", "weight gradient")
    ]


def test_a_module_that_runs_often_reports_its_worst_call() -> None:
    conv = fast().eval()
    loud = torch.randn(IMAGE)
    loud[0, 3, 20, 30] = 1e8
    quiet = torch.randn(IMAGE)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, *images: Tensor) -> list[Tensor]:
            return [self.conv(image) for image in images]

    row = only(polyconv.audit(Both().eval(), (quiet, loud, quiet)), "conv")
    assert row.calls == 3
    assert row.local_error == only(polyconv.audit(conv, loud)).local_error


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), polyconv.Conv2d(8, 4, 3), nn.Flatten())
    model[0].register_forward_hook(lambda *_: None)
    x = torch.randn(2, 3, 24, 24, requires_grad=True)
    model(x).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [(tensor, tensor.grad, tensor.grad.clone()) for tensor in (x, *model.parameters())]  # type: ignore
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    classes = [type(module) for module in model.modules()]
    generator = torch.get_rng_state()
    model.eval()[1].train()  # mixed modes
    modes = [module.training for module in model.modules()]
    for backward in (False, True):
        report = polyconv.audit(model, x, backward=backward, limit=1e-9)
        assert report.rows
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(t.grad is grad and torch.equal(grad, value) for t, grad, value in gradients)
        assert [dict(module._forward_hooks) for module in model.modules()] == hooks
        assert not any(module._forward_pre_hooks or module._backward_hooks for module in model.modules())
        assert [type(module) for module in model.modules()] == classes
        assert [module.training for module in model.modules()] == modes
        assert not any("tolerance" in vars(module) for module in model.modules())
        assert torch.equal(torch.get_rng_state(), generator)
        assert torch.is_grad_enabled()


def test_a_model_that_fails_is_left_as_it_was_and_its_error_is_its_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(7, 7))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        polyconv.audit(model, torch.randn(1, 3, 24, 24))
    assert type(model[0]) is nn.Conv2d
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    passes: list[Ran] = []
    with observed(passes.append):
        pass
    polyconv.conv2d(torch.randn(1, 3, 24, 24), torch.randn(8, 3, 3, 3))
    assert passes == []


def test_outputs_are_those_of_the_model_while_it_is_observed() -> None:
    conv, x = fast().eval(), torch.randn(IMAGE)
    passes: list[Ran] = []
    with torch.no_grad():
        before = conv(x)
        with observed(passes.append):
            inside = conv(x)
        after = conv(x)
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    assert len(passes) == 1


def test_a_plain_module_is_audited_as_what_replace_makes_of_it() -> None:
    plain, x = nn.Conv2d(16, 32, 3, padding=1).eval(), torch.randn(IMAGE)
    before = polyconv.audit(plain, x, limit=1e-5)
    tolerances = before.apply()
    assert type(plain) is nn.Conv2d
    polyconv.replace(plain)
    assert polyconv.audit(plain, x).ok(1e-5)
    assert tolerances[""] == plain.tolerance


def test_what_a_module_may_be_besides() -> None:
    """Groups, borders, channels_last, parametrised weights, an unbatched image, a fused activation."""
    x = torch.randn(2, 8, 32, 40)
    for module in (
        nn.Conv2d(8, 16, 3, groups=4, padding=1),
        nn.Conv2d(8, 8, 3, groups=8, stride=2),
        nn.Conv2d(8, 16, 5, padding=2, padding_mode="circular"),
        polyconv.Conv2d(8, 16, 3, padding=(0, 1, 2, -1)),
        torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 16, 3)),
        polyconv.Conv2d(8, 16, 3, activation="relu"),
        polyconv.Conv2d(8, 16, 3, activation="silu"),
    ):
        for image in (x, x.to(memory_format=torch.channels_last), x[0]):
            kind = type(module)
            report = polyconv.audit(module, image.clone().requires_grad_(), backward=True)
            assert [row.kind for row in report.rows] == ["forward", "input gradient", "weight gradient"]
            assert report.ok(1e-4), report
            assert type(module) is kind


def test_a_residual_and_an_activation_are_part_of_what_is_exact() -> None:
    conv = polyconv.Conv2d(16, 32, 3, padding=1, activation="relu").eval()
    residual = torch.full((2, 32, 48, 64), 1e3)
    row = only(polyconv.audit(conv, {"input": torch.randn(IMAGE), "residual": residual}))
    assert row.local_error < 1e-6  # a rounding of the residual, by far the largest term


def test_autocast_and_inference_mode_around_it() -> None:
    conv, x = fast().eval(), torch.randn(IMAGE)
    plain = only(polyconv.audit(conv, x))
    with torch.inference_mode(), torch.autocast("cpu"), polyconv.allow_low_precision(False):
        assert only(polyconv.audit(conv, x)) == plain


def test_a_loss_decides_which_gradient_arrives() -> None:
    conv, x = fast(), torch.randn(IMAGE)
    report = polyconv.audit(conv, x, loss=lambda y: (y[0] * 1e-3).square().sum())
    assert [row.kind for row in report.rows] == ["forward", "weight gradient"]
    with pytest.raises(ValueError, match="nothing that the model returns has a gradient"):
        polyconv.audit(nn.Sequential(conv, Detached()), x)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


# ---- the report


def test_the_report_as_text_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 4, 1), Stranger(4, 4, 3)).eval()
    report = polyconv.audit(model, torch.randn(IMAGE), limit=1e-5)
    text = str(report)
    assert text == repr(report)
    assert text.startswith("inference on cpu: 2 convolutions, largest error ")
    tolerance = report.tolerances["0"]
    assert f"0.0001 -> {tolerance:g}" in text
    assert f"model.get_submodule('0').tolerance = {tolerance!r}" in text
    assert "left alone: 2: test_audit.Stranger is a subclass of torch.nn.Conv2d" in text
    found = json.loads(json.dumps(report.as_json()))
    assert found["limit"] == 1e-5
    assert found["tolerances"] == {"0": tolerance}
    assert found["rows"][0]["error"] == report.rows[0].error
    exec(report.code(), {"model": model})
    assert polyconv.audit(model, torch.randn(IMAGE)).ok(1e-5)
    assert report.table().row_count == report.__rich__().row_count == 2
    monkeypatch.setattr(console, "rich", lambda _: None)
    assert str(report) == text
    with pytest.raises(ModuleNotFoundError, match=r"polyconv\[cli\]"):
        report.table()


class Stranger(nn.Conv2d):
    """Does more than a convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_json_has_no_infinity() -> None:
    conv = polyconv.Conv2d(1, 1, 1, bias=False, tolerance=0).eval()
    x = torch.ones(1, 1, 4, 4)
    x[0, 0, 0, 0] = inf
    report = polyconv.audit(conv, x)
    json.dumps(report.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "words"),
    [
        (nn.Linear(3, 3), torch.ones(3), {}, ValueError, "the model has 0 convolutions"),
        (Stranger(3, 3, 1), torch.ones(1, 3, 4, 4), {}, ValueError, "subclass of torch.nn.Conv2d"),
        (nn.LazyConv2d(3, 1), torch.ones(1, 3, 4, 4), {}, ValueError, "call the model once, then audit it"),
        (nn.Conv2d(3, 3, 1), torch.ones(1, 3, 4, 4), {"limit": -1.0}, ValueError, "limit is .* got -1.0"),
        (nn.Conv2d(3, 3, 1), torch.ones(1, 3, 4, 4), {"local_limit": torch.nan}, ValueError, "local_limit is"),
        (nn.Conv2d(3, 3, 1), 7, {}, TypeError, "a tensor, a tuple or list of positional arguments, or a dict"),
        (nn.Conv2d(3, 3, 1), torch.ones(1, 4, 4, 4), {}, RuntimeError, "channels"),
    ],
)
def test_errors_for_people(model: nn.Module, inputs: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        polyconv.audit(model, inputs, **options)


def test_ok_needs_a_limit() -> None:
    report = polyconv.audit(nn.Conv2d(3, 3, 1).eval(), torch.ones(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"report.ok\(1e-5\)"):
        report.ok()


# ---- on a GPU


def test_on_the_virtual_gpu() -> None:
    run_in_virtual_gpu(_audited_on_the_gpu)


def _audited_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))
    x = torch.randn(1, 8, 24, 40)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):
        report = polyconv.audit(model, x, limit=1e-9, quiet=True)
        assert gpu.launches
    assert [row.kind for row in report.rows] == [
        "forward",
        "weight gradient",
        "forward",
        "input gradient",
        "weight gradient",
    ]
    for row in report.rows:
        assert 0 < row.error <= row.predicted
        assert row.remedy is not None
        assert row.remedy.tolerance is None
