"""The native reference kernels: every pass, border, stride and layout, to the last bits of the element type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_passes import IN_LAYOUTS, OUT_LAYOUTS, Layer, Run, layers, load_native, same_bits_for_any_threads

load_native()

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}

LAYERS = {
    "3x3": Layer((2, 5, 9, 20), 11, (3, 3), padding=(1, 1, 1, 1)),
    "strided, groups": Layer((2, 6, 15, 22), 9, (3, 5), (1, 1, 2, 2), stride=(2, 3), groups=3),
    "dilated, strided": Layer((1, 3, 20, 31), 4, (3, 3), (2, 2, 3, 3), (2, 3), (2, 2)),
    "cropped": Layer((1, 3, 12, 19), 4, (3, 3), padding=(-2, -1, -3, 4)),
    "reflect": Layer((2, 2, 6, 7), 3, (3, 5), (5, 4, 6, 3), stride=(1, 2), border="reflect"),
    "replicate": Layer((2, 2, 3, 2), 3, (3, 3), (1, 5, 3, 0), stride=(2, 1), border="replicate"),
    "circular": Layer((1, 2, 5, 6), 3, (3, 3), (5, 3, 2, 6), (1, 2), (2, 1), border="circular"),
    "one pixel, reflected": Layer((1, 2, 1, 8), 3, (1, 3), padding=(0, 0, 2, 2), border="reflect"),
    "stride past the kernel": Layer((1, 2, 17, 23), 3, (2, 2), stride=(5, 4)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_edges(instruction_set: str, layer: Layer, dtype: torch.dtype) -> None:
    Run.make(layer, dtype).check("plain", TOLERANCE[dtype])


@given(
    layer=layers(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    x_layout=st.sampled_from(IN_LAYOUTS),
    y_layout=st.sampled_from(IN_LAYOUTS),
    out_layout=st.sampled_from(OUT_LAYOUTS),
    bias=st.booleans(),
)
def test_any_geometry(
    layer: Layer, dtype: torch.dtype, x_layout: str, y_layout: str, out_layout: str, bias: bool
) -> None:
    Run.make(layer, dtype, x_layout, y_layout).check("plain", TOLERANCE[dtype], out_layout=out_layout, bias=bias)


def test_same_bits_whatever_the_number_of_threads() -> None:
    run = Run.make(LAYERS["3x3"], torch.float32)
    same_bits_for_any_threads(lambda: run.passes("plain"))


def test_float32_sums_are_taken_in_double() -> None:
    x = torch.full((1, 1, 1, 4096), 0.1)
    x[..., 0], x[..., 1] = 1e8, -1e8
    y = torch.empty(1, 1, 1, 1)
    torch.ops.polyconv_cpu.plain_fprop(x, torch.ones_like(x), None, y, [1, 1, 0, 0, 1, 1, 1, 0])
    torch.testing.assert_close(y.item(), x.double().sum().item(), rtol=1e-6, atol=0)


def test_empty_batch() -> None:
    run = Run.make(Layer((0, 3, 8, 8), 4, (3, 3)), torch.float32)
    dw, db = run.wgrad("plain")
    assert db is not None
    assert dw.eq(0).all()
    assert db.eq(0).all()
    assert run.fprop("plain").numel() == run.dgrad("plain").numel() == 0


def test_what_does_not_fit_is_refused() -> None:
    x, w, y = torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), torch.empty(1, 6, 6, 6)
    geometry = [1, 1, 0, 0, 1, 1, 1, 0]
    for bad in ((x.double(), w, y), (x, w.half(), y), (x, w[:, :3], y), (x.half(), w.half(), y.half())):
        with pytest.raises(RuntimeError, match="polyconv"):
            torch.ops.polyconv_cpu.plain_fprop(bad[0], bad[1], None, bad[2], geometry)
