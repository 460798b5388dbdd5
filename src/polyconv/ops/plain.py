"""Whether PyTorch's dispatcher would do anything with a call but find the kernel of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

TYPES = (Tensor, torch.nn.Parameter)
"""Of tensors that have no behaviour of their own."""

keys_of = torch._C._dispatch_keys
included = torch._C._dispatch_tls_local_include_set
excluded = torch._C._dispatch_tls_local_exclude_set
_is_profiled = torch._C._autograd._profiler_enabled
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_Guards = torch._C._dynamo.guards.TensorGuards
_number_of: Callable[[Any], Hashable] = getattr(torch._C.DispatchKeySet, "raw_repr", str)  # PyTorch 2.4 has no number


def is_watched() -> bool:
    """Whether someone wants to see calls who is not to be told by dispatch keys: forward mode, a profiler, a mode."""
    return forward_ad._current_level >= 0 or _is_profiled() or _function_modes() > 0 or _dispatch_modes() > 0


def are_plain(*tensors: Tensor) -> bool:
    """Whether no dispatch key of the tensors or of this thread does more than find the kernel, or record a gradient."""
    thread = _number_of(included()), _number_of(excluded())
    for tensor in tensors:
        if type(tensor) not in TYPES or tensor.device.type not in ("cpu", "cuda"):
            return False
        threads, plain = _plain_states(tensor.device)
        if thread not in threads or _number_of(keys_of(tensor)) not in plain:
            return False
    return True


def alike(*tensors: Tensor) -> Callable[..., bool]:
    """A function that says of as many tensors whether the dispatcher, autograd and a plan would see no difference.

    It compares types, shapes, strides, dtypes, devices, whether a gradient is wanted, and the dispatch keys with those
    that this thread adds and leaves out. ``torch.compile`` guards its graphs so, in C++: it takes a tenth of the time
    that Python needs to look at all of these. No tensor may come twice, nor be nested, which would end the process.
    """
    found: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return found


@lru_cache(maxsize=64)
def _plain_states(device: torch.device) -> tuple[frozenset[tuple[Hashable, Hashable]], frozenset[Hashable]]:
    """Dispatch keys of a thread and of a tensor, in normal and in inference mode.

    Asked of a new thread, where nothing can have been changed: this one may be in any mode.
    """
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
