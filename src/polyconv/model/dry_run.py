"""Problems of a training step or forward pass per device, recorded on fake tensors.

The model is called on fake counterparts of its parameters, buffers and inputs, and differentiated if requested. Each
dispatched pass is recorded as a real call would describe it, so autograd itself decides which gradients are computed,
and with which strides. The model is not changed, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import dispatch
from ..backend import PrepareRequest, backend_name
from ..dispatch.execute import is_training
from ..dispatch.operands import described, dgrad_problem, fprop_problem, wgrad_problem
from ..lowering.lower import ahead_on, lowered
from ..problem import Problem
from ..runtime.frozen_weights import frozen_marks
from .example_run import Loss, differentiable
from .fake_tensors import DispatchRecorder, mode_of, stand_in


def dry_run(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool,
    loss: Loss | None = None,
) -> dict[torch.device, list[PrepareRequest]]:
    """The distinct problems of a call of the model, and of its backward pass if requested, per device.

    Args:
        model: a module; a wrapper that compiles it or runs it on several devices is removed.
        inputs, kwargs: arguments of the call. A tuple of integers in the place of an input stands for a tensor of that
            shape, with the dtype and the device of the model's parameters.
        backward: whether gradients are computed.
        loss: maps the output to the number whose gradient is computed; None: every output has a gradient.
    """
    model = _unwrapped(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode = mode_of(tree_leaves((state, inputs, kwargs)))
    with torch.inference_mode(False), mode, torch.set_grad_enabled(backward):
        twins = {name: stand_in(value, mode) for name, value in state.items()}
        like = next((value for value in twins.values() if value.is_floating_point()), None)
        args = tuple(_twin(value, mode, like) for value in inputs)
        keywords = {name: _twin(value, mode, None) for name, value in (kwargs or {}).items()}
        recorder = _Recorder({id(twins[name]): value for name, value in state.items()})
        with recorder:
            output = torch.func.functional_call(model, twins, args, keywords, strict=False)
            if backward:
                leaves = tree_leaves((twins, args, keywords))
                _differentiate(output, loss, [t for t in leaves if isinstance(t, Tensor) and t.requires_grad])
    return {device: list(asked) for device, asked in recorder.asked.items() if asked}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Remove wrappers that compile a model or run it on several devices: they need tensors with data."""
    while True:
        compiled = getattr(model, "_orig_mod", None)  # of torch.compile
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def _twin(value: Any, mode: Any, like: Tensor | None) -> Any:
    """Fake counterpart of an argument, including nested tensors."""
    twin = stand_in(value, mode, like)
    return twin if twin is not value else tree_map_only(Tensor, lambda tensor: stand_in(tensor, mode), value)


def _differentiate(output: Any, loss: Loss | None, leaves: Sequence[Tensor]) -> None:
    """Differentiate without accumulating into ``grad``: a tensor that the model hides may be a real one."""
    ends = differentiable(output) if loss is None else [loss(output)]
    torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)


class _Recorder(DispatchRecorder):
    """Records each dispatched pass. ``originals``: ``id`` of a fake parameter -> the real one, which may be frozen."""

    def __init__(self, originals: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.asked: dict[torch.device, dict[PrepareRequest, None]] = {}
        self._originals = originals

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        if func is dispatch.fprop:
            self._note(args[0], result, self._fprop(*args), inference=not is_training())
        elif func is dispatch.dgrad:
            self._note(args[0], result, _dgrad(*args))
        elif func is dispatch.wgrad:
            self._note(args[0], args[1], _wgrad(*args))

    def _note(self, one: Tensor, other: Tensor, problem: Problem, *, inference: bool = False) -> None:
        """Record the problems that a backend runs for a pass; none if a tensor is empty."""
        if one.numel() and other.numel():
            asked = self.asked.setdefault(one.device, {})
            found = lowered(problem, backend_name(one.device), ahead_on(one.device))
            asked |= {PrepareRequest(runs, inference): None for runs in found}

    def _fprop(self, x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Problem:
        settled, residual, activation = dispatch.split_epilogue(*rest)
        frozen = not is_training() and id(self._originals.get(id(w), w)) in frozen_marks
        bias_shape = None if bias is None else bias.shape
        how = bias_shape, residual is not None, activation, frozen, x.dtype, ALIGNED
        return fprop_problem(described(x), described(w), *how, dispatch.geometry_of(*settled))[0]


ALIGNED = True
"""torch's allocations are 16-byte aligned; calls with unaligned tensors are planned when they occur."""


def _dgrad(grad: Tensor, w: Tensor, x_size: Sequence[int], channels_last: bool, *rest: Any) -> Problem:
    settled, bias = dispatch.split_bias(*rest)
    layout, bias_shape = (tuple(x_size), channels_last), None if bias is None else bias.shape
    how = bias_shape, grad.dtype, ALIGNED
    return dgrad_problem(described(grad), described(w), layout, *how, dispatch.geometry_of(*settled))[0]


def _wgrad(grad: Tensor, x: Tensor, w_size: Sequence[int], channels_last: bool, bias: bool, *settled: Any) -> Problem:
    layout, how = (tuple(w_size), channels_last), (bias, grad.dtype, ALIGNED)
    return wgrad_problem(described(grad), described(x), layout, *how, dispatch.geometry_of(*settled))[0]
