"""``polyconv.enable``: ATen's convolution overridden for every caller, and restored exactly."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import polyconv
from polyconv.autotune import preferences
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.dispatch import override
from polyconv.runtime.bypass import bypassing
from without_aten import enabled_without_aten, names_of

pytestmark = pytest.mark.skipif(not native.is_available(), reason="without native kernels, ATen runs everywhere")

OPERATORS = "aten::convolution", "aten::convolution_backward", "aten::_convolution"


def dispatcher() -> list[str]:
    """All kernels of the overridden operators, and what each dispatch key finds."""
    private: Any = torch._C
    return [show(name) for name in OPERATORS for show in (private._dispatch_dump, private._dispatch_dump_table)]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dispatcher()
    yield
    assert dispatcher() == before


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to register the kernels."""
    if request.param == "python":
        monkeypatch.setattr(override, "why_not_native", lambda: "a test")
    elif (reason := override.why_not_native()) is not None:
        pytest.skip(reason)
    return str(request.param)


def outputs(function: Callable[..., Tensor], *tensors: Tensor | None, **options: Any) -> list[Tensor]:
    """The result, and all gradients of it."""
    y = function(*tensors, **options)
    wanted = [one for one in tensors if one is not None and one.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))]


def tensors_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, last: bool = False) -> list[Tensor]:
    torch.manual_seed(len(shapes))
    made = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    made = [one.to(memory_format=formats[one.dim()]) if last and one.dim() in formats else one for one in made]
    return [one.requires_grad_() for one in made]


