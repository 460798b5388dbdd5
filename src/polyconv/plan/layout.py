"""The kernels' parameter structs, field by field as the device headers declare them.

``ctypes`` lays a structure out as the C++ compiler does; each generated kernel source asserts that every field of its
parameter is where it is here (:mod:`polyconv.plan.assertions`), under the same name. Pointers are zero here and filled
in per call (:class:`~polyconv.plan.plan.PointerSlot`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from dataclasses import replace
from typing import Any

from ..algebra.lattice import Phase
from ..problem import Extents, Strides
from ..select import PlanError
from .plan import PointerSlot

MAX_PHASES = 8
"""Phases per axis that fit into one launch (``kMaxPhases`` in common.cuh)."""
DIVIDEND_LIMIT = 2**31
"""FastDivisor is exact below this; so are flattened pixel numbers."""

pointer = c_uint64


def int32(value: int, what: str) -> int:
    """``value``, or an error that names it: the kernels hold it in 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise PlanError(f"{what} is {value}; polyconv's CUDA kernels take at most {2**31 - 1}")
    return value


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Params(ctypes.Structure):
    """A struct that takes no number which its field does not hold: ``ctypes`` alone would keep the lower bits.

    A field that the device divides by takes the number as well.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is int and isinstance(getattr(self, name), FastDivisor):
            value = FastDivisor.of(value)
        super().__setattr__(name, value)
        if type(value) is int and getattr(self, name) != value:
            raise PlanError(
                f"{name} of {type(self).__name__} is {value}: more than its field in the CUDA kernels holds"
            )

    def place(self, name: str, strides: Strides, what: str) -> None:
        """Fill in the strides of a tensor, whose fields begin with ``name``; in an error it is called ``what``."""
        every = (*strides[:2], *pixel_strides(strides, what))
        for axis, stride in zip(("batch", "channel", "row", "column"), every, strict=True):
            setattr(self, f"{name}_{axis}", stride)


def pixel_strides(strides: Strides, what: str) -> Extents:
    """From row to row and from column to column, which the kernels hold in 32 bits."""
    return int32(strides[2], f"the row stride of {what}"), int32(strides[3], f"the column stride of {what}")


class FastDivisor(Params):
    """Division by an invariant as one high multiplication and a shift, exact for dividends below 2^31."""

    _fields_ = [("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32)]

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        if divisor <= 1:
            return cls(1, 0, 0)
        power = 31 + (divisor - 1).bit_length()
        return cls(divisor, ((1 << power) + divisor - 1) // divisor, power - 32)


class AxisPhase(Params):
    _fields_ = [
        *_fields(c_int32, "written_first written_step read_first read_step taps tap_first tap_stride"),
        ("count", FastDivisor),
    ]

    @classmethod
    def of(cls, phase: Phase) -> AxisPhase:
        return cls(*(getattr(phase, field[0]) for field in cls._fields_))


class HaloShape(Params):
    _fields_ = [("height", c_int32), ("pitch", c_int32), ("width", FastDivisor)]

    @classmethod
    def of(cls, height: int, width: int) -> HaloShape:
        """Rows in shared memory have an odd length, so that strided readers meet few bank conflicts."""
        return cls(height, width | 1, width)

    @property
    def elements(self) -> int:
        return int(self.height * self.pitch)


class GatherParams(Params):
    _fields_ = [
        *_fields(pointer, "source packed table bias written"),
        *_fields(
            c_int64, "source_batch source_channel source_channel_bytes next_tap_bytes written_batch written_channel"
        ),
        ("packed_step_bytes", c_int64),
        *_fields(c_int32, "source_row source_column written_row written_column source_height source_width"),
        *_fields(c_int32, "batch channels outputs outputs_padded"),
        ("channel_tiles", FastDivisor),
        *_fields(c_int32, "packed_rows written_vector phases_w tap_step_h tap_step_w"),
        *_fields(c_int32, "border image_top image_left image_height image_width pad_top pad_bottom pad_left pad_right"),
        *_fields(FastDivisor, "stride_h stride_w"),
        ("first_row", c_int32 * (MAX_PHASES * MAX_PHASES)),
        *_fields(AxisPhase * MAX_PHASES, "phase_h phase_w"),
    ]


class PackParams(Params):
    _fields_ = [
        *_fields(pointer, "w packed table"),
        *_fields(c_int64, "w_group w_output w_channel w_row w_column table_channel"),
        *_fields(c_int32, "table_row table_column"),
        *_fields(c_int32, "channels outputs outputs_padded output_tiles packed_rows phases_w tap_step_h tap_step_w"),
        ("first_row", c_int32 * (MAX_PHASES * MAX_PHASES)),
        *_fields(AxisPhase * MAX_PHASES, "phase_h phase_w"),
    ]


class HalfGatherParams(GatherParams):
    """The same on tensors of float16."""


class BFloat16GatherParams(GatherParams):
    """The same on tensors of bfloat16."""


class HalfPackParams(PackParams):
    """The same on tensors of float16."""


class BFloat16PackParams(PackParams):
    """The same on tensors of bfloat16."""


class WgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int32, "x_row x_column dy_row dy_column height width"),
        *_fields(c_int32, "k channels columns columns_padded groups bias border"),
        *_fields(c_int32, "pixels pixels_per_slice"),
        *_fields(c_int32, "stride_h stride_w dilation_h dilation_w pad_top pad_left"),
        *_fields(FastDivisor, "k_tiles out_height out_width kernel_area kernel_width"),
    ]


class HalfWgradParams(WgradParams):
    """The same on tensors of float16."""


class BFloat16WgradParams(WgradParams):
    """The same on tensors of bfloat16."""


class ReduceParams(Params):
    _fields_ = [
        *_fields(pointer, "partial dw db"),
        *_fields(c_int64, "dw_k dw_channel dw_row dw_column elements"),
        *_fields(c_int32, "slices columns"),
        *_fields(FastDivisor, "columns_padded kernel_area kernel_width"),
    ]


class DepthwiseParams(Params):
    _fields_ = [
        *_fields(pointer, "source w bias written"),
        *_fields(c_int64, "source_batch source_channel written_batch written_channel"),
        *_fields(c_int64, "w_written w_source w_row w_column"),
        *_fields(c_int32, "source_row source_column written_row written_column source_height source_width"),
        *_fields(c_int32, "batch images_per_block sources border"),
        ("halo", HaloShape),
        *_fields(c_int32, "phases_w tap_step_h tap_step_w"),
        *_fields(FastDivisor, "multiplier tiles tiles_w"),
        *_fields(AxisPhase * MAX_PHASES, "phase_h phase_w"),
    ]


class DepthwiseWgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int32, "x_row x_column dy_row dy_column height width out_height out_width"),
        *_fields(c_int32, "channels taps columns_padded bias border jobs jobs_per_slice"),
        *_fields(c_int32, "stride_h stride_w dilation_h dilation_w pad_top pad_left"),
        ("halo", HaloShape),
        *_fields(FastDivisor, "multiplier kernel_width tiles tiles_w"),
    ]


class StripParams(Params):
    _fields_ = [
        *_fields(pointer, "source w bias written"),
        *_fields(c_int64, "source_batch source_channel written_batch written_channel"),
        *_fields(c_int64, "w_channel w_first w_row w_column"),
        *_fields(c_int32, "source_row source_column written_row written_column"),
        *_fields(c_int32, "source_height source_width written_height written_width"),
        *_fields(c_int32, "first_row first_column cell_row cell_column rows columns rows_per_strip"),
        ("strips", c_uint32),
        *_fields(FastDivisor, "column_strips row_strips channels multiplier"),
    ]


class StripWgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int32, "x_row x_column dy_row dy_column height width pad_top pad_left"),
        *_fields(c_int32, "channels columns_padded bias rows rows_per_strip"),
        *_fields(c_uint32, "strips strips_per_slice"),
        *_fields(FastDivisor, "column_strips row_strips multiplier"),
    ]


class EpilogueParams(Params):
    """What ``WithEpilogue`` of epilogue.cuh adds behind a kernel's own parameters."""

    _fields_ = [("residual", pointer), ("activation", c_int32)]


