"""Whether PyTorch's dispatcher would do anything with a call but find the kernel of the device."""

from __future__ import annotations

import threading
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


def is_watched() -> bool:
    """Whether someone wants to see calls without leaving a dispatch key: forward mode, a profiler, a function mode."""
    return forward_ad._current_level >= 0 or _is_profiled() or _function_modes() > 0


def is_plain(tensor: Tensor) -> bool:
    """Whether no dispatch key of the tensor or of this thread does more than find the kernel, or record a gradient."""
    if type(tensor) not in TYPES or tensor.device.type not in ("cpu", "cuda"):
        return False
    threads, tensors = _plain_states(tensor.device)
    return (included().raw_repr(), excluded().raw_repr()) in threads and keys_of(tensor).raw_repr() in tensors


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