KINDS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "1-D": (F.conv1d, ((2, 4, 19), (6, 4, 5), (6,)), {"padding": 2}),
    "1-D, causal depthwise": (F.conv1d, ((2, 8, 19), (8, 1, 4)), {"padding": 3, "groups": 8}),
    "1-D, transposed": (F.conv_transpose1d, ((2, 4, 9), (4, 6, 4), (6,)), {"stride": 2, "padding": 1}),
    "2-D": (F.conv2d, ((2, 8, 12, 13), (16, 8, 3, 5), (16,)), {"padding": (1, 2)}),
    "2-D, same": (F.conv2d, ((2, 8, 12, 13), (16, 8, 3, 5)), {"padding": "same"}),
    "2-D, valid": (F.conv2d, ((2, 8, 12, 13), (16, 8, 3, 5), (16,)), {"padding": "valid", "stride": (1, 2)}),
    "2-D, dilated": (F.conv2d, ((2, 8, 16, 17), (16, 8, 3, 3), (16,)), {"dilation": (2, 3)}),
    "2-D, strided": (F.conv2d, ((2, 8, 16, 17), (16, 8, 3, 3)), {"stride": (2, 3), "padding": 1}),
    "2-D, grouped": (F.conv2d, ((2, 8, 12, 13), (16, 4, 3, 3), (16,)), {"groups": 2}),
    "2-D, depthwise": (F.conv2d, ((2, 8, 12, 13), (8, 1, 5, 5)), {"groups": 8, "padding": 2}),
    "2-D, without a batch": (F.conv2d, ((8, 12, 13), (16, 8, 3, 3)), {}),
    "2-D, transposed": (
        F.conv_transpose2d,
        ((2, 4, 7, 8), (4, 3, 3, 4), (6,)),
        {"stride": 2, "groups": 2, "output_padding": 1, "dilation": (1, 2)},
    ),
    "3-D": (F.conv3d, ((1, 4, 6, 9, 8), (6, 4, 3, 3, 3), (6,)), {"padding": 1}),
    "3-D, valid": (F.conv3d, ((1, 4, 6, 9, 8), (6, 4, 3, 3, 3)), {"padding": "valid"}),
    "3-D, transposed": (F.conv_transpose3d, ((1, 4, 3, 5, 4), (4, 3, 2, 2, 2), (3,)), {"stride": 2}),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, dtype: torch.dtype, last: bool) -> None:
    function, shapes, options = KINDS[kind]
    tensors = tensors_of(*shapes, dtype=dtype, last=last)
    expected = outputs(function, *tensors, **options)
    with enabled_without_aten(lambda: outputs(function, *tensors, **options)) as seen:
        found = outputs(function, *tensors, **options)
        with torch.inference_mode():
            inferred = function(*tensors, **options)
    if dtype is torch.float32 and not last:
        assert any(not one.choice.endswith(aten.NAME) for one in seen)
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-10, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip([*found, inferred], [*expected, expected[0]], strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(
            one, other.detach(), rtol=tolerance, atol=tolerance * float(other.detach().abs().max())
        )


def test_both_ways_compute_and_restore(way: str) -> None:
    function, shapes, options = KINDS["2-D"]
    tensors = tensors_of(*shapes)
    before, expected = dispatcher(), outputs(function, *tensors, **options)
    with enabled_without_aten(lambda: outputs(function, *tensors, **options)) as seen:
        assert dispatcher() != before
        for one, other in zip(outputs(function, *tensors, **options), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert {one.key for one in seen}
    assert dispatcher() == before
    for one, other in zip(outputs(function, *tensors, **options), expected, strict=True):
        assert torch.equal(one, other)


def test_passthrough_is_bit_equal_and_planned_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is always ATen's on the CPU."""
    function, shapes, options = KINDS["2-D"]
    tensors = tensors_of(*shapes, dtype=torch.bfloat16)
    expected = outputs(function, *tensors, **options)
    planned: list[str] = []
    for name in ("_plan_forward", "_plan_backward"):
        plan = getattr(override, name)
        monkeypatch.setattr(override, name, lambda *args, plan=plan: planned.append(plan.__name__) or plan(*args))
    with polyconv.enable():
        for _ in range(5):
            for one, other in zip(outputs(function, *tensors, **options), expected, strict=True):
                assert torch.equal(one, other)
    assert planned == ["_plan_forward", "_plan_backward"]


def test_passthrough_follows_the_state() -> None:
    """A call known as ATen's is planned again when settings or preferences change, or its weight is frozen."""
    x, w = (one.detach() for one in tensors_of((2, 8, 12, 13), (16, 8, 3, 3)))
    forward = next(iter(_decisions(lambda: F.conv2d(x, w))))
    other = next(name for name in names_of(forward) if name.startswith("F("))  # its roundings differ from ATen's
    atens = next(name for name in names_of(forward) if name.endswith(aten.NAME))
    with polyconv.enable(), torch.no_grad():
        with preferences.Forced({forward.key: atens}):
            y = F.conv2d(x, w)
            assert torch.equal(y, bypassing(F.conv2d, x, w))
        with preferences.Forced({forward.key: other}):
            assert not torch.equal(F.conv2d(x, w), y)
        with preferences.Forced({forward.key: atens}):
            assert torch.equal(F.conv2d(x, w), y)


def _decisions(run: Callable[[], Any]) -> list[preferences.Decision]:
    with polyconv.enable(), preferences.watched() as seen, torch.no_grad():
        run()
    return list(seen)


WRONG: dict[str, Callable[[], Any]] = {
    "channels": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 2, 3, 3)),
    "kernel too large": lambda: F.conv2d(torch.ones(1, 3, 2, 2), torch.ones(4, 3, 3, 3)),
    "negative padding": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), padding=-1),
    "stride 0": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), stride=0),
    "dtypes": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3).double()),
    "bias": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), torch.ones(3)),
    "output padding": lambda: F.conv_transpose2d(torch.ones(1, 3, 8, 8), torch.ones(3, 4, 3, 3), output_padding=1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_torchs(wrong: str, way: str) -> None:
    with pytest.raises(RuntimeError) as theirs:
        WRONG[wrong]()
    with polyconv.enable(), pytest.raises(RuntimeError) as ours:
        WRONG[wrong]()
    assert str(ours.value) == str(theirs.value)


def test_what_polyconv_does_not_take_is_atens() -> None:
    cases: list[Callable[[], Tensor]] = [
        lambda: F.conv2d(torch.ones(1, 2, 5, 5, dtype=torch.complex64), torch.ones(3, 2, 3, 3, dtype=torch.complex64)),
        lambda: F.conv2d(torch.ones(0, 2, 5, 5), torch.ones(3, 2, 3, 3)),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5, device="meta"), torch.ones(3, 2, 3, 3, device="meta")),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5).to_mkldnn(), torch.ones(3, 2, 3, 3)).to_dense(),
    ]
    for case in cases:
        expected = case()
        with polyconv.enable():
            found = case()
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
        assert found.device.type == "meta" or torch.equal(found, expected)


