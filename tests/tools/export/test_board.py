"""Submissions to gpu-mode's board: the interface, what the board refuses, and the arithmetic of the parts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from exported_files import V100, Builds, check_format, load
from polyconv.cuda.planner import DEVICES
from polyconv.tools.export import ExportError, board_file


@pytest.fixture(scope="module")
def text() -> str:
    return board_file(DEVICES["h100"])


@pytest.mark.usefixtures("builds")
def test_sums_parts_of_the_kernel(text: str, tmp_path: Path) -> None:
    """With kernels that compute as PyTorch does, for the board's sizes and for one that it does not have."""
    check_format(text, tmp_path / "formatted.py")
    assert "stream" not in text.lower(), "the board refuses the word"
    module: Any = load(text, tmp_path / "submission.py")
    module._call = _computed
    for size, taps, channels in ((16, 8, 64), (20, 16, 64), (20, 16, 128), (34, 32, 128), (9, 4, 16)):
        x, w = torch.randn(1, channels, size, size), torch.randn(channels, channels, taps, taps)
        expected = torch.nn.functional.conv2d(x.double(), w.double())
        room = torch.full(expected.shape, float("nan"))
        y = module.custom_kernel((x, w, room))
        assert y is room
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)


def _computed(function: Any, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
    assert (function.__name__, bias) == ("forward", None)
    assert w.is_contiguous()
    assert y.is_contiguous()
    y.copy_(torch.nn.functional.conv2d(x, w))


def test_is_built_at_the_first_call(text: str, builds: Builds, tmp_path: Path) -> None:
    """The geometry of a call is that of the kernels written for it: the tensor-core plan is used."""
    module: ModuleType = load(text, tmp_path / "submission.py")
    assert not builds
    module._call = _computed  # type: ignore[attr-defined]
    for size, taps, channels in ((16, 8, 64), (20, 16, 64), (20, 16, 128), (34, 32, 128), (9, 4, 16)):
        x, w = torch.ones(1, channels, size, size), torch.ones(channels, channels, taps, taps)
        module.custom_kernel((x, w, torch.empty(1, channels, size - taps + 1, size - taps + 1)))
    assert ["on_tensor_cores(*call" in source for source in builds.sources] == [True, True, True, False]


def test_gpus_that_the_board_does_not_have() -> None:
    with pytest.raises(ExportError, match=r"the board has no .*V100.*--device h100"):
        board_file(V100)