MAX_PARTS = 16
"""Classes of taps per axis, times segments along H, that fit into one launch (``kMaxParts`` in half_layout.cuh)."""


class SourcePart(Params):
    _fields_ = [("read_first", c_int32), ("read_end", c_int32)]


class TapPart(Params):
    _fields_ = [("taps", c_int32), ("tap_first", c_int32), ("tap_stride", c_int32)]


class TransformWeightsParams(Params):
    _fields_ = [
        *_fields(pointer, "w u"),
        *_fields(c_int64, "w_group w_output w_channel"),
        *_fields(c_int32, "w_row w_column channels channels_all chunks outputs k_tile k_tiles groups segments"),
        *_fields(FastDivisor, "source_channels classes_w"),
        *_fields(TapPart * MAX_PARTS, "tap_part_h tap_class_w"),
    ]


class HalfTransformParams(Params):
    _fields_ = [
        *_fields(pointer, "source x"),
        *_fields(c_int64, "source_batch source_channel"),
        *_fields(c_int32, "source_row source_column first_row"),
        ("items", c_uint32),
        *_fields(FastDivisor, "vectors pitch rows"),
        ("channels", c_int32),
        *_fields(FastDivisor, "channels_filled source_channels classes_w"),
        ("channels_all", c_int32),
        *_fields(FastDivisor, "tiles dilation_h dilation_w"),
        *_fields(c_int32, "read_step_h read_step_w outputs_w"),
        *_fields(SourcePart * MAX_PARTS, "part_h class_w"),
    ]


