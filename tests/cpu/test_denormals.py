"""Denormal numbers: the results that are promised, and the caller's floating-point control.

Kernels count denormals as zero. An operand whose values are all tiny is scaled by a power of two before.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import polyconv
from cpu_passes import load_native
from every_candidate import Layer, Trial
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.cpu.planner import plan_cpu
from polyconv.problem import Pass, Problem
from polyconv.selection import Preference

load_native()

UNIT = 2.0**-149
"""Denormal results are multiples of it."""
LAYERS = {"3x3": Layer(2, 8, 12, 17), "5x9": Layer(1, 6, 5, 24, (5, 9), 2), "1x1": Layer(2, 16, 8, 9, (1, 1), 0)}


def within_promise(trial: Trial) -> None:
    """Polyconv's kernels, up to half the spacing of denormal results. PyTorch's round every denormal product."""
    allowed = 0.5 * UNIT / float(trial.scale.min())
    broken = [
        f"{candidate.name}: {observed:.1e}, predicted {candidate.error:.1e}"
        for candidate, observed in trial.errors(trial.scale)
        if candidate.engine != aten.NAME and observed > candidate.error + allowed
    ]
    assert not broken, f"{trial.problem}: {broken}"


@pytest.mark.parametrize("which", range(2), ids=["one", "other"])
@pytest.mark.parametrize("factor", [1e-40, 1e-30, 1e-14])
@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_tiny_operands_keep_the_relative_error(name: str, kind: Pass, factor: float, which: int) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(shape) for shape in LAYERS[name].operands(kind)]
    operands[which] *= factor
    within_promise(Trial(LAYERS[name], kind, *operands))


@pytest.mark.parametrize("which", range(2), ids=["one", "other"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_denormals_among_ordinary_values(kind: Pass, which: int) -> None:
    """They count as zero, which is far below the error of the ordinary ones."""
    torch.manual_seed(0)
    layer = LAYERS["3x3"]
    operands = [torch.randn(shape) for shape in layer.operands(kind)]
    operands[which] = torch.where(torch.rand(operands[which].shape) < 0.5, operands[which], operands[which] * 1e-40)
    within_promise(Trial(layer, kind, *operands))


@pytest.mark.parametrize("strides", [(0, 1, 0, 0), (8, 1, 8, 1), (0, 1, 0, 8)], ids=str)
def test_adjacent_channels_stay_adjacent(strides: tuple[int, ...]) -> None:
    """Expanded and overlapping tiny inputs, for kernels that need adjacent channels."""
    x, w = (torch.randn(200) * 1e-40).as_strided((2, 8, 5, 6), strides), torch.randn(4, 8, 3, 3)
    problem = Problem.make("fprop", x.shape, w.shape, x_strides=strides, y_strides=(48, 1, 16, 4))
    y = torch.empty(2, 4, 3, 4).to(memory_format=torch.channels_last)
    exact = torch.conv2d(x.double(), w.double())
    for name in ("direct, pointwise", "direct, tile lanes"):
        plan_cpu(problem, prefer=Preference(name)).prepared(None)({"x": x, "w": w, "y": y})
        assert (y.double() - exact).abs().max() <= UNIT + 1e-5 * exact.abs().max()


DEPTHWISE = {
    "planes": ("depthwise", (3, 20, 19, 21), (20, 3, 3), 1, torch.contiguous_format),
    "pixels": ("depthwise", (3, 20, 19, 21), (20, 3, 3), 2, torch.channels_last),
    "multiplier": ("depthwise", (70, 4, 9, 8), (8, 5, 5), 1, torch.contiguous_format),
    "rows": ("signal", (3, 20, 1, 2600), (20, 1, 4), 1, torch.contiguous_format),
    "long": ("signal", (2, 24, 1, 300), (48, 1, 70), 1, torch.contiguous_format),
    "strided": ("signal", (2, 24, 1, 300), (24, 1, 5), 3, torch.contiguous_format),
}
"""Operator, sizes of the input and of the filters, stride, memory format."""


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("factor", [1e-40, 1e-30])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["one", "other", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_kernels_scale(name: str, dtype: torch.dtype, which: int, factor: float, hidden: bool) -> None:
    """All passes. ``hidden``: one ordinary number among tiny ones, which only its outputs resolve."""
    stem, shape, (filters, *taps), stride, memory_format = DEPTHWISE[name]
    torch.manual_seed(0)
    moves = {"stride": (1, stride), "padding": (taps[0] // 2, taps[1] // 2), "groups": shape[1]}
    x, w = torch.randn(shape), torch.randn(filters, 1, *taps)
    dy = torch.randn_like(torch.conv2d(x, w, **moves))
    geometry = [*moves["stride"], *moves["padding"], 1, 1, shape[1], 0]

    def tiny(one: torch.Tensor, number: int) -> torch.Tensor:
        one = one * factor if which in (number, 2) else one
        if hidden and which in (number, 2):
            one.view(-1)[one.numel() // 2 + 1] = 1.0
        return one.to(dtype).contiguous(memory_format=memory_format) if one.shape[1] > 1 else one.to(dtype)

    def check(found: torch.Tensor, one: torch.Tensor, other: torch.Tensor, terms: float, exact: torch.Tensor) -> None:
        scale = float(one.double().square().mean().sqrt() * other.double().square().mean().sqrt()) * terms**0.5
        unit, rounding = (UNIT, 0.0) if dtype == torch.float32 else (2.0**-133, 2.0**-8)
        allowed = unit / 2 + rounding * exact.abs() + 1e-5 * scale
        assert bool(((found.double() - exact).abs() <= allowed).all())

    a, b = tiny(x, 0), tiny(w, 1)
    y = torch.full_like(dy, torch.nan, dtype=dtype).contiguous(memory_format=memory_format)
    native.operator(f"{stem}_fprop")(a, b, None, y, geometry)
    check(y, a, b, taps[0] * taps[1], torch.conv2d(a.double(), b.double(), **moves))
    a, b = tiny(dy, 0), tiny(w, 1)
    if stem == "depthwise" or (stride == 1 and filters == shape[1]):
        dx = torch.full_like(x, torch.nan, dtype=dtype).contiguous(memory_format=memory_format)
        native.operator(f"{stem}_dgrad")(a, b, dx, geometry)
        exact = torch.nn.grad.conv2d_input(shape, b.double(), a.double(), **moves)
        check(dx, a, b, taps[0] * taps[1] * filters / shape[1], exact)
    a, b = tiny(x, 0), tiny(dy, 1)
    dw, db = torch.full_like(w, torch.nan, dtype=dtype), torch.empty(filters, dtype=dtype)
    native.operator(f"{stem}_wgrad")(a, b, dw, db, geometry)
    terms = float(dy.numel() / filters)
    check(dw, a, b, terms, torch.nn.grad.conv2d_weight(a.double(), w.shape, b.double(), **moves))
    check(db, torch.ones(1), b, terms, b.double().sum((0, 2, 3)))


def test_tiny_images_with_sparse_gradients() -> None:
    """An operand that only looks tiny does not keep the other one from being scaled."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 16, 30, 31) * 1e-40, torch.zeros(2, 16, 30, 31)
    dy[:, :, 29, 29] = 1.0
    dw = torch.full((16, 1, 3, 3), torch.nan)
    native.operator("depthwise_wgrad")(x, dy, dw, None, [1, 1, 1, 1, 1, 1, 16, 0])
    exact = torch.nn.grad.conv2d_weight(x.double(), dw.shape, dy.double(), padding=1, groups=16)
    assert exact.abs().max() > 100 * UNIT
    assert bool(((dw.double() - exact).abs() <= UNIT).all())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_tiny_images_times_huge_weights(memory_format: torch.memory_format) -> None:
    """Denormal numbers are no zeros there: their products are ordinary."""
    x = torch.full((1, 8, 9, 9), 2.0**-130).contiguous(memory_format=memory_format)
    w, y = torch.ones(8, 1, 3, 3), torch.full_like(x, torch.nan)
    w[3] = 2.0**120
    native.operator("depthwise_fprop")(x, w, None, y, [1, 1, 1, 1, 1, 1, 8, 0])
    exact = torch.conv2d(x.double(), w.double(), padding=1, groups=8)
    assert bool(((y.double() - exact).abs() <= 1e-6 * exact + UNIT).all())


