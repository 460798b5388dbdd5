"""A convolution of a frozen graph: its tensors, its geometry, and its call in a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import settings
from ..cpu import native
from ..cpu.engines import depthwise, pointwise
from ..cpu.plan import CpuCandidate
from ..problem import Pass, Problem, channels_last_strides
from ..settings import INSTRUCTION_SETS
from .epilogues import Epilogue, epilogue_of
from .private import hint, needs_channels_last, value_of
from .prologues import Prologue, prologue_of

NUMBERS = 21
"""Numbers of a layer in a call of ``compiled_convolution``; a chain of layers has those of each."""
RESIDUAL, NORMALISATION, LAYER = 3, 4, 5
"""Places of the residual, of the normalisation or gate, and of the layers' numbers among the arguments."""
FLAGS, WHOLE, FIRST = 17, 18, 19
"""Places among the numbers of a layer: the flags, the channels of a tensor of several layers' outputs that it writes
into (or 0), and its first one of these. Such a layer takes the tensor as its residual, or makes it without one."""
MOST_BYTES = 128 * 2**20
"""Largest weight of a layer. Choosing a kernel takes two more copies of it, and the time of so large a layer is mostly
that of reading its weight."""
_FEW_CHANNELS = 16
"""Number of channels from which on the pointwise engine reads pixels in place."""
_CLAMPED, OVERWRITES, _TRANSPOSED = 1, 2, 4
"""Flags: a joined input is clamped at zero; the output may replace the residual, which is read no more; the convolution
is transposed."""
DEPTHWISE = -1
"""Number of the depthwise engine in ``csrc/cpu/bindings/compiled.cc``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A 2-D convolution in float32 with constant weights, perhaps transposed, and its epilogue."""

    node: Node
    x: Node
    packed: Tensor | None
    """The weight that Inductor's own call reads: packed for oneDNN, or plain. None once another kernel runs."""
    bias: Node | None
    bias_value: Tensor | None
    w: Tensor
    """The plain weight, output channels first."""
    x_shape: tuple[int, ...]
    """Size of the input when the graph was traced."""
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    epilogue: Epilogue
    prologue: Prologue | None = None
    output_padding: tuple[int, ...] | None = None
    """Of a transposed convolution; None for another one."""

    @property
    def is_transposed(self) -> bool:
        return self.output_padding is not None

    def runs(self, candidate: CpuCandidate) -> bool:
        """True if ``compiled_convolution`` runs the layer by it: a transposed one by the pointwise engine alone."""
        return has_compiled_form(candidate) and (not self.is_transposed or candidate.engine == pointwise.NAME)

    def joins(self, chosen: CpuCandidate) -> bool:
        """True if a kernel computes the prologue, instead of reading its result."""
        return self.prologue is not None and chosen.engine == pointwise.NAME

    @property
    def problem(self) -> Problem:
        """The pass in channels_last, as the planner describes it: of a transposed convolution an input gradient."""
        h, w = self.padding
        shape: tuple[int, ...] = tuple(self.w.shape)
        if self.is_transposed:
            x_shape = tuple(map(hint, self.node.meta["val"].shape))
            return Problem.make(
                Pass.DGRAD,
                x_shape,
                (shape[1], shape[0], *shape[2:]),
                stride=self.stride,
                padding=(h, h, w, w),
                x_strides=channels_last_strides(x_shape),
                y_strides=channels_last_strides(self.x_shape),
                tolerance=settings.current().tolerance,
            )
        problem = Problem.make(
            Pass.FPROP,
            self.x_shape,
            shape,
            stride=self.stride,
            padding=(h, h, w, w),
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias is not None,
            x_strides=channels_last_strides(self.x_shape),
            residual=self.epilogue.residual is not None,
            activation=self.epilogue.activation,
            tolerance=settings.current().tolerance,
        )
        return replace(problem, y_strides=channels_last_strides(problem.y_shape), frozen=True)

    def numbers(self, chosen: CpuCandidate) -> list[int]:
        """The layer as ``compiled_convolution`` takes it."""
        h, w = self.padding
        engine = DEPTHWISE if chosen.engine == depthwise.NAME else native.plan_numbers(chosen.engine, 0)[0]
        activation, *_ = native.activation_numbers(self.epilogue.activation)
        border = native.facts()["borders"].index("zeros")
        more_h, more_w = self.output_padding or (0, 0)
        flags = _CLAMPED if self.prologue is not None and self.prologue.clamped else 0
        return [
            *(engine, chosen.algorithm, *self.w.shape, *self.stride, *(h, h - more_h, w, w - more_w)),
            *(
                *self.dilation,
                self.groups,
                border,
                activation,
                flags | (_TRANSPOSED if self.is_transposed else 0),
                0,
                0,
            ),
            INSTRUCTION_SETS.index(native.instruction_set()),
        ]

    def weights_for(self, chosen: CpuCandidate) -> Tensor:
        """The weight in the layout of the chosen kernel."""
        if chosen.engine == depthwise.NAME and chosen.algorithm == depthwise.BY_SEGMENTS:
            segments: Tensor = native.operator("depthwise_transform")(self.w)
            return segments
        if chosen.engine == depthwise.NAME:
            return self.w.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        problem = self.problem
        x, y = (
            torch.empty_strided(*of, device="cpu")
            for of in (
                (problem.x_shape, problem.x_strides),
                (problem.y_shape, problem.y_strides),
            )
        )
        numbers = native.geometry_numbers(problem), native.plan_numbers(chosen.engine, chosen.algorithm)
        packed: Tensor
        if self.is_transposed:
            packed = native.operator("transform_transposed_weights")(y, self.w.transpose(0, 1), x, *numbers)
        else:
            packed = native.operator("transform_weights")(x, self.w, y, *numbers)
        return packed