class HalfGemmParams(Params):
    _fields_ = [
        *_fields(pointer, "x u y"),
        ("tiles", c_int32),
        *_fields(FastDivisor, "k_tiles column_tiles row_columns"),
        *_fields(c_int32, "columns columns_filled row_stride group_stride channel_stride part_stride next"),
        *_fields(c_int32, "chunks segments outputs zero"),
    ]


class HalfInverseParams(Params):
    _fields_ = [
        *_fields(pointer, "y bias written"),
        *_fields(c_int64, "written_batch written_channel"),
        *_fields(c_int32, "written_row written_column first_row outputs lines stretch_columns"),
        *_fields(FastDivisor, "line_blocks stretches rows"),
        ("groups", c_int32),
        *_fields(FastDivisor, "vectors columns"),
        *_fields(c_int32, "row_columns columns_filled"),
        *_fields(FastDivisor, "tiles dilation_h dilation_w"),
        *_fields(c_int32, "outputs_w parts"),
        ("stretch", FastDivisor),
        *_fields(c_int32, "count_h count_w written_first_h written_step_h written_first_w written_step_w vector"),
    ]


class FusedAxis(Params):
    _fields_ = [
        *_fields(c_int32, "written_first written_step read_first read_step count"),
        *_fields(FastDivisor, "dilation tiles"),
    ]


class FusedParams(Params):
    _fields_ = [
        *_fields(pointer, "source weights bias written"),
        *_fields(c_int64, "source_batch source_channel written_batch written_channel"),
        *_fields(c_int64, "source_channel_bytes source_rewind_bytes patch_step_bytes"),
        *_fields(c_int64, "across_bytes down_bytes job_bytes"),
        *_fields(c_int32, "source_row source_column written_row written_column source_height source_width"),
        *_fields(c_int32, "channels channels_padded outputs k_tiles k_tiles_each pairs"),
        ("k_splits", FastDivisor),
        *_fields(FusedAxis, "h w"),
    ]


class FusedTensorParams(FusedParams):
    _fields_ = [("largest_filters", pointer), *_fields(c_int32, "headroom_sources headroom_filters")]


class FusedTaps(Params):
    _fields_ = _fields(c_int32, "taps tap_first tap_stride")


class FusedWeightsParams(Params):
    _fields_ = [
        *_fields(pointer, "w transformed"),
        *_fields(c_int64, "w_group w_output w_channel w_row w_column"),
        *_fields(c_int32, "channels outputs"),
        *_fields(FusedTaps, "h w_taps"),
    ]


class FusedTensorWeightsParams(FusedWeightsParams):
    _fields_ = [("largest", pointer), ("headroom", c_int32)]


TENSOR_CLASSES = 16
"""Residue classes of taps per axis of a launch on tensor cores (``kTensorClasses`` in tensor_layout.cuh)."""


class TensorMagnitudeParams(Params):
    _fields_ = [
        *_fields(pointer, "source largest"),
        *_fields(c_int64, "outer_stride inner_stride"),
        ("stride", c_int64 * 3),
        ("elements", c_uint32),
        ("inner_slots", FastDivisor),
        ("extent", FastDivisor * 2),
    ]


class TensorTaps(Params):
    _fields_ = _fields(c_int32, "taps tap_first tap_stride")


class TensorWeightsParams(Params):
    _fields_ = [
        *_fields(pointer, "w u largest"),
        *_fields(c_int64, "w_group w_output w_channel"),
        *_fields(c_int32, "w_row w_column headroom channels_all outputs taps_h shifts"),
        *_fields(FastDivisor, "chunks k_tiles source_channels classes_w"),
        *_fields(TensorTaps * TENSOR_CLASSES, "class_h class_w"),
    ]


class TensorSource(Params):
    _fields_ = _fields(c_int32, "read_first read_end")


