"""The native CPU backend: Cook-Toom convolution in C++ (``csrc/cpu``), PyTorch's own kernels for the rest.

The extension registers operators under ``torch.ops.polyconv_cpu``. It is part of a wheel that was built with it, or is
built out of tree by ``python csrc/build.py`` and loaded with :func:`load`. Without it the package works the same, more
slowly: :func:`is_available` says which.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import settings
from ..problem import PaddingMode, Pass, Problem
from .aten import AtenBackend
from .schemes import Choice, choose

_MODULE = "polyconv.cpu._native"


def load(path: Path | str | None = None) -> None:
    """Register the operators: from the package, or from a file that ``csrc/build.py`` made. Once is enough."""
    if hasattr(torch.ops.polyconv_cpu, "convolve"):
        return
    if path is None:
        importlib.import_module(_MODULE)
    else:
        torch.ops.load_library(str(path))


def is_available() -> bool:
    """Whether the extension is loaded or can be."""
    return hasattr(torch.ops.polyconv_cpu, "convolve") or importlib.util.find_spec(_MODULE) is not None


def instruction_set(name: str = "") -> str:
    """The instruction set in use: ``avx512``, ``avx2`` or ``sse4``. With a name (or ``best``), choose it: for tests."""
    result: str = torch.ops.polyconv_cpu.instruction_set(name)
    return result


def empty_output(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``torch.empty`` for a large float32 output: on huge pages, reused from outputs that were freed before.

    The system clears every page of new memory, which takes longer than computing a large output. At most
    :func:`set_output_pool_limit` bytes (1 GiB unless set) lie idle in the pool; larger outputs are allocated by torch.
    """
    result: Tensor = torch.ops.polyconv_cpu.empty_output(like, list(shape))
    return result


def set_output_pool_limit(size: int) -> None:
    """Most bytes of freed outputs to keep for the next ones; what is over is given back at once. 0 keeps none."""
    torch.ops.polyconv_cpu.set_output_pool_limit(size)


# ---- the call


BORDERS = tuple(PaddingMode)
"""In the order of ``polyconv::Border``."""


def geometry_numbers(problem: Problem) -> list[int]:
    """The geometry that every operator takes; bottom and right padding follow from the sizes of the tensors."""
    top, _, left, _ = problem.padding
    border = BORDERS.index(problem.padding_mode) if any(problem.padding) else 0
    return [*problem.stride, top, left, *problem.dilation, problem.groups, border]


@lru_cache(maxsize=4096)
def _choose(problem: Problem, tolerance: float) -> Choice:
    return choose(problem, tolerance)


class NativeBackend:
    """Implements :class:`polyconv.backends.Backend`."""

    name = "native"

    def __init__(self) -> None:
        load()
        self._aten = AtenBackend()
        self._weights = TransformedWeights()

    def run(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        scheme = _choose(problem, settings.current().tolerance).scheme
        if scheme is None:
            self._aten.run(problem, tensors)
            return
        x, w, y, bias = tensors["x"], tensors["w"], tensors["y"], tensors.get("bias")
        geometry, plan = geometry_numbers(problem), [scheme.index, 0, 0, 0]
        if problem.kind is Pass.DGRAD:
            torch.ops.polyconv_cpu.input_gradient(y, w, x, geometry, plan)
            return
        transformed = self._weights.of(x, w, y, geometry, plan)
        torch.ops.polyconv_cpu.convolve(x, w, bias, y, geometry, plan, transformed)

    def explain(self, problem: Problem) -> str:
        choice = _choose(problem, settings.current().tolerance)
        what = f"{choice.scheme}, native ({instruction_set()})" if choice.scheme else "ATen's convolution"
        lines = [str(problem), f"  {what}: {choice.reason}"]
        lines += [f"  not {scheme}: {reason}" for scheme, reason in choice.rejected]
        return "\n".join(lines)


# ---- transformed weights, kept for inference


@dataclass(slots=True)
class _Kept:
    state: tuple[int, int, int, tuple[int, ...], str]
    """Version, address and checksum of the weight, the call's numbers, the instruction set."""
    transformed: Tensor


class TransformedWeights:
    """Keeps the transformed weights of forward passes outside grad mode, at most ``limit`` bytes of them.

    They are dropped with the weight, and made anew when it changed: by its version counter, and by a checksum, because
    writing to ``weight.data`` moves no counter. Reading the weight once costs little beside transforming it.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept = WeakIdKeyDictionary()
        self._lock = Lock()

    def of(self, x: Tensor, w: Tensor, y: Tensor, geometry: list[int], plan: list[int]) -> Tensor | None:
        """The transformed weights for this call, or None where they should be made for it alone."""
        if torch.is_grad_enabled() or w.is_inference() or not w.is_contiguous():
            return None
        state = (w._version, w.data_ptr(), torch.ops.polyconv_cpu.checksum(w), (*geometry, *plan), instruction_set())
        with self._lock:
            kept: _Kept | None = self._kept.get(w)
        if kept is not None and kept.state == state:
            return kept.transformed
        transformed: Tensor = torch.ops.polyconv_cpu.transform_weights(x, w, y, geometry, plan)
        with self._lock:
            self._kept[w] = _Kept(state, transformed)
            self.size = sum(_bytes(entry) for entry in self._kept.values())
            if self.size > self.limit:
                self._kept = WeakIdKeyDictionary()
                self.size = 0
        return transformed


def _bytes(kept: _Kept) -> int:
    return kept.transformed.numel() * kept.transformed.element_size()
