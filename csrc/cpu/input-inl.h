// From the image to the transformed input: transform along H, sort columns into units, transform along W.
#if defined(POLYCONV_CPU_INPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_INPUT_INL_H_
#undef POLYCONV_CPU_INPUT_INL_H_
#else
#define POLYCONV_CPU_INPUT_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "simd-inl.h"
#include "tiling.h"
#include "transforms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// The transformed input: [point][block][slot][channel][lane]. A block is as many lanes as the products take at a time:
// all of them where the whole chunk stays in the cache, a register tile's where it does not, so that what a register
// tile reads is contiguous. A single block is padded by a vector per channel: see Expand. Pitches are in floats.
struct TransformedLayout {
  int block_lanes, blocks;
  std::size_t channel, slot, block, point;

  TransformedLayout(int lanes_per_block, int block_count, int slots, int channels) {
    block_lanes = lanes_per_block;
    blocks = block_count;
    channel = static_cast<std::size_t>(block_lanes) + (blocks == 1 ? kLanes : 0);
    slot = channel * channels;
    block = slot * slots;
    point = block * blocks + 16;
  }
};

// Where the pieces of one input channel of one band lie.
//
//   rows      H-transformed image rows with their padding, [H point][column]; only a few columns without a dilation
//   columns   the same, sorted: [H point][column of a unit][unit], one tile (dilation_w units) longer than the band,
//             because a tile's input reaches into its right neighbour
template <class S>
struct InputStage {
  static constexpr int kPointsH = S::H::kPoints;
  static constexpr int kStreams = S::kUnitColumns;
  static constexpr int kSpan = S::kNested ? 2 * S::kUnitColumns : S::W::kPoints;  // input columns of a unit
  static constexpr bool kHalo = kSpan > kStreams;

  const Convolution& conv;
  const Tiling& tiling;
  int origin;        // of image column 0 inside a row
  int row_pitch;     // floats between rows
  int column_pitch;  // floats between streams of columns
  int halo;          // units of the neighbouring tile

  InputStage(const Convolution& c, const Tiling& t) : conv(c), tiling(t) {
    halo = kHalo ? c.dilation_w : 0;
    origin = RoundUp(std::max(c.left, 0), kLanes);
    // Whole vectors of units are read, so tiles past the last one are touched, too. All of that holds zeros.
    const int tiles = CeilDiv(t.units + halo + kLanes, c.dilation_w) + 1;
    const int shift = (t.segments_w - 1) * S::kTapsW * c.dilation_w + std::max(-c.left, 0);
    const int reached = tiles * kStreams * c.dilation_w + shift;
    row_pitch = RoundUp(origin + std::max(c.in_width, reached), kLanes) + 2 * kLanes + 16;
    row_pitch = std::max(row_pitch, kStreams * kLanes);  // the dense path's buffer lies in the same place
    // Room for the last vector, wherever it starts: see SortDilated.
    const int count = t.part_units + halo;
    const int step = c.dilation_w == 1 || kStreams == 1 || c.dilation_w > kLanes ? kLanes : LanesInRuns(c.dilation_w);
    column_pitch = RoundUp((count - 1) / step * step + kLanes + (c.dilation_w > kLanes ? kLanes : 0), kLanes);
  }

  int channels() const { return conv.in_channels * tiling.segments_h * tiling.segments_w; }
  std::size_t rows_size() const { return static_cast<std::size_t>(kPointsH) * row_pitch + conv.in_width + kLanes; }
  std::size_t columns_size() const { return static_cast<std::size_t>(kPointsH) * kStreams * column_pitch; }

  // Once per thread and call: what GatherDilated does not write is padding. The zero row, behind the others, stands for
  // rows outside the image.
  void ClearRows(float* rows) const { std::memset(rows, 0, rows_size() * sizeof(float)); }

