"""CUDA sources of exported files, compiled by the oldest CUDA that they promise to work with."""

from __future__ import annotations

import re
from typing import Any

import pytest

import nvrtc_11_8
from exported_files import EVERY, Builds
from polyconv.cuda.planner import DEVICES
from polyconv.tools.export import convolution_model

GEOMETRY = re.compile(r"\bk\w+(?= =)")
SLOW = ("kb50", "kb55", "kb56", "kb62", "kb86")


def warnings_of(module: Any, source: str) -> list[str]:
    """Compiler messages, except about geometry constants: not every file needs all of them."""
    lines = nvrtc_11_8.warnings_of(source).strip("\n\0").splitlines()
    told = [line for line in lines if line and "^" not in line]
    return [line for line in told if not re.search(rf'"({"|".join(GEOMETRY.findall(module.GEOMETRY))})" was', line)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in EVERY])
def test_compiles_without_a_warning(name: str, imported: Any, builds: Builds) -> None:
    """An unused variable would be one."""
    module = imported(name)
    for source in builds.sources:
        assert not warnings_of(module, source)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v100", "a100"])
def test_tensor_cores_compile_without_a_warning(device: str, imported: Any, builds: Builds) -> None:
    """Beside them there are the direct kernels alone, for other GPUs."""
    module = imported("kb80", forward_only=True, tensor_cores=True, device=DEVICES[device])
    (source,) = builds.sources
    assert "on_tensor_cores(*call, kForward)" in source
    assert "separable" not in source
    assert not warnings_of(module, source)


ARGUMENTS = {
    "groups and strides": {"in_channels": 6, "out_channels": 9, "kernel_size": (5, 3), "stride": (3, 2), "groups": 3},
    "a border": {"in_channels": 6, "out_channels": 32, "kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "cropped": {"in_channels": 16, "out_channels": 8, "kernel_size": 3, "padding": (-1, 0, 2, 1), "dilation": 2},
    "few channels": {"in_channels": 6, "out_channels": 12, "kernel_size": 3, "groups": 6, "padding_mode": "circular"},
}


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize("forward_only", [False, True], ids=["", "forward only"])
def test_other_arguments_compile(case: str, forward_only: bool, imported: Any, builds: Builds) -> None:
    """In a file exported for them, and in one that was not."""
    arguments: Any = ARGUMENTS[case]
    shape = (2, arguments["in_channels"], 33, 40)
    imported(convolution_model(shape, **arguments), forward_only=forward_only).ModelNew()
    mode = arguments.get("padding_mode", "zeros")
    other = convolution_model((8, 16, 33, 40), in_channels=16, out_channels=64, kernel_size=3, padding_mode=mode)
    module = imported(other, forward_only=forward_only)
    module.ModelNew(**arguments)
    assert len(builds) == 3
    for source in (builds.sources[0], builds.sources[2]):
        assert not warnings_of(module, source)
