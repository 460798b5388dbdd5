"""DTensor rules: with a batch sharded over ranks, each rank convolves its own images.

Along each mesh dimension there are two cases. Either the tensors with a batch are sharded over it, and weight and bias
are replicated: then results with a batch are sharded in this way, and sums over the batch are partial sums. Or all
tensors are replicated. Other placements are first redistributed to one of these; a warning says so if this gathers a
sharded tensor.

Imported when the first DTensor may exist, because importing torch's module takes longer than importing polyconv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...arguments import suggests_channels_last
from ...problem import dense_strides
from ...runtime.warn_once import warn_once
from ..operands import Shape, fprop_layout, geometry_of
from ..schema import Args, dgrad, fprop, library, split_bias, split_epilogue, wgrad

MIXED = (
    "polyconv's convolution got DTensors and, as its {name}, a plain tensor. Distribute that one, too: "
    "torch.distributed.tensor.distribute_tensor({name}, mesh, placements); "
    "torch.distributed.tensor.distribute_module does it for all parameters of a model"
)
MESHES = "polyconv's convolution got DTensors of two meshes: {one} and, as its {name}, {other}. Use one mesh for both"
GATHERED = (
    "polyconv shards a convolution over its batch alone: its {name}, a DTensor with the placements {placements}, is "
    "gathered on every rank at each call. Results are right, and nothing is gained by sharding it so: replicate it, or "
    "shard it over the batch, if it has one"
)

Given = TypeVar("Given", Tensor, Tensor | None)


class _Ranks:
    """Placements of one call's tensors on a mesh."""

    def __init__(self, batched: Sequence[Tensor | None], shared: Sequence[Tensor | None]) -> None:
        """``batched``: tensors with a batch, any of which may be sharded over it."""
        self.mesh: DeviceMesh = next(each.device_mesh for each in (*batched, *shared) if isinstance(each, DTensor))
        # Tensors of another mesh are rejected in `local`.
        ours = [each for each in batched if isinstance(each, DTensor) and each.device_mesh == self.mesh]
        split = [any(each.placements[dim] == Shard(0) for each in ours) for dim in range(self.mesh.ndim)]
        self.whole: tuple[Placement, ...] = tuple(Replicate() for _ in split)
        self.by_batch: tuple[Placement, ...] = tuple(Shard(0) if here else Replicate() for here in split)
        self.summands: tuple[Placement, ...] = tuple(Partial("sum") if here else Replicate() for here in split)

    def local(self, name: str, tensor: Given, placements: tuple[Placement, ...]) -> Given:
        """This rank's part of a tensor after redistribution to ``placements``."""
        if tensor is None:
            return tensor
        if not isinstance(tensor, DTensor):
            if not DTensor._op_dispatcher._allow_implicit_replication:
                raise RuntimeError(MIXED.format(name=name))
            tensor = DTensor.from_local(tensor, self.mesh, self.whole, run_check=False)
        if tensor.device_mesh != self.mesh:
            raise RuntimeError(MESHES.format(name=name, one=self.mesh, other=tensor.device_mesh))
        if tensor.placements != placements:
            if any(_is_lost(*change) for change in zip(tensor.placements, placements, strict=True)):
                warn_once(GATHERED.format(name=name, placements=tensor.placements))
            tensor = tensor.redistribute(self.mesh, placements)
        part: Tensor = tensor.to_local()
        return part

    def whole_of(self, part: Tensor, placements: tuple[Placement, ...], shape: Shape) -> Tensor:
        """DTensor of all ranks' parts, in their memory format."""
        strides: tuple[int, ...] = (1,)  # of a bias
        if part.dim() > 1:
            strides = dense_strides(shape, suggests_channels_last(part.shape, part.stride()))
        size = torch.Size(shape)
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=size, stride=strides)


def _is_lost(given: Placement, used: Placement) -> bool:
    """Whether a sharded tensor is gathered. Partial sums do not count: they have to be reduced in any case."""
    return not (given.is_replicate() or given.is_partial() or given == used)


def shard_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    geometry, residual, activation = split_epilogue(*args)
    bias_shape = None if bias is None else bias.shape
    shape, _ = fprop_layout(x.shape, x.stride(), w.shape, w.stride(), bias_shape, geometry_of(*geometry))
    ranks = _Ranks((x, residual), (w, bias))
    y = fprop(
        ranks.local("input", x, ranks.by_batch),
        ranks.local("weight", w, ranks.whole),
        ranks.local("bias", bias, ranks.whole),
        *geometry,
        ranks.local("residual", residual, ranks.by_batch),
        activation,
    )
    return ranks.whole_of(y, ranks.by_batch, shape)


def shard_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    geometry, bias = split_bias(*args)
    ranks = _Ranks((grad,), (w, bias))
    part = ranks.local("gradient", grad, ranks.by_batch)
    here = [part.shape[0], *x_size[1:]]
    whole = ranks.local("weight", w, ranks.whole), ranks.local("bias", bias, ranks.whole)
    dx = dgrad(part, whole[0], here, channels_last, *geometry, whole[1])
    return ranks.whole_of(dx, ranks.by_batch, x_size)


def shard_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    ranks = _Ranks((grad, x), ())
    parts = ranks.local("gradient", grad, ranks.by_batch), ranks.local("input", x, ranks.by_batch)
    dw, db = wgrad(*parts, w_size, channels_last, bias, *args)
    return ranks.whole_of(dw, ranks.summands, w_size), ranks.whole_of(db, ranks.summands, db.shape)


def _register(name: str, rule: Callable[..., Any]) -> None:
    def run(cls: type, op: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        with torch.no_grad():  # autograd has recorded the call on the DTensors
            return rule(*args)

    torch.library.register_torch_dispatch(f"polyconv::{name}", DTensor, run, lib=library)


_register("conv2d_fprop", shard_fprop)
_register("conv2d_dgrad", shard_dgrad)
_register("conv2d_wgrad", shard_wgrad)