def has_compiled_form(candidate: CpuCandidate) -> bool:
    """Whether ``compiled_convolution`` runs a candidate: of an engine of packed weights, or of the depthwise one."""
    return candidate.engine in (depthwise.NAME, *native.facts()["lanes"])


def placed(node: Node) -> list[Node]:
    """The calls that can write the tensor that a node concatenates along the channels, each its part, in the order of
    the parts; none for another node. Whatever else reads a part must take it with the strides of the whole."""
    if node.target is not torch.ops.aten.cat.default or tuple(node.args[1:]) not in ((1,), (-3,)):
        return []
    parts: Any = node.args[0]
    able = len({*parts}) == len(parts) > 1 and all(_is_placeable(part, node) for part in parts)
    return list(parts) if able else []


def _is_placeable(part: Node, cat: Node) -> bool:
    arguments: Any = part.args
    if part.target is not operator() or len(arguments[LAYER]) != NUMBERS or arguments[RESIDUAL] is not None:
        return False
    others = [user for user in part.users if user is not cat]
    return arguments[LAYER][WHOLE] == 0 and all(
        user.target is operator() and part not in user.args[1:] for user in others
    )


def layer_of(gm: GraphModule, node: Node) -> Layer | None:
    """The layer of a convolution that polyconv's kernels may take; None for others."""
    arguments: tuple[Any, ...] = node.args
    output_padding = None
    if node.target is torch.ops.mkldnn._convolution_pointwise.default and arguments[7] == "none":
        x, weight, bias, padding, stride, dilation, groups = arguments[:7]
    elif node.target is torch.ops.aten.convolution.default and not arguments[6]:
        x, weight, bias, stride, padding, dilation, _, _, groups = arguments
    elif node.target is torch.ops.mkldnn._convolution_transpose_pointwise.default and arguments[8] == "none":
        x, weight, bias, padding, output_padding, stride, dilation, groups = arguments[:8]
    else:
        return None
    value, out = x.meta["val"], node.meta["val"]
    constant = weight.op == "get_attr" and (bias is None or bias.op == "get_attr")
    if not set(node.all_input_nodes) <= {x, weight, bias}:  # symbolic numbers, also in tuples
        return None
    if not constant or value.dim() != 4 or value.dtype != torch.float32 or value.device.type != "cpu":
        return None
    packed = value_of(gm, weight)
    if packed.numel() * packed.element_size() > MOST_BYTES:
        return None
    dense = packed.to_dense() if packed.is_mkldnn else packed
    if output_padding is not None:
        taps = tuple(dense.shape[-2:])
        if tuple(value.shape[2:]) == (1, 1) and not any(padding) and not any(output_padding):
            stride = taps  # of a single pixel, which then has an output per tap
        if groups > 1 or set(dilation) != {1} or any(step > count for step, count in zip(stride, taps, strict=True)):
            return None
    epilogue = epilogue_of(node)
    if output_padding is not None and epilogue.residual is not None:
        epilogue = Epilogue(node, None)
    is_plain = output_padding is None and groups == 1 and tuple(dense.shape[-2:]) == (1, 1) and not any(padding)
    return Layer(
        node=node,
        x=x,
        packed=packed,
        bias=bias,
        bias_value=None if bias is None else value_of(gm, bias).detach().contiguous(),
        w=dense.detach().reshape(hint(out.shape[1]), -1, *dense.shape[-2:]),
        x_shape=tuple(map(hint, value.shape)),
        padding=tuple(padding),
        stride=tuple(stride),
        dilation=tuple(dilation),
        groups=groups,
        epilogue=epilogue,
        prologue=prologue_of(gm, x) if is_plain and not placed(x) else None,
        output_padding=None if output_padding is None else tuple(output_padding),
    )


