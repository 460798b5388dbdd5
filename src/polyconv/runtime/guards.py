"""Guards: whether PyTorch's dispatcher would do more with a call than select the device's kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

TYPES = (Tensor, torch.nn.Parameter)
"""Tensor types without overridden behaviour."""

keys_of = torch._C._dispatch_keys
included = torch._C._dispatch_tls_local_include_set
excluded = torch._C._dispatch_tls_local_exclude_set
_is_profiled = torch._C._autograd._profiler_enabled
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_Guards = torch._C._dynamo.guards.TensorGuards
_number_of: Callable[[Any], Hashable] = getattr(torch._C.DispatchKeySet, "raw_repr", str)  # PyTorch 2.4 has no raw_repr


def is_watched() -> bool:
    """Whether forward-mode AD, a profiler or a mode is active: observers that dispatch keys do not show."""
    return forward_ad._current_level >= 0 or _is_profiled() or _function_modes() > 0 or _dispatch_modes() > 0


def are_plain(*tensors: Tensor) -> bool:
    """Whether the dispatch keys of the tensors and of this thread only select a kernel or record a gradient."""
    thread = _number_of(included()), _number_of(excluded())
    for tensor in tensors:
        if type(tensor) not in TYPES or tensor.device.type not in ("cpu", "cuda"):
            return False
        threads, plain = _plain_states(tensor.device)
        if thread not in threads or _number_of(keys_of(tensor)) not in plain:
            return False
    return True


def alike(*tensors: Tensor, any_length: bool = False) -> Callable[..., bool]:
    """Build a guard: whether other tensors are equivalent to these for the dispatcher, autograd and a plan.

    It compares types, shapes, strides, dtypes, devices, ``requires_grad``, and the dispatch keys with those that this
    thread includes and excludes. It is ``torch.compile``'s guard in C++, ten times as fast as Python. No tensor may
    occur twice, nor be nested, which would end the process. ``any_length``: the last extent of the first tensor may be
    another, with other strides.
    """
    sizes: Any = None
    strides: Any = None
    if any_length:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        sizes[0][-1], strides[0] = None, [None] * tensors[0].dim()
    found: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return found


@lru_cache(maxsize=64)
def _plain_states(device: torch.device) -> tuple[frozenset[tuple[Hashable, Hashable]], frozenset[Hashable]]:
    """Default dispatch keys of a thread and a tensor, also in inference mode; read in a new thread, without modes."""
    threads: set[tuple[Hashable, Hashable]] = set()
    tensors: set[Hashable] = set()

    def ask() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                threads.add((_number_of(included()), _number_of(excluded())))
                tensors.add(_number_of(keys_of(torch.empty(0, device=device))))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return frozenset(threads), frozenset(tensors)
