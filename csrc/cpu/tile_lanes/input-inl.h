// From the image to the transformed input: transform along H, sort columns into units, transform along W.
#if defined(POLYCONV_CPU_TILE_LANES_INPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_INPUT_INL_H_
#undef POLYCONV_CPU_TILE_LANES_INPUT_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_INPUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/simd-inl.h"
#include "common/transforms-inl.h"
#include "tile_lanes/loader-inl.h"
#include "tile_lanes/segments.h"
#include "tile_lanes/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Transformed input: [point][block][slot][channel][lane]. A block is the lanes that the products take at a time: all of
// them if the chunk stays in the cache, otherwise those of a register tile, so that its input is contiguous. A single
// block is padded by a vector per channel: see Expand. Pitches are in floats.
struct TransformedLayout {
  int block_lanes, blocks;
  std::size_t channel, slot, block, point;

  TransformedLayout(int lanes_per_block, int block_count, int slots, int channels) {
    block_lanes = lanes_per_block;
    blocks = block_count;
    channel = static_cast<std::size_t>(block_lanes);
    // An odd number of vectors, against conflicts of channels in cache sets.
    if (blocks == 1) channel += block_lanes / kLanes % 2 == 0 ? kLanes : 2 * kLanes;
    slot = channel * channels;
    block = slot * slots;
    point = block * blocks + 16;
  }
};

// Layout of one input channel of one band. `S` is ungrouped: kernels with and without groups share all but Expand.
//
//   rows      H-transformed image rows with their padding, [H point][column]; only a few columns without a dilation
//   columns   the same, sorted: [H point][column of a unit][unit], one tile (dilation_w units) longer than the band,
//             because a tile's input extends into its right neighbour
template <class S>
struct InputStage {
  static constexpr int kPointsH = S::H::kPoints;
  static constexpr int kStreams = S::kUnitColumns;
  static constexpr int kSpan = S::kNested ? 2 * S::kUnitColumns : S::W::kPoints;  // input columns of a unit
  static constexpr bool kHalo = kSpan > kStreams;

  const Convolution& conv;
  const Tiling& tiling;
  const Taps taps;
  const bool loads;  // copy the rows of a band to dense memory first
  const RowLoader loader;
  int origin;                                // of image column 0 within a row
  int row_pitch;                             // floats between rows
  int column_pitch;                          // floats between streams of columns
  int loaded_pitch;                          // floats between loaded rows
  int halo;                                  // units of the neighbouring tile
  int side_by_side;                          // narrow bands that share a vector
  alignas(64) std::int32_t compact[kLanes];  // lanes of the units of such bands, without their halos

  HWY_NOINLINE InputStage(const Convolution& c, const Tiling& t)
      : conv(c),
        tiling(t),
        taps(c, S::kTapsH, S::kTapsW),
        loads(RowLoader::IsNeeded(c)),
        loader(c, taps, loads ? PlacesOf(t) : 0) {
    const int d = t.dilation_w;
    halo = HaloOf(t);
    origin = 0;
    int reached = PlacesOf(t);
    if (!loads) {
      int first = 0, last = 0;
      for (const TapSegment& segment : taps.w.segments) {
        first = std::min(first, segment.offset), last = std::max(last, segment.offset);
      }
      origin = RoundUp(-first, kLanes);
      reached = std::max(reached + last, c.in_width);
    }
    row_pitch = RoundUp(origin + reached, kLanes) + 2 * kLanes + 16;
    row_pitch = std::max(row_pitch, (kStreams + 1) * kLanes);  // the dense path's buffer shares this memory
    // Streams follow without a gap: with a whole vector per stream for the halo of a few units, a third of all cached
    // columns would be padding. Bands that share a vector fill it.
    const int count = t.piece_units + halo;
    column_pitch = std::max(count, kLanes);
    loaded_pitch = RoundUp(RoundUp(count, d) * kStreams, kStreams * kLanes) + kLanes;
    side_by_side =
        d == 1 && t.chunk_tiles % t.band_tiles == 0 && !S::kDirect ? std::max(1, kLanes / (t.units + halo)) : 1;
    for (int i = 0; i < kLanes; i++) compact[i] = std::min(i + i / t.units * halo, kLanes - 1);
  }