TRACED = torch.jit.trace(F.conv2d, tuple(torch.ones(shape) for shape in ((1, 8, 5, 5), (6, 8, 3, 3), (6,))))
TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "grad": torch.func.grad(lambda x, w, b: F.conv2d(x, w, b, padding=1).square().sum(), argnums=(0, 1, 2)),
    "vmap": lambda x, w, b: torch.func.vmap(lambda one: F.conv2d(one, w, b, padding=1))(x.unsqueeze(1)),
    "vmap over weights": lambda x, w, b: torch.func.vmap(lambda k: F.conv2d(x, k, b))(torch.stack([w, 2 * w])),
    "gradients per sample": lambda x, w, b: torch.func.vmap(
        torch.func.grad(lambda k, one: F.conv2d(one[None], k, b).square().sum()), (None, 0)
    )(w, x),
    "forward mode": lambda x, w, b: torch.func.jvp(lambda k: F.conv2d(x, k, b), (w,), (torch.ones_like(w),)),
    "autocast": lambda x, w, b: _in_autocast(x, w, b),
    "double backward": lambda x, w, b: _double_backward(x, w, b),
    "checkpoint": lambda x, w, b: torch.utils.checkpoint.checkpoint(F.conv2d, x, w, b, use_reentrant=False),
    "torch.jit.trace": lambda x, w, b: torch.jit.trace(lambda a: F.conv2d(a, w, b), (x,), check_trace=False)(x),
    "TorchScript": lambda x, w, b: TRACED(x, w, b),
}


def _in_autocast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.conv2d(x, w, b)
    assert y.dtype is torch.bfloat16
    return y


