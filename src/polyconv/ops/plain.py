"""Whether PyTorch's dispatcher would do anything with a call but find the kernel of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache

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


def is_watched() -> bool:
    """Whether someone wants to see calls who is not to be told by dispatch keys: forward mode, a profiler, a mode."""
    return forward_ad._current_level >= 0 or _is_profiled() or _function_modes() > 0 or _dispatch_modes() > 0


def are_plain(*tensors: Tensor) -> bool:
    """Whether no dispatch key of the tensors or of this thread does more than find the kernel, or record a gradient."""
    thread = included().raw_repr(), excluded().raw_repr()
    for tensor in tensors:
        if type(tensor) not in TYPES or tensor.device.type not in ("cpu", "cuda"):
            return False
        threads, plain = _plain_states(tensor.device)
        if thread not in threads or keys_of(tensor).raw_repr() not in plain:
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
def _plain_states(device: torch.device) -> tuple[frozenset[tuple[int, int]], frozenset[int]]:
    """Dispatch keys of a thread and of a tensor, in normal and in inference mode.

    Asked of a new thread, where nothing can have been changed: this one may be in any mode.
    """
    threads: set[tuple[int, int]] = set()
    tensors: set[int] = set()

    def ask() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                threads.add((included().raw_repr(), excluded().raw_repr()))
                tensors.add(keys_of(torch.empty(0, device=device)).raw_repr())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return frozenset(threads), frozenset(tensors)
