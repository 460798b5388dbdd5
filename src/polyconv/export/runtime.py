"""The part that meets torch: builds the extension once per process, launches the kernels, differentiates.

No tensor is copied, whatever its strides, and nothing waits for the GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..arguments import Geometry, check_shapes, suggests_channels_last
from ..forking import whole
from ..plan.plan import Dim3, Schedule
from ..problem import PaddingMode, Pass, Problem
from .chosen import EXPORTED, WAYS
from .cuda_source import CUDA_SOURCE

WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a convolution may take."""

_loaded: list[Any] = []


def extension() -> Any:
    """The compiled kernels. The first caller in a process builds them (torch keeps the result on disk); others wait."""
    with whole:
        if not _loaded:
            from torch.utils.cpp_extension import load_inline

            declaration = (
                "void launch(const std::string&, int64_t, const std::vector<int64_t>&, const std::vector<int64_t>&, "
                "int64_t, const std::string&);"
            )
            built = load_inline(
                name="polyconv_" + hashlib.sha256(CUDA_SOURCE.encode()).hexdigest()[:16],
                cpp_sources=[declaration],
                cuda_sources=[CUDA_SOURCE],
                functions=["launch"],
                extra_cuda_cflags=["-O3"],
                with_cuda=True,
            )
            _loaded.append(built)
        return _loaded[0]


def _launch(symbol: str, device: int, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes) -> None:
    """Enqueue one kernel on torch's current stream of a device."""
    extension().launch(symbol, device, grid, block, shared_bytes, params)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=1024)
def _schedule(problem: Problem, sms: int) -> Schedule:
    refusals = []
    for way in WAYS[problem.kind]:
        refusal = way.refusal(problem)
        if refusal is None:
            return way.schedule(problem, sms, WORKSPACE)
        refusals.append(f"{way}: {refusal}")
    raise RuntimeError(
        f"this file was exported for {EXPORTED} and has no kernel for {problem}; "
        f"export it again with these arguments ({'; '.join(refusals)})"
    )


def _run(problem: Problem, device: torch.device, **tensors: Tensor) -> None:
    """Enqueue the launches that fill the outputs among ``tensors``."""
    schedule = _schedule(problem, _multiprocessors(device))
    # Freed on return, while the kernels may still be running: torch's allocator orders memory by stream.
    tensors["workspace"] = torch.empty(schedule.workspace_bytes, dtype=torch.uint8, device=device)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for launch in schedule.launches:
        params = launch.bind(addresses)
        _launch(launch.kernel.symbol, device.index or 0, launch.grid, launch.block, launch.dynamic_shared, params)


def _problem(kind: Pass, x: Tensor, w: Tensor, y: Tensor, geometry: Geometry, bias: bool) -> Problem:
    n, c, height, width = x.shape
    k, _, r, s = w.shape
    return Problem(
        kind=kind,
        batch=n,
        in_channels=c,
        out_channels=k,
        in_size=(height, width),
        kernel=(r, s),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding_mode=PaddingMode(geometry.padding_mode),
        bias=bias,
        x_strides=x.stride(),
        w_strides=w.stride(),
        y_strides=y.stride(),
        vector_aligned=not (x.data_ptr() | y.data_ptr()) & 15,
        dtype="float32",
    )


def _empty(like: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)


def _is_channels_last(tensor: Tensor) -> bool:
    return suggests_channels_last(tensor.shape, tensor.stride())


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(
            f"this convolution has CUDA kernels only, but got a tensor on the device {str(tensor.device)!r}: "
            "move the model and its input with .cuda()"
        )


