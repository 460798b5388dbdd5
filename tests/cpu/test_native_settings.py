"""Settings held by the native kernels: they follow a scope and the environment immediately."""

from __future__ import annotations

import pytest
import torch

import polyconv
from commands import python
from polyconv import settings
from polyconv.cpu import native, planner
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.device import VECTOR_LANES

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)


def test_the_output_pool_follows_its_setting_and_can_be_released() -> None:
    shape, strides = (64, 256, 256), (256 * 256, 256, 1)  # 16 MiB
    idle = torch.ops.polyconv_cpu.output_pool_idle_bytes
    native.empty_output(torch.empty(0), shape, strides)
    assert idle() >= 2**24
    with settings.use(output_pool=0):
        assert idle() == 0  # immediately, not with the next output
        native.empty_output(torch.empty(0), shape, strides)
        assert idle() == 0
    native.empty_output(torch.empty(0), shape, strides)
    assert idle() >= 2**24


def test_large_outputs_in_half_precision_are_pooled() -> None:
    idle = torch.ops.polyconv_cpu.output_pool_idle_bytes
    with settings.use(output_pool=0):
        assert idle() == 0
    for dtype in (torch.bfloat16, torch.float16):
        new = CpuBackend().new_output(torch.empty(0, dtype=dtype), (2**23 + 1,), (1,))
        assert new.dtype == dtype
        assert new.shape == (2**23 + 1,)
        del new
        assert idle() == 2**24 + 2**21  # whole huge pages, of two bytes per element


def test_a_process_starts_with_the_output_pool_of_its_environment() -> None:
    program = (
        "import torch; from polyconv.cpu import native; native.empty_output(torch.empty(0), (2**22,), (1,)); "
        "print(torch.ops.polyconv_cpu.output_pool_idle_bytes())"
    )
    assert int(python(program)) >= 2**24
    assert int(python(program, POLYCONV_OUTPUT_POOL="4M")) <= 2**22


@pytest.mark.parametrize("limit", ["sse4", "avx2", "avx512"])
def test_the_instruction_set_follows_its_setting(limit: str) -> None:
    """A limit above the processor's own instruction set has no effect; a plan names its set."""
    best, order = native.instruction_set("best"), list(VECTOR_LANES)
    expected = limit if order.index(limit) > order.index(best) else best
    conv, x = polyconv.Conv2d(8, 16, 3), torch.rand(1, 8, 64, 64)
    with settings.use(instruction_set=limit):
        assert native.instruction_set() == planner.here().instruction_set == expected
        assert f" on {expected}: " in str(polyconv.explain(conv, x))
        limited = conv(x)
    assert native.instruction_set() == best
    assert torch.allclose(conv(x), limited, rtol=1e-4, atol=1e-4)


def test_a_process_is_limited_by_its_environment() -> None:
    program = "from polyconv.cpu import native; print(native.instruction_set())"
    assert python(program, POLYCONV_INSTRUCTION_SET="sse4") == "sse4\n"