  int channels() const { return taps.channels(); }
  std::size_t rows_size() const { return static_cast<std::size_t>(kPointsH) * row_pitch + conv.in_width + kLanes; }
  // The last vector of the last stream may extend past the end.
  std::size_t columns_size() const {
    return RoundUp(kPointsH * kStreams * column_pitch, kLanes) + static_cast<std::size_t>(kLanes);
  }
  std::size_t loaded_size() const { return loads ? side_by_side * LoadedBandPitch() : 0; }

  // Once per thread and call: zeros for padding, and the zero row behind the others, for rows outside the image.
  void ClearRows(float* rows) const { std::memset(rows, 0, rows_size() * sizeof(float)); }

  // Channels from `channel` on that one call of LoadRows loads.
  int ChannelsTogether(int channel) const {
    return loads ? std::min(loader.ChannelsTogether(), taps.RunFrom(channel)) : 1;
  }

  // Loads rows of some channels for up to `side_by_side` bands, from their first unit:
  // loaded[band][channel][row][column].
  void LoadRows(const BandRange& bands, int channel, int count, float* loaded) const {
    const auto [image_channel, segment_h, segment_w] = taps.At(channel);
    for (int index = bands.begin; index < bands.end; index++, loaded += LoadedBandPitch()) {
      const Band band = BandAt(tiling, bands, index);
      const float* image = conv.x + band.image * conv.x_batch + image_channel * conv.x_channel;
      for (int i = 0; i < kPointsH; i++) {
        const int y = SourceIndex(conv.border, RowAt(band, segment_h, i), conv.in_height);
        loader.LoadRow(y < 0 ? nullptr : image + y * conv.x_row, segment_w, count, band.first_unit * kStreams,
                       LoadedColumns(band), loaded + i * loaded_pitch, LoadedChannelPitch());
      }
    }
  }

  // Transforms one channel of up to `side_by_side` bands along H, and sorts its columns. `loaded`: result of LoadRows,
  // in which this is channel number `place`; unused if the image is read in place.
  HWY_NOINLINE void Gather(const BandRange& bands, int channel, const float* loaded, int place, float* rows,
                           float* columns) const {
    const Band band = BandAt(tiling, bands, bands.begin);
    if (tiling.dilation_w > 1) {
      GatherDilated(band, RowsOf(band, channel, loaded, place, rows), rows, columns);
    } else if (band.unit_count + halo > kLanes) {
      GatherDense(band, RowsOf(band, channel, loaded, place, rows), rows, columns);
    } else {
      GatherNarrow(bands, channel, loaded, place, rows, columns);
    }
  }

  // Transforms one group of H points of a scheme along W and stores the bands' units to their lanes.
  template <class Grouped>
  HWY_INLINE void Expand(const BandRange& bands, int group, const float* columns, int channel,
                         const TransformedLayout& layout, float* transformed) const {
    const auto expand = [&](int unit, const auto& put) HWY_ATTR {
      for (int row = 0; row < Grouped::kGroupRows; row++) {
        const float* source =
            columns + static_cast<std::size_t>(Grouped::PointOfH(group, row)) * kStreams * column_pitch + unit;
        const std::size_t first_point = row * S::W::kPoints * layout.point;
        ExpandVector(source, layout, [&](std::size_t at, Floats v) HWY_ATTR { put(first_point + at, v); });
      }
    };
    const Band band = BandAt(tiling, bands, bands.begin);
    if (HWY_LIKELY(bands.count() == 1)) {
      PutUnits(band.unit_count, channel, band.first_lane, layout, transformed, expand);
      return;
    }
    const auto places = hn::SetTableIndices(kFloats, compact);
    PutUnits(band.unit_count * bands.count(), channel, band.first_lane, layout, transformed,
             [&](int unit, const auto& put) HWY_ATTR {
               expand(unit, [&](std::size_t at, Floats v) HWY_ATTR { put(at, hn::TableLookupLanes(v, places)); });
             });
  }