  // Long kernels are cut into segments; each segment of each channel counts as a channel of its own.
  HWY_INLINE void Gather(const Band& band, int channel, float* rows, float* columns) const {
    const int segment = channel / conv.in_channels;
    const int segment_h = segment / tiling.segments_w, segment_w = segment % tiling.segments_w;
    const float* image = conv.x + band.image * conv.x_batch + channel % conv.in_channels * conv.x_channel;
    const int first_row = (band.tile_row * S::H::kM + segment_h * S::kTapsH) * conv.dilation_h + band.phase - conv.top;
    const int shift = segment_w * S::kTapsW * conv.dilation_w - conv.left;
    const float* zeros = rows + static_cast<std::size_t>(kPointsH) * row_pitch;
    const float* source[kPointsH];
    for (int i = 0; i < kPointsH; i++) {
      const int y = first_row + i * conv.dilation_h;
      source[i] = y >= 0 && y < conv.in_height ? image + y * conv.x_row : zeros;
    }
    if (conv.dilation_w == 1 || kStreams == 1) {  // with one column per unit, units are columns whatever the dilation
      GatherDense(band, source, shift, rows, columns);
    } else {
      GatherDilated(band, source, shift, rows, columns);
    }
  }

  // Transforms one group of H points along W and puts the band's units from `first_lane` on.
  HWY_INLINE void Expand(const Band& band, int group, const float* columns, int channel, int first_lane,
                         const TransformedLayout& layout, float* transformed) const {
    transformed += channel * layout.channel;
    for (int unit = 0; unit < band.unit_count; unit += kLanes) {
      const int lane = first_lane + unit;
      const int block = lane / layout.block_lanes, position = lane % layout.block_lanes;
      // With several blocks, bands are transformed in any order and a band must not touch its neighbours' lanes. In a
      // single block they come in order: what is written past the end of a band is overwritten by the next one.
      const int lanes = layout.blocks == 1 ? kLanes : std::min(kLanes, band.unit_count - unit);
      const int here = layout.blocks == 1 ? kLanes : std::min(lanes, layout.block_lanes - position);
      float* target = transformed + block * layout.block + position;
      for (int row = 0; row < S::kGroupRows; row++, target += S::W::kPoints * layout.point) {
        const float* source =
            columns + static_cast<std::size_t>(S::PointOfH(group, row)) * kStreams * column_pitch + unit;
        if (HWY_LIKELY(here == kLanes)) {
          ExpandVector(source, layout, [&](std::size_t at, Floats v) HWY_ATTR { Store(target + at, v); });
          continue;
        }
        float* rest = target + layout.block - layout.block_lanes;  // the same lanes, counted from the next block
        ExpandVector(source, layout, [&](std::size_t at, Floats v) HWY_ATTR {
          StoreBetween(target + at, v, 0, here);
          if (here < lanes) StoreBetween(rest + at, v, here, lanes);
        });
      }
    }
  }

 private:
  // The transform along H of one vector of columns; lanes outside the image are zeros.
  HWY_INLINE void TransformColumns(const float* const* source, int column, float* target, std::size_t pitch) const {
    Floats in[kPointsH], out[kPointsH];
    if (HWY_LIKELY(column >= 0 && column + kLanes <= conv.in_width)) {
      POLYCONV_UNROLL
      for (int i = 0; i < kPointsH; i++) {
        in[i] = Load(source[i] + column);
        // The same place in the next channel, into L2: rows of a channel are too short for the hardware to get going.
        __builtin_prefetch(source[i] + column + conv.x_channel, 0, 2);
      }
    } else {
      const int first = std::clamp(-column, 0, kLanes), last = std::clamp(conv.in_width - column, first, kLanes);
      POLYCONV_UNROLL
      for (int i = 0; i < kPointsH; i++) in[i] = LoadBetween(source[i] + column, first, last);
    }
    TransformInput<typename S::H>(in, out);
    POLYCONV_UNROLL
    for (int i = 0; i < kPointsH; i++) Store(target + i * pitch, out[i]);
  }

  // columns[h][j][unit] = H-transformed column (unit * kStreams + j), one vector of units at a time.
  HWY_INLINE void GatherDense(const Band& band, const float* const* source, int shift, float* buffer,
                              float* columns) const {
    constexpr std::size_t kPitch = kStreams * kLanes;
    for (int unit = 0; unit < band.unit_count + halo; unit += kLanes) {
      const int first = (band.first_unit + unit) * kStreams + shift;
      for (int j = 0; j < kStreams; j++) TransformColumns(source, first + j * kLanes, buffer + j * kLanes, kPitch);
      POLYCONV_UNROLL
      for (int h = 0; h < kPointsH; h++) {
        Floats streams[kStreams];
        Deinterleave<kStreams>(buffer + h * kPitch, streams);
        float* target = columns + static_cast<std::size_t>(h) * kStreams * column_pitch + unit;
        POLYCONV_UNROLL
        for (int j = 0; j < kStreams; j++) Store(target + j * column_pitch, streams[j]);
      }
    }
  }

