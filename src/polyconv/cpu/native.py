"""The native CPU kernels (``csrc/cpu``): where they are loaded from, and what all their operators share.

The extension registers operators under ``torch.ops.polyconv_cpu`` when it is loaded, at the first convolution. It is
part of a wheel that was built with it, or is built in place by ``python csrc/build.py``. Without it the package works
the same, more slowly: :func:`why_absent` says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..importing import imported
from ..problem import Activation, PaddingMode, Problem
from ..settings import INSTRUCTION_SETS, Settings

_MODULE = "polyconv.cpu._native"

LARGEST_EXTENT = 2**31 - 1
"""Of a tensor, along an axis: the kernels count in 32 bits."""


@lru_cache(maxsize=1)
def why_absent() -> str | None:
    """Loads the extension, once. None if it is there, else why not."""
    try:
        imported(_MODULE)
    except ModuleNotFoundError:
        return "this installation has no native CPU kernels (a wheel has them; in a checkout: python csrc/build.py)"
    except ImportError as error:
        return f"the native CPU kernels do not fit this installation of torch {torch.__version__}: {error}"
    settings.observe(_follow)
    return None


_followed = Settings()
"""The settings that the extension was told of last. It begins with the defaults."""


def _follow(current: Settings) -> None:
    """Tell the extension of settings that it holds itself, where they have changed.

    Only then: what :func:`instruction_set` has chosen stays until the setting is another one.
    """
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
    """Whether the native kernels can run here."""
    return why_absent() is None


def takes(problem: Problem) -> bool:
    """Whether there are kernels for the problem's dtype and the extents of its tensors."""
    largest = max(*problem.x_shape, *problem.w_shape, *problem.y_shape)
    return is_available() and problem.dtype in ("float32", "float64") and largest <= LARGEST_EXTENT


def _operators() -> Any:
    reason = why_absent()
    if reason is not None:
        raise RuntimeError(reason)
    return torch.ops.polyconv_cpu


def operator(name: str) -> Any:
    """One operator of the extension, without the frame of Python that torch has around it: for calls that are short."""
    return getattr(_operators(), name).default._op


def instruction_set(name: str = "") -> str:
    """The instruction set in use: ``avx512``, ``avx2`` or ``sse4``. With a name (or ``best``), choose it: for tests."""
    if name:
        _instruction_set.cache_clear()
        _operators().instruction_set(name)
    return _instruction_set()


@lru_cache(maxsize=1)
def _instruction_set() -> str:
    """Remembered, because calls that keep weights ask."""
    operators = _operators()
    settings.current()  # may limit it
    result: str = operators.instruction_set("")
    return result


def l2_bytes(size: int = 0) -> int:
    """The L2 cache of a core that work is cut for, read from the machine. With a size, another one: for tests."""
    result: int = _operators().l2_bytes(size)
    return result


def empty_output(like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """``torch.empty_strided`` for a large float32 output: on huge pages, reused from outputs that were freed before.

    The system clears every page of new memory, which takes longer than computing a large output. At most
    ``settings.output_pool`` bytes lie idle in the pool; larger outputs are allocated by torch.
    """
    operators = _operators()
    settings.current()  # the pool has the size that they say
    pooled: Tensor = operators.empty_output(like, list(shape), list(strides))
    return pooled if pooled.numel() else like.new_empty_strided(shape, strides)


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """What the kernels say of themselves: their schemes, and names in the order of the numbers that stand for them.

    ``csrc/cpu/torch/facts.cc`` writes it. What is there is written down nowhere else: nothing has to be kept alike.
    """
    said: dict[str, Any] = json.loads(_operators().facts())
    return said


def plan_numbers(engine: str, algorithm: int) -> list[int]:
    """What the lanes hold and which scheme, for a forward pass; zeros leave the cut of the work to the kernels."""
    return [facts()["lanes"].index(engine), algorithm, 0, 0, 0]


def activation_number(activation: Activation) -> int:
    """The number by which operators know an activation."""
    number: int = facts()["activations"].index(activation)
    return number


def longest_sum(engine: str, algorithm: int, terms: int) -> int:
    """Of a sum over so many channels and taps: how many a forward pass adds in sequence before it begins anew."""
    length: int = _operators().longest_sum(terms, plan_numbers(engine, algorithm))
    return length


def weight_gradient_blocks(problem: Problem, algorithm: int) -> tuple[int, ...]:
    """How a weight gradient with channels in the lanes cuts the sum of one weight: lengths in sequence."""
    return tuple(_operators().weight_gradient_blocks(_sizes(problem), geometry_numbers(problem), [algorithm]))


def depthwise_longest_sum(problem: Problem) -> int:
    """Products that a lane of a depthwise weight gradient adds in float, at most, before it goes on in double."""
    length: int = _operators().depthwise_longest_sum(_sizes(problem), geometry_numbers(problem))
    return length


def _sizes(problem: Problem) -> list[int]:
    return [*problem.x_shape, *problem.w_shape, *problem.out_size]


def geometry_numbers(problem: Problem) -> list[int]:
    """The geometry that every operator takes; bottom and right padding follow from the sizes of the tensors."""
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    return [*problem.stride, top, left, *problem.dilation, problem.groups, facts()["borders"].index(border)]