  // Gather and Expand in one step, if there is nothing to transform.
  HWY_INLINE void Copy(const Band& band, int channel, const float* loaded, int place, const float* rows,
                       const TransformedLayout& layout, float* transformed) const {
    constexpr int kChannelsAhead = 8;
    const Rows source = RowsOf(band, channel, loaded, place, rows);
#if HWY_TARGET == HWY_NEON
    // A vector is a quarter of a cache line: to place each one and to prefetch for it takes ten times as long as its copy.
    if (layout.blocks == 1) {
      constexpr int kLine = 4 * kLanes;
      const int first = band.first_unit + source.shift;
      const int inside = first < 0 ? 0 : std::min(band.unit_count, source.width - first);
      const float* from = source.at[0] + first;
      float* target = transformed + channel * layout.channel + band.first_lane;
      int unit = 0;
      for (; unit + kLine <= inside; unit += kLine) {
        __builtin_prefetch(from + unit + kChannelsAhead * conv.x_channel, 0, 2);
        POLYCONV_UNROLL
        for (int i = unit; i < unit + kLine; i += kLanes) Store(target + i, Load(from + i));
      }
      for (; unit < band.unit_count; unit += kLanes) Store(target + unit, ColumnsOf(source, 0, first + unit));
      return;
    }
#endif
    PutUnits(band.unit_count, channel, band.first_lane, layout, transformed, [&](int unit, const auto& put) HWY_ATTR {
      const int column = band.first_unit + unit + source.shift;
      put(0, ColumnsOf(source, 0, column));
      // A channel has too few lines for the hardware prefetcher: prefetch a later channel.
      __builtin_prefetch(source.at[0] + column + kChannelsAhead * conv.x_channel, 0, 2);
    });
  }

 private:
  // Rows of the image, with columns [0, width). Position u of the sub-image is column u + shift.
  struct Rows {
    const float* at[kPointsH];
    int width, shift;
  };

  static int HaloOf(const Tiling& t) { return kHalo ? t.dilation_w : 0; }

  // Positions of a sub-image that a row of tiles reads. Whole vectors of units are read, so tiles past the end are too.
  static int PlacesOf(const Tiling& t) {
    return (CeilDiv(t.units + HaloOf(t) + kLanes, t.dilation_w) + 1) * kStreams * t.dilation_w;
  }

  // Image row of row i of a band's tiles.
  int RowAt(const Band& band, int segment_h, int i) const {
    return taps.h.PixelAt(segment_h, (band.tile_row * S::H::kM + i) * tiling.dilation_h + band.phase);
  }

  std::size_t LoadedChannelPitch() const { return static_cast<std::size_t>(kPointsH) * loaded_pitch; }
  std::size_t LoadedBandPitch() const { return Taps::kChannelsAtATime * LoadedChannelPitch(); }
  int LoadedColumns(const Band& band) const {
    const int units = band.unit_count + halo, d = tiling.dilation_w;
    return d == 1 ? RoundUp(units, kLanes) * kStreams : RoundUp(units, d) * kStreams;
  }

  HWY_INLINE Rows RowsOf(const Band& band, int channel, const float* loaded, int place, const float* rows) const {
    Rows source;
    if (loads) {
      for (int i = 0; i < kPointsH; i++) source.at[i] = loaded + place * LoadedChannelPitch() + i * loaded_pitch;
      source.width = LoadedColumns(band);
      source.shift = -band.first_unit * kStreams;
      return source;
    }
    const auto [image_channel, segment_h, segment_w] = taps.At(channel);
    const float* image = conv.x + band.image * conv.x_batch + image_channel * conv.x_channel;
    const float* zeros = rows + static_cast<std::size_t>(kPointsH) * row_pitch;
    for (int i = 0; i < kPointsH; i++) {
      const int y = RowAt(band, segment_h, i);
      source.at[i] = y >= 0 && y < conv.in_height ? image + y * conv.x_row : zeros;
    }
    source.width = conv.in_width;
    source.shift = taps.w.segments[segment_w].offset;
    return source;
  }