  // columns[h][j][unit] = rows[h][tile * kStreams * d + j * d + phase], unit = tile * d + phase
  HWY_INLINE void GatherDilated(const Band& band, const float* const* source, int shift, float* rows,
                                float* columns) const {
    const int d = conv.dilation_w;
    const int first_tile = band.first_unit / d, last_tile = CeilDiv(band.first_unit + band.unit_count + halo, d);
    const int begin = std::max(0, first_tile * kStreams * d + shift) / kLanes * kLanes;
    const int end = std::min(conv.in_width, last_tile * kStreams * d + shift);
    for (int column = begin; column < end; column += kLanes) {
      TransformColumns(source, column, rows + origin + column, row_pitch);
    }
    const float* sorted = rows + origin + shift + first_tile * kStreams * d;
    WithRuns(d, [&]<int kRuns>() HWY_ATTR { SortDilated<kRuns>(band.unit_count + halo, sorted, columns); });
  }

  template <int kRuns>
  HWY_NOINLINE void SortDilated(int unit_count, const float* rows, float* columns) const {
    const int d = conv.dilation_w;
    const std::ptrdiff_t jump = static_cast<std::ptrdiff_t>(kStreams - 1) * d;  // from one tile's run to the next one's
    const RunMerger<kRuns> merger(d);
    // Vectors start at a whole tile, except inside a tile that is longer than a vector.
    for (int unit = 0, lanes; unit < unit_count; unit += lanes) {
      lanes = d > kLanes ? std::min(kLanes, d - unit % d) : LanesInRuns(d);
      const float* source = rows + unit + unit / d * jump;
      float* target = columns + unit;
      for (int h = 0; h < kPointsH; h++) {
        for (int j = 0; j < kStreams; j++) {
          const float* at = source + h * row_pitch + j * d;
          Store(target + (h * kStreams + j) * column_pitch,
                merger.Merge([&](int run) HWY_ATTR { return at + run * jump; }));
        }
      }
    }
  }

  // Input column i of the units at `columns`.
  HWY_INLINE Floats ColumnAt(const float* columns, int i) const {
    return Load(columns + i % kStreams * column_pitch + (i / kStreams) * conv.dilation_w);
  }

  HWY_INLINE void TransformAt(const float* columns, int first, Floats* out) const {
    Floats in[S::W::kPoints];
    POLYCONV_UNROLL
    for (int i = 0; i < S::W::kPoints; i++) in[i] = ColumnAt(columns, first + i);
    TransformInput<typename S::W>(in, out);
  }

  template <class Put>
  HWY_INLINE void ExpandVector(const float* columns, const TransformedLayout& layout, const Put& put) const {
    constexpr int n = S::W::kPoints;
    Floats middle[n];
    if constexpr (!S::kNested) {
      TransformAt(columns, 0, middle);
      POLYCONV_UNROLL
      for (int i = 0; i < n; i++) put(i * layout.point, middle[i]);
    } else {
      // F(2, 2) over blocks x0, x1, x2 of the input: the products take x1, x0 - x1 and x2 - x1.
      TransformAt(columns, S::W::kM, middle);
      POLYCONV_UNROLL
      for (int i = 0; i < n; i++) put(i * layout.point, middle[i]);
      Floats side[n];
      TransformAt(columns, 0, side);
      POLYCONV_UNROLL
      for (int i = 0; i < n; i++) put(i * layout.point + layout.slot, hn::Sub(side[i], middle[i]));
      TransformAt(columns, 2 * S::W::kM, side);
      POLYCONV_UNROLL
      for (int i = 0; i < n; i++) put(i * layout.point + 2 * layout.slot, hn::Sub(side[i], middle[i]));
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