def test_depthwise_and_epilogues() -> None:
    """A whole layer of 1e-40, bias included, and its gradients; the activation of an ordinary bias."""
    torch.manual_seed(0)
    for groups, activation in ((1, "none"), (6, "relu"), (6, "none")):
        x, w = torch.randn(2, 6, 20, 21, requires_grad=True), torch.randn(6, 6 // groups, 3, 3) * 1e-40
        for bias in (torch.randn(6) * 1e-40, torch.randn(6)):
            y = polyconv.conv2d(x, w, bias, groups=groups, padding=1, activation=activation)
            exact = torch.conv2d(x.double(), w.double(), bias.double(), groups=groups, padding=1)
            exact = exact.relu() if activation == "relu" else exact
            assert (y.double() - exact).abs().max() <= 4 * UNIT + 1e-5 * exact.abs().max()


LARGE = {
    "rows": ((1, 6, 70, 81), 1, 3, torch.contiguous_format),
    "planes": ((2, 20, 19, 21), 2, 3, torch.contiguous_format),
    "tiles": ((2, 64, 70, 41), 1, 3, torch.channels_last),
    "tiles, stride": ((1, 40, 130, 51), 2, 5, torch.channels_last),
    "pixels": ((1, 40, 130, 51), 1, 4, torch.channels_last),
    "few pixels": ((2, 5, 130, 51), 1, 3, torch.channels_last),
}
"""Sizes of the input, stride, taps along an axis, memory format: channels_last images have several bands of rows."""


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("hidden", [None, 1e30, float("inf")], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_tiny_images_with_epilogues(name: str, hidden: float | None, activation: str) -> None:
    """A bias of any size, a residual that is the output, and one value that must not overflow where it is scaled."""
    shape, stride, taps, memory_format = LARGE[name]
    torch.manual_seed(0)
    channels, before = shape[1], taps // 2
    x, w = torch.randn(shape) * 1e-40, torch.randn(channels, 1, taps, taps)
    if hidden is not None:
        x[-1, -1, -7, -9] = hidden
    x = x.contiguous(memory_format=memory_format)
    geometry = [stride, stride, before, before, 1, 1, channels, 0]
    number = native.facts()["activations"].index(activation)
    act = {"relu": torch.relu, "silu": torch.nn.functional.silu}[activation]
    for bias in (None, torch.randn(channels) * 1e-40, torch.randn(channels), torch.full((channels,), 3e38)):
        doubled = None if bias is None else bias.double()
        sums = torch.conv2d(x.double(), w.double(), doubled, stride, before, 1, channels)
        for residual in (False, True):
            y = torch.full_like(sums, 1e-39 if residual else torch.nan, dtype=torch.float32)
            y = y.contiguous(memory_format=memory_format)
            exact = act(sums + 1e-39 if residual else sums)
            native.operator("depthwise_fprop")(x, w, bias, y, geometry, y if residual else None, number)
            allowed = 4 * UNIT + 3e-6 * exact.abs() + (0.0 if hidden is None else 2.0**-120)
            finite = exact.abs() < 3e38
            torch.testing.assert_close(y[~finite], exact[~finite].float(), rtol=1e-5, atol=0, equal_nan=True)
            assert bool(((y.double() - exact).abs() <= allowed)[finite].all()), f"{bias}, residual: {residual}"


def test_scaling_is_exact() -> None:
    """Up to ordinary numbers and back to the same bits, for every denormal magnitude and sign, in any layout."""
    bits = torch.cat([torch.arange(0, 2**23, 4001), torch.arange(2**23, (127 - 49) << 23, 2**20 + 77)]).int()
    tiny = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    square = tiny[: 2 * (len(tiny) // 4)].view(2, -1)
    for tensor in (tiny, square.T, square[:, ::3], tiny[:7].expand(5, 7)):
        scaled, exponent = native.normalised(tensor)
        assert exponent > 0
        assert scaled.abs().max() >= 1
        assert torch.equal(scaled.double(), tensor.double() * 2.0**exponent)
        native.rescale(scaled, -exponent)
        assert torch.equal(scaled, tensor)
    for ordinary in (torch.zeros(5), torch.tensor([0.0, 1e-40, 1.0]), torch.tensor([torch.nan, 1e-40])):
        assert native.normalised(ordinary)[0] is ordinary


def test_scaling_rounds_to_nearest_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, 0.75, 8388607.5, 8388606.5, torch.inf])
    native.rescale(values, -149)
    expected = torch.tensor([0, 2, 2, 0, 1, 8388608, 8388606]).double() * UNIT
    assert torch.equal(values[:-1].double().abs(), expected)
    assert values[-1] == torch.inf
    assert torch.signbit(values[3])


@pytest.fixture(scope="module")
def read_control() -> Callable[[], int]:
    """Reads MXCSR by a function of machine code: ``stmxcsr [rsp-8]; mov eax, [rsp-8]; ret``. On ARM64 it reads FPCR:
    ``mrs x0, fpcr; ret``."""
    arm = platform.machine() == "aarch64"
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("00443bd5 c0035fd6" if arm else "0fae5c24f8 8b4424f8 c3"))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    function = ctypes.CFUNCTYPE(ctypes.c_uint)(address)

    def read() -> int:
        assert not code.closed
        return int(function())

    return read


@pytest.mark.parametrize("flushes", [False, True])
def test_the_callers_control_is_unchanged(read_control: Callable[[], int], flushes: bool) -> None:
    """After every pass, whether the caller counts denormals as zero or not; also on the threads of torch's pool."""
    flags = 0x3F  # sticky exception flags, which any arithmetic sets
    x, w = torch.randn(1, 8, 30, 30, requires_grad=True), torch.randn(8, 8, 3, 3, requires_grad=True)
    depthwise = torch.randn(8, 1, 3, 3, requires_grad=True)
    torch.set_flush_denormal(flushes)
    try:
        before = read_control() & ~flags
        for factor in (1.0, 1e-40):
            polyconv.conv2d(x, w * factor).sum().backward()
            polyconv.conv2d(x * factor, depthwise, groups=8).sum().backward()
            assert read_control() & ~flags == before
        products = torch.full((2**16,), 1e-20) * 1e-20  # by all threads
        assert bool((products == 0).all()) if flushes else bool((products > 0).all())
    finally:
        torch.set_flush_denormal(False)


def test_threads_that_a_kernel_starts_have_the_callers_control() -> None:
    """A thread inherits the control of the one that starts it, and the pool starts its threads in the first call."""
    code = (
        "import torch\nfrom polyconv.cpu import native\ntorch.set_num_threads(4)\n"
        "x, w, y = torch.randn(1, 8, 64, 64), torch.randn(8, 1, 3, 3), torch.empty(1, 8, 62, 62)\n"
        "native.operator('depthwise_fprop')(x, w, None, y, [1, 1, 0, 0, 1, 1, 8, 0])\n"
        "print(int((torch.full((2**20,), 1e-20) * 1e-20 == 0).sum()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"