class TensorTransformParams(Params):
    _fields_ = [
        *_fields(pointer, "source v largest"),
        *_fields(c_int64, "source_batch source_channel"),
        *_fields(c_int32, "source_row source_column headroom first_plane first_row"),
        ("positions", c_uint32),
        *_fields(c_int32, "groups channels_all chunks"),
        *_fields(FastDivisor, "pitch phases column_groups phase_groups planes dilation_h source_channels classes_w"),
        *_fields(c_int32, "units dilation_w read_step_h read_step_w"),
        *_fields(TensorSource * TENSOR_CLASSES, "class_h class_w"),
    ]


class TensorProductParams(Params):
    _fields_ = [
        *_fields(pointer, "v u largest_sources largest_filters bias written"),
        *_fields(c_int64, "written_batch written_channel"),
        *_fields(c_int32, "written_row written_column headroom_sources headroom_filters first_plane first_row tiles"),
        *_fields(FastDivisor, "k_tiles row_groups column_groups phase_groups dilation_h"),
        ("planes", c_int32),
        *_fields(FastDivisor, "columns phases stretch"),
        *_fields(c_int32, "rows units groups outputs chunks shifts taps pitch stage next_tap_row positions last_tap"),
        *_fields(c_int32, "dilation_w count_h count_w"),
        *_fields(c_int32, "written_first_h written_step_h written_first_w written_step_w"),
        *_fields(c_uint32, "blocks first_part"),
        ("behind", TensorMagnitudeParams),
    ]


MAX_CLASSES = 8
"""Residue classes of taps per axis of a fast weight gradient (``kMaxClasses`` in toom_wgrad.cuh)."""


class ToomWgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial bias_partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int64, "x_next_row dy_next_row x_next_channel dy_next_channel"),
        *_fields(c_int64 * MAX_CLASSES, "x_first_h x_first_w"),
        *_fields(c_int32 * MAX_CLASSES, "read_first_h read_first_w"),
        *_fields(c_int32, "x_row x_column dy_row dy_column read_step_h read_step_w height width count_h count_w"),
        *_fields(c_int32, "dilation_h dilation_w interleave channels outputs rows tiles slices flush"),
        *_fields(FastDivisor, "channel_tiles k_tiles groups outer_phases tiles_h phases_h interleaved"),
        *_fields(FastDivisor, "classes classes_w"),
    ]


class ToomWgradTensorParams(ToomWgradParams):
    _fields_ = [*_fields(pointer, "largest_dy largest_x"), *_fields(c_int32, "headroom_dy headroom_x")]


class ToomWgradSumParams(Params):
    _fields_ = [("partial", pointer), ("elements", c_int64), ("slices", c_int32)]


class ToomWgradFinishParams(Params):
    _fields_ = [
        *_fields(pointer, "partial bias_partial dw db"),
        *_fields(c_int64, "dw_k dw_channel"),
        *_fields(c_int32, "dw_row dw_column slices outputs all_outputs pairs"),
        *_fields(FastDivisor, "channels outputs_divisor tile_k tile_c"),
        *_fields(c_int32, "k_tiles channel_tiles"),
        *_fields(FastDivisor, "classes classes_w"),
        *_fields(c_int32 * MAX_CLASSES, "taps_h tap_first_h taps_w tap_first_w"),
        *_fields(c_int32, "tap_stride_h tap_stride_w"),
    ]


def set_phases(p: Params, h: tuple[Phase, ...], w: tuple[Phase, ...]) -> None:
    """Fill in the phases of one launch. Those of an axis all have the same step from tap to tap."""
    for i, phase in enumerate(h):
        p.phase_h[i] = AxisPhase.of(phase)
    for i, phase in enumerate(w):
        p.phase_w[i] = AxisPhase.of(phase)
    p.phases_w, p.tap_step_h, p.tap_step_w = len(w), h[0].tap_step, w[0].tap_step


def slots(struct: type[ctypes.Structure], **buffers: str | tuple[str, int] | None) -> tuple[PointerSlot, ...]:
    """Pointer fields of a struct and the buffer (with a byte offset) that each one points into; None: it stays null."""
    found = []
    for name, buffer in buffers.items():
        if buffer is not None:
            where, offset = buffer if isinstance(buffer, tuple) else (buffer, 0)
            found.append(PointerSlot(getattr(struct, name).offset, where, offset))
    return tuple(found)


def slots_within(
    struct: type[ctypes.Structure], name: str, of_field: tuple[PointerSlot, ...]
) -> tuple[PointerSlot, ...]:
    """The pointers of a struct that is a field of another."""
    start = getattr(struct, name).offset
    return tuple(replace(slot, offset=start + slot.offset) for slot in of_field)