  // Calls emit(unit, put) for each vector of units. put(at, v) stores to the units' lanes, `at` floats further.
  template <class Emit>
  HWY_INLINE void PutUnits(int unit_count, int channel, int first_lane, const TransformedLayout& layout,
                           float* transformed, const Emit& emit) const {
    transformed += channel * layout.channel;
    for (int unit = 0; unit < unit_count; unit += kLanes) {
      const int lane = first_lane + unit;
      const int block = lane / layout.block_lanes, position = lane % layout.block_lanes;
      // With several blocks, bands are transformed in any order, so a band must not touch its neighbours' lanes. In a
      // single block they are in order: what is written past the end of a band is overwritten by the next one.
      const int lanes = layout.blocks == 1 ? kLanes : std::min(kLanes, unit_count - unit);
      const int here = layout.blocks == 1 ? kLanes : std::min(lanes, layout.block_lanes - position);
      float* target = transformed + block * layout.block + position;
      if (HWY_LIKELY(here == kLanes)) {
        emit(unit, [&](std::size_t at, Floats v) HWY_ATTR { Store(target + at, v); });
        continue;
      }
      float* rest = target + layout.block - layout.block_lanes;  // the same lanes, relative to the next block
      emit(unit, [&](std::size_t at, Floats v) HWY_ATTR {
        StoreBetween(target + at, v, 0, here);
        if (here < lanes) StoreBetween(rest + at, v, here, lanes);
      });
    }
  }

  // One vector of columns of row i; lanes outside the image are zeros.
  HWY_INLINE Floats ColumnsOf(const Rows& source, int i, int column) const {
    if (HWY_LIKELY(column >= 0 && column + kLanes <= source.width)) return Load(source.at[i] + column);
    const int first = std::clamp(-column, 0, kLanes), last = std::clamp(source.width - column, first, kLanes);
    return LoadBetween(source.at[i] + column, first, last);
  }

  // Transform along H of one vector of columns.
  HWY_INLINE void TransformColumns(const Rows& source, int column, float* target, std::size_t pitch) const {
    Floats in[kPointsH], out[kPointsH];
    if (HWY_LIKELY(column >= 0 && column + kLanes <= source.width)) {
      POLYCONV_UNROLL
      for (int i = 0; i < kPointsH; i++) {
        in[i] = Load(source.at[i] + column);
        // Prefetch the next channel into L2: rows of a channel are too short for the hardware prefetcher.
        __builtin_prefetch(source.at[i] + column + conv.x_channel, 0, 2);
      }
    } else {
      POLYCONV_UNROLL
      for (int i = 0; i < kPointsH; i++) in[i] = ColumnsOf(source, i, column);
    }
    TransformInput<typename S::H>(in, out);
    POLYCONV_UNROLL
    for (int i = 0; i < kPointsH; i++) Store(target + i * pitch, out[i]);
  }

  // columns[h][j][unit] = H-transformed column (unit * kStreams + j), one vector of units at a time.
  HWY_INLINE void GatherDense(const Band& band, const Rows& source, float* buffer, float* columns) const {
    constexpr std::size_t kPitch = kStreams * kLanes;
    const int count = band.unit_count + halo;
    // The last vector first: what it writes past the end of a stream is overwritten by the first one of the next.
    for (int unit = (count - 1) / kLanes * kLanes; unit >= 0; unit -= kLanes) {
      const int first = (band.first_unit + unit) * kStreams + source.shift;
      const int width = std::min(kLanes, count - unit) * kStreams;
      for (int j = 0; j < width; j += kLanes) TransformColumns(source, first + j, buffer + j, kPitch);
      SortDense(buffer, kPitch, columns + unit);
    }
  }