def _double_backward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    (dx,) = torch.autograd.grad(F.conv2d(x, w, b, padding=1).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), (x, w))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_composes(name: str) -> None:
    x, w, b = (one.detach() for one in tensors_of((3, 8, 9, 10), (6, 8, 3, 3), (6,)))
    run = lambda: TRANSFORMS[name](x, w, b)  # noqa: E731
    expected = run()
    with enabled_without_aten(run):
        found = run()
    many = isinstance(expected, tuple)
    for one, other in zip(found, expected, strict=True) if many else [(found, expected)]:
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_compiled_graphs(last: bool) -> None:
    """Inductor checks the strides of its extern kernels, in both passes."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.ConvTranspose2d(16, 8, 2, stride=2))
    x = torch.randn(2, 8, 12, 12, requires_grad=True)
    if last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last).detach()
        x.requires_grad_()
    expected = outputs(net, x)
    with polyconv.enable():
        torch._dynamo.reset()
        compiled = torch.compile(net)
        run = lambda: outputs(compiled, x)  # noqa: E731
        with enabled_without_aten(run) as seen:
            found = run()
            assert any(not one.choice.endswith(aten.NAME) for one in seen)
    for one, other in zip([*found, *outputs(compiled, x)], 2 * expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_nested_blocks_and_disable() -> None:
    assert not override.is_enabled()
    with polyconv.enable() as outer:
        with polyconv.enable():
            assert override.is_enabled()
        assert override.is_enabled()
        with outer:
            assert override.is_enabled()
        assert override.is_enabled()
        polyconv.disable()
        assert not override.is_enabled()
        with outer:
            assert override.is_enabled()
    assert not override.is_enabled()
    switch = polyconv.enable()
    with polyconv.enable():
        pass
    assert override.is_enabled()
    polyconv.disable()
    polyconv.disable()
    assert not override.is_enabled()
    with switch:
        assert override.is_enabled()
    assert not override.is_enabled()
    with pytest.raises(ZeroDivisionError), polyconv.enable():
        _ = 1 / 0
    assert not override.is_enabled()


def test_no_warning_even_over_a_kernel_of_others(way: str) -> None:
    """torch warns of a kernel registered twice; other warnings are not swallowed."""
    theirs = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        theirs.impl("convolution", lambda *_: torch.zeros(1), "CPU")
        with polyconv.enable():
            assert F.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)).item() == 9
        assert torch.equal(F.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)), torch.zeros(1))
    theirs._destroy()
    assert not [str(one.message) for one in said if "Overriding" in str(one.message)]


def test_threads_compute_while_it_is_switched() -> None:
    if (reason := override.why_not_native()) is not None:
        pytest.skip(reason)
    x, w = (one.detach() for one in tensors_of((1, 4, 10, 10), (8, 4, 3, 3)))
    expected, stop, failures = F.conv2d(x, w), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            k = w.clone().requires_grad_()
            y = F.conv2d(x, k)
            y.sum().backward()
            if not torch.allclose(y, expected, atol=1e-4):
                failures.append(y)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        with polyconv.enable():
            assert torch.allclose(F.conv2d(x, w), expected, atol=1e-4)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_blocks_of_two_threads_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with polyconv.enable():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with polyconv.enable():
        thread.start()
        entered.wait(10)
    assert override.is_enabled()
    leave.set()
    thread.join()
    assert not override.is_enabled()


def test_own_modules_keep_their_tolerance() -> None:
    """ATen is the plan of a module with tolerance 0; the override would choose with the tolerance of the settings."""
    function, shapes, options = KINDS["2-D"]
    x, w, b = tensors_of(*shapes)
    run = lambda: outputs(function, x, w, b, **options)  # noqa: E731
    with enabled_without_aten(run):
        run()
        y = polyconv.conv2d(x, w, b, **options, tolerance=0)
        assert type(y.grad_fn).__name__ != "ConvolutionBackward0"
    torch.testing.assert_close(y, F.conv2d(x, w, b, **options))


def test_a_frozen_weight_is_seen() -> None:
    conv = nn.Conv2d(8, 16, 3).requires_grad_(False)
    x = torch.randn(1, 8, 12, 12)
    inside: list[AbstractContextManager[Any]] = [polyconv.enable(), torch.no_grad()]
    with inside[0], inside[1], preferences.watched() as seen:
        conv(x)
        polyconv.replace(conv)
        polyconv.freeze(conv)
        polyconv.restore(conv)
        conv(x)
        polyconv.unfreeze(conv)
    assert [one.problem.frozen for one in seen] == [False, True]


def test_explain_names_the_override() -> None:
    net, shape = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ConvTranspose1d(4, 4, 2)), (1, 8, 12, 12)
    assert "this is not one of polyconv's modules" in str(polyconv.explain(net[0], shape))
    with polyconv.enable():
        assert "called by polyconv.enable()" in str(polyconv.explain(net[0], shape))
        assert len(polyconv.explain(net[0], shape).convolutions[0].passes) == 3
        transposed = polyconv.explain(net[1], (1, 4, 9)).convolutions[0]
        assert len(transposed.passes) == 3
        assert "forward of the transposed convolution" in str(transposed)
        assert "leaves such tensors to it" in str(polyconv.explain(net[0], (0, 8, 12, 12)))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, x = nn.Conv2d(8, 16, 3), torch.randn(2, 8, 12, 12)
        expected = outputs(net, x.requires_grad_())
        wrapped = nn.parallel.DistributedDataParallel(net)
        run = lambda: outputs(wrapped, x)  # noqa: E731
        with enabled_without_aten(run):
            for one, other in zip(run(), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    finally:
        torch.distributed.destroy_process_group()


def test_fake_tensors_never_come_to_the_kernels() -> None:
    with polyconv.enable(), FakeTensorMode(), preferences.watched() as seen:
        y = F.conv2d(torch.empty(2, 8, 12, 13, requires_grad=True), torch.empty(16, 8, 3, 3), padding=1)
        y.sum().backward()
    assert y.shape == (2, 16, 12, 13)
    assert not seen
