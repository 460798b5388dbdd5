"""The native CPU kernels (``csrc/cpu``): loading the extension, and helpers shared by all its operators.

Loading it at the first convolution registers operators under ``torch.ops.polyconv_cpu``. It is part of a wheel built
with it, or is built in place by ``python csrc/build.py``. Without it ATen runs; :func:`why_absent` gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..activation import Activation
from ..problem import ELEMENT_BYTES, PaddingMode, Problem
from ..runtime.lazy_import import imported
from ..settings import INSTRUCTION_SETS, Settings

_MODULE = "polyconv.cpu._native"

LARGEST_EXTENT = 2**31 - 2**20
"""Largest extent of a tensor along an axis: the kernels index in 32 bits, in whole chunks."""

SMALLEST_SCRATCH = 2**22
"""Elements of the smallest buffer of :func:`scratch`: 16 MiB, the least that the output pool serves."""


@lru_cache(maxsize=1)
def why_absent() -> str | None:
    """Load the extension once. Returns None on success, else the reason of the failure."""
    try:
        imported(_MODULE)
    except ModuleNotFoundError:
        return "this installation has no native CPU kernels (a wheel has them; in a checkout: python csrc/build.py)"
    except ImportError as error:
        return f"the native CPU kernels do not fit this installation of torch {torch.__version__}: {error}"
    settings.observe(_follow)
    return None


_followed = Settings()
"""The settings last passed to the extension, which starts with the defaults."""


def _follow(current: Settings) -> None:
    """Pass changed settings to the extension. An unchanged setting does not override :func:`instruction_set`."""
    global _followed
    before, _followed = _followed, current
    if current.output_pool != before.output_pool:
        torch.ops.polyconv_cpu.set_output_pool_limit(current.output_pool)
    if current.instruction_set != before.instruction_set:
        choose = torch.ops.polyconv_cpu.instruction_set
        best, limit = choose("best"), current.instruction_set
        if limit is not None and INSTRUCTION_SETS.index(limit) > INSTRUCTION_SETS.index(best):
            choose(limit)
        _instruction_set.cache_clear()


def is_available() -> bool:
    return why_absent() is None


def takes(problem: Problem) -> bool:
    """True if there are kernels for the problem's dtype and extents. Half precision is widened to float32."""
    largest = max(*problem.x_shape, *problem.w_shape, *problem.y_shape)
    return is_available() and problem.dtype in ELEMENT_BYTES and largest <= LARGEST_EXTENT


def _operators() -> Any:
    reason = why_absent()
    if reason is not None:
        raise RuntimeError(reason)
    return torch.ops.polyconv_cpu


def operator(name: str) -> Any:
    """An operator of the extension without torch's Python wrapper, for short calls."""
    return getattr(_operators(), name).default._op


def instruction_set(name: str = "") -> str:
    """The instruction set in use: ``avx512``, ``avx2``, ``sse4`` or ``neon``. Tests select one by name, or ``best``."""
    if name:
        _instruction_set.cache_clear()
        _operators().instruction_set(name)
    return _instruction_set()


@lru_cache(maxsize=1)
def _instruction_set() -> str:
    """Cached, because every call that uses the weight cache reads it."""
    operators = _operators()
    settings.current()  # may limit the instruction set
    result: str = operators.instruction_set("")
    return result


def l2_bytes(size: int = 0) -> int:
    """L2 cache of a core [bytes] for which work is tiled, read from the machine. Tests set another size."""
    result: int = _operators().l2_bytes(size)
    return result


def empty_output(like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """``torch.empty_strided`` for a large output: on huge pages, reused from freed outputs. The system zeroes
    every new page, which takes longer than computing a large output. At most ``settings.output_pool`` bytes stay idle
    in the pool; larger outputs are allocated by torch."""
    operators = _operators()
    settings.current()  # applies the pool limit
    pooled: Tensor = operators.empty_output(like, list(shape), list(strides))
    return pooled if pooled.numel() else like.new_empty_strided(shape, strides)


def scratch(like: Tensor, count: int) -> Tensor:
    """Float32 buffer for ``count`` elements of one call, from the output pool: new pages cost more than a copy."""
    sizes = [1 << max(SMALLEST_SCRATCH - 1, count - 1).bit_length()]
    return empty_output(like.new_empty(0, dtype=torch.float32), sizes, [1])


def normalised(tensor: Tensor) -> tuple[Tensor, int]:
    """A float32 operand and an exponent: a copy times 2^exponent if all values are below 2^-48, else itself and 0."""
    found: tuple[Tensor, int] = operator("normalised")(tensor)
    return found if found[1] else (tensor, 0)


def rescale(tensor: Tensor, exponent: int) -> None:
    """Multiply by a power of two below 1 in place, correctly rounded to denormal numbers."""
    if exponent:
        operator("rescale")(tensor, exponent)


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """Schemes and enumerations of the kernels; list positions are their numbers (``csrc/cpu/bindings/facts.cc``)."""
    said: dict[str, Any] = json.loads(_operators().facts())
    return said


def free_idle_outputs() -> None:
    """Return idle memory of pooled outputs to the system."""
    set_limit = torch.ops.polyconv_cpu.set_output_pool_limit
    set_limit(0)
    set_limit(settings.current().output_pool)


def plan_numbers(engine: str, algorithm: int) -> list[int]:
    """Plan argument of a forward pass: content of the lanes and scheme. Zeros leave the tiling to the kernels."""
    return [facts()["lanes"].index(engine), algorithm, 0, 0, 0]


def activation_numbers(activation: Activation) -> tuple[int, float, float]:
    """Arguments of a forward operator: the function and its parameters."""
    return facts()["activations"].index(activation.kernel), *activation.ab


def longest_sum(engine: str, algorithm: int, terms: int) -> int:
    """Longest sequential sum of a forward pass over ``terms`` channels and taps."""
    length: int = _operators().longest_sum(terms, plan_numbers(engine, algorithm))
    return length


def weight_gradient_blocks(problem: Problem, algorithm: int) -> tuple[int, ...]:
    """Lengths of the nested sequential sums of one weight, in the weight gradient of channel lanes."""
    return tuple(_operators().weight_gradient_blocks(_sizes(problem), geometry_numbers(problem), [algorithm]))


def depthwise_longest_sum(problem: Problem) -> int:
    """Most products that a lane of a depthwise weight gradient adds in float before it continues in double."""
    length: int = _operators().depthwise_longest_sum(_sizes(problem), geometry_numbers(problem))
    return length


def _sizes(problem: Problem) -> list[int]:
    return [*problem.x_shape, *problem.w_shape, *problem.out_size]


def geometry_numbers(problem: Problem) -> list[int]:
    """Geometry argument of every operator. Bottom and right padding follow from the tensor sizes."""
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    return [*problem.stride, top, left, *problem.dilation, problem.groups, facts()["borders"].index(border)]