  // GatherDense for bands that share a vector, each with its halo.
  HWY_INLINE void GatherNarrow(const BandRange& bands, int channel, const float* loaded, int place, float* buffer,
                               float* columns) const {
    constexpr std::size_t kPitch = (kStreams + 1) * kLanes;  // a band's last vector may extend past the end
    for (int index = bands.begin; index < bands.end; index++, loaded += LoadedBandPitch()) {
      const Band band = BandAt(tiling, bands, index);
      const Rows source = RowsOf(band, channel, loaded, place, buffer);
      const int first = band.first_unit * kStreams + source.shift, width = (band.unit_count + halo) * kStreams;
      float* target = buffer + (index - bands.begin) * width;
      for (int j = 0; j < width; j += kLanes) TransformColumns(source, first + j, target + j, kPitch);
    }
    SortDense(buffer, kPitch, columns);
  }

  HWY_INLINE void SortDense(const float* buffer, std::size_t pitch, float* columns) const {
    POLYCONV_UNROLL
    for (int h = 0; h < kPointsH; h++) {
      Floats streams[kStreams];
      Deinterleave<kStreams>(buffer + h * pitch, streams);
      float* target = columns + static_cast<std::size_t>(h) * kStreams * column_pitch;
      POLYCONV_UNROLL
      for (int j = 0; j < kStreams; j++) Store(target + j * column_pitch, streams[j]);
    }
  }

  // columns[h][j][unit] = rows[h][tile * kStreams * d + j * d + phase], unit = tile * d + phase
  HWY_INLINE void GatherDilated(const Band& band, const Rows& source, float* rows, float* columns) const {
    const int d = tiling.dilation_w, shift = source.shift;
    const int first_tile = band.first_unit / d, last_tile = CeilDiv(band.first_unit + band.unit_count + halo, d);
    const int begin = std::max(0, first_tile * kStreams * d + shift) / kLanes * kLanes;
    const int end = std::min(source.width, last_tile * kStreams * d + shift);
    for (int column = begin; column < end; column += kLanes) {
      TransformColumns(source, column, rows + origin + column, row_pitch);
    }
    const float* sorted = rows + origin + shift + first_tile * kStreams * d;
    WithRuns(d, [&]<int kRuns>() HWY_ATTR { SortDilated<kRuns>(band.unit_count + halo, sorted, columns); });
  }

  template <int kRuns>
  HWY_NOINLINE void SortDilated(int unit_count, const float* rows, float* columns) const {
    const int d = tiling.dilation_w;
    const std::ptrdiff_t jump = static_cast<std::ptrdiff_t>(kStreams - 1) * d;  // from one tile's run to the next
    const RunMerger<kRuns> merger(d);
    // Stream by stream: what is written past the end of one is overwritten by the next.
    for (int h = 0; h < kPointsH; h++) {
      for (int j = 0; j < kStreams; j++, columns += column_pitch) {
        const float* source = rows + h * row_pitch + j * d;
        // Vectors start at a whole tile, except within a tile that is longer than a vector.
        for (int unit = 0, lanes; unit < unit_count; unit += lanes) {
          lanes = d > kLanes ? std::min(kLanes, d - unit % d) : kRuns * d;
          const bool one_run = unit_count - unit <= d;  // true for the halo, if only it is left
          Store(columns + unit,
                one_run ? Load(source) : merger.Merge([&](int run) HWY_ATTR { return source + run * jump; }));
          source += lanes;
          if (d <= kLanes || (unit + lanes) % d == 0) source += kRuns * jump;
        }
      }
    }
  }

  // Input column i of the units at `columns`.
  HWY_INLINE Floats ColumnAt(const float* columns, int i) const {
    return Load(columns + i % kStreams * column_pitch + (i / kStreams) * tiling.dilation_w);
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
