"""Formulas for ``torch.utils.flop_counter``: each operator counts as ATen's convolution.

They call PyTorch's formulas, so that the counts agree in every version. A counter copies the registered formulas when
it is created, so these are registered as soon as its module is imported. polyconv does not import that module itself,
because it imports Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_MODULE = "torch.utils.flop_counter"


def expect_counter() -> None:
    """Register the formulas with PyTorch's counter module, now or when it is imported."""
    if _MODULE in sys.modules:
        register(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    """One-time import hook that registers the formulas after the counter module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Loader) -> None:
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        register(module)

    loader.exec_module = execute_and_register  # type: ignore[method-assign]


def register(counter: ModuleType) -> None:
    aten, ours = torch.ops.aten, torch.ops.polyconv
    forward = counter.flop_registry[aten.convolution]
    backward = counter.flop_registry[aten.convolution_backward]
    unused = (None,) * 4  # bias, stride, padding, dilation

    def fprop(x: Any, weight: Any, *_: Any, out_val: Any, **__: Any) -> int:
        return int(forward(x, weight, *unused, False, out_val=out_val))

    def dgrad(grad: Any, weight: Any, x_size: Any, *_: Any, out_val: Any, **__: Any) -> int:
        outputs = out_val, None, None
        return int(backward(grad, x_size, weight, *unused, False, None, 1, (True, False, False), out_val=outputs))

    def wgrad(grad: Any, x: Any, weight_size: Any, *_: Any, out_val: Any, **__: Any) -> int:
        outputs = None, out_val[0], None
        return int(backward(grad, x, weight_size, *unused, False, None, 1, (False, True, False), out_val=outputs))

    # Not by register_flop_formula: that of PyTorch 2.4 stores a formula where its counter does not look.
    counter.flop_registry.update({ours.conv2d_fprop: fprop, ours.conv2d_dgrad: dgrad, ours.conv2d_wgrad: wgrad})