def _check(**tensors: Tensor) -> None:
    """Raise unless all tensors are float32, on one CUDA device."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        _check_device(tensor)
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"this convolution computes in float32, but the {name} is {tensor.dtype}: use .float()")
        if tensor.device != first.device:
            raise RuntimeError(f"the tensors should be on one device: got {first.device} and {tensor.device} ({name})")


# ---- the three passes


def _fprop(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    given = {"input": x, "weight": w}
    if bias is not None:
        given["bias"] = bias
    _check(**given)
    check_shapes(x.shape, w.shape, None if bias is None else bias.shape, geometry)
    shape = (x.shape[0], w.shape[0], *geometry.out_size(x.shape[2:], w.shape[2:]))
    y = _empty(x, shape, _is_channels_last(x) or _is_channels_last(w))
    if x.numel() == 0 or y.numel() == 0:  # without input channels: a sum of nothing, and the bias
        return y.zero_() if bias is None else y.copy_(bias.reshape(1, -1, 1, 1).expand(y.shape))
    tensors = {"x": x, "w": w, "y": y}
    if bias is not None:
        tensors["bias"] = bias.contiguous()
    _run(_problem(Pass.FPROP, x, w, y, geometry, bias is not None), x.device, **tensors)
    return y


def _dgrad(grad: Tensor, w: Tensor, x_shape: Sequence[int], channels_last: bool, geometry: Geometry) -> Tensor:
    _check(gradient=grad, weight=w)
    dx = _empty(grad, x_shape, channels_last)
    if grad.numel() == 0 or dx.numel() == 0:
        return dx.zero_()
    _run(_problem(Pass.DGRAD, dx, w, grad, geometry, False), grad.device, x=dx, w=w, y=grad)
    return dx


def _wgrad(
    grad: Tensor, x: Tensor, w_shape: Sequence[int], channels_last: bool, bias: bool, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    _check(gradient=grad, input=x)
    dw, db = _empty(grad, w_shape, channels_last), grad.new_empty(w_shape[0] if bias else 0)
    if grad.numel() == 0 or dw.numel() == 0:
        return dw.zero_(), grad.sum((0, 2, 3)) if bias else db
    tensors = {"x": x, "y": grad, "dw": dw}
    if bias:
        tensors["db"] = db
    _run(_problem(Pass.WGRAD, x, dw, grad, geometry, bias), grad.device, **tensors)
    return dw, db


# ---- derivatives: each pass is linear in each tensor, so the derivative of any of them is made of these three again


class _Fprop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return _fprop(x, w, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        want_x, want_w, want_bias, _ = ctx.needs_input_grad
        dx = dw = db = None
        if want_x:
            dx = _Dgrad.apply(grad, w, x.shape, _is_channels_last(x), ctx.geometry)
        if want_w:
            dw, db = _Wgrad.apply(grad, x, w.shape, _is_channels_last(w), want_bias, ctx.geometry)
        elif want_bias:
            db = grad.sum((0, 2, 3))
        return dx, dw, db if want_bias else None, None


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, w: Tensor, x_shape: Sequence[int], channels_last: bool, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(grad, w)
        ctx.geometry = geometry
        return _dgrad(grad, w, x_shape, channels_last, geometry)

    @staticmethod
    def backward(ctx: Any, grad_dx: Tensor) -> Any:
        grad, w = ctx.saved_tensors
        for_grad = for_w = None
        if ctx.needs_input_grad[0]:
            for_grad = _Fprop.apply(grad_dx, w, None, ctx.geometry)
        if ctx.needs_input_grad[1]:
            for_w, _ = _Wgrad.apply(grad, grad_dx, w.shape, _is_channels_last(w), False, ctx.geometry)
        return for_grad, for_w, None, None, None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        w_shape: Sequence[int],
        channels_last: bool,
        bias: bool,
        geometry: Geometry,
    ) -> Any:
        ctx.save_for_backward(grad, x)
        ctx.bias, ctx.geometry = bias, geometry
        return _wgrad(grad, x, w_shape, channels_last, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad_dw: Tensor, grad_db: Tensor) -> Any:
        grad, x = ctx.saved_tensors
        for_grad = for_x = None
        if ctx.needs_input_grad[0]:
            for_grad = _Fprop.apply(x, grad_dw, grad_db if ctx.bias else None, ctx.geometry)
        if ctx.needs_input_grad[1]:
            for_x = _Dgrad.apply(grad, grad_dw, x.shape, _is_channels_last(x), ctx.geometry)
        return for_grad, for_x, None, None, None, None


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d``: its parameters, its initialisation, its state dict. The kernels above do the convolution.

    ``padding`` may also be (top, bottom, left, right).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extension()  # built now, so that the first batch does not wait for the compiler

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in (3, 4):
            raise RuntimeError(f"expected an input of 4 dimensions (or 3, one image), got size {list(input.shape)}")
        geometry = Geometry(self.stride, self._sides(), self.dilation, self.groups, self.padding_mode)
        if input.dim() == 4:
            return _Fprop.apply(input, self.weight, self.bias, geometry)  # type: ignore[no-any-return]
        return _Fprop.apply(input.unsqueeze(0), self.weight, self.bias, geometry).squeeze(0)  # type: ignore[no-any-return]

    def _sides(self) -> tuple[int, int, int, int]:
        """Padding at the top, the bottom, the left and the right."""
        if isinstance(self.padding, str):  # "same" and "valid": torch has worked out the numbers
            left, right, top, bottom = self._reversed_padding_repeated_twice
            return (top, bottom, left, right)
        sides: tuple[int, ...] = self.padding
        if len(sides) == 2:
            return (sides[0], sides[0], sides[1], sides[1])
        top, bottom, left, right = sides
        return (top, bottom, left, right)