C_SHIM = """
inline AOTITorchError aoti_torch_cpu_compiled_convolution(
    const AtenTensorHandle* inputs, int64_t inputs_len, AtenTensorHandle weights, const AtenTensorHandle* bias,
    const AtenTensorHandle* residual, const AtenTensorHandle* normalisation, const int64_t* layer, int64_t layer_len,
    double a, double b, AtenTensorHandle* y) {
  static const auto run = [] {
    StableIValue stack[1];
    if (aoti_torch_call_dispatcher("polyconv_cpu::compiled_convolution_address", "", stack) != AOTI_TORCH_SUCCESS) {
      throw std::runtime_error("polyconv: compiled layers need its kernels: import polyconv.inductor.aoti first");
    }
    return reinterpret_cast<void (*)(
        const AtenTensorHandle*, int64_t, AtenTensorHandle, const AtenTensorHandle*, const AtenTensorHandle*,
        const AtenTensorHandle*, const int64_t*, int64_t, double, double, AtenTensorHandle*)>(stack[0]);
  }();
  run(inputs, inputs_len, weights, bias, residual, normalisation, layer, layer_len, a, b, y);
  return AOTI_TORCH_SUCCESS;
}
"""
"""The operator for Inductor's generated C++: a direct call, without the dispatcher and its boxed arguments."""


@lru_cache(maxsize=1)
def operator() -> Any:
    """``polyconv_cpu::compiled_convolution``, known to fake tensors and to Inductor."""
    native.is_available()  # defines it
    torch.library.register_fake("polyconv_cpu::compiled_convolution", _fake)
    found = torch.ops.polyconv_cpu.compiled_convolution.default
    needs_channels_last(
        found,
        lambda arguments: [0, RESIDUAL, NORMALISATION][reads_any_layout(arguments[LAYER]) :],
        lambda arguments: [RESIDUAL] * (arguments[RESIDUAL] is not None and overwrites_residual(arguments[LAYER])),
    )
    return found


def reads_any_layout(numbers: Sequence[int]) -> bool:
    """Whether a call takes an input that is not in channels_last: the pointwise engine copies rows of few channels
    (``CopiesInput`` in ``csrc/cpu/pointwise``). So the image that a network reads is not converted first."""
    engine, _, _, channels, taps_h, taps_w, stride_h, stride_w, *_, dilation_h, dilation_w, groups = numbers[:15]
    is_pointwise = len(numbers) == NUMBERS and groups == 1 and engine == native.plan_numbers(pointwise.NAME, 0)[0]
    overlaps = taps_w > 1 and dilation_h == dilation_w == 1 and stride_h <= taps_h and stride_w <= taps_w
    is_transposed = bool(numbers[FLAGS] & _TRANSPOSED)
    return is_pointwise and overlaps and channels < _FEW_CHANNELS and not is_transposed


def overwrites_residual(numbers: Sequence[int]) -> bool:
    """Whether the last layer of a call may write its output into the memory of the residual."""
    return bool(numbers[FLAGS - NUMBERS] & OVERWRITES) or numbers[WHOLE - NUMBERS] > 0


def _fake(
    inputs: Sequence[Tensor],
    weights: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    normalisation: Tensor | None,
    layer: list[int],
    activation_a: float = 0.0,
    activation_b: float = 0.0,
) -> Tensor:
    x = inputs[0]
    height, width = x.shape[2:]
    for start in range(0, len(layer), NUMBERS):
        _, _, outputs, _, taps_h, taps_w, sh, sw, top, bottom, left, right, dh, dw = layer[start : start + 14]
        outputs = layer[start + WHOLE] or outputs
        if layer[start + FLAGS] & _TRANSPOSED:
            height = (height - 1) * sh - top - bottom + taps_h
            width = (width - 1) * sw - left - right + taps_w
            continue
        height = (height + top + bottom - dh * (taps_h - 1) - 1) // sh + 1
        width = (width + left + right - dw * (taps_w - 1) - 1) // sw + 1
    return torch.empty(
        (x.shape[0], outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
