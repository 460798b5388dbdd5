// From the products to the output: inverse transforms, columns back in order, stores.
#if defined(POLYCONV_CPU_TILE_LANES_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_OUTPUT_INL_H_
#undef POLYCONV_CPU_TILE_LANES_OUTPUT_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_OUTPUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/row_writer-inl.h"
#include "common/simd-inl.h"
#include "common/transforms-inl.h"
#include "tile_lanes/products-inl.h"
#include "tile_lanes/tiling.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// `S` is ungrouped: kernels with and without groups share all but the inverse transform, a template of their scheme.
template <class S>
struct OutputStage {
  static constexpr int kRows = S::H::kM;
  static constexpr int kColumns = S::W::kM;
  static constexpr int kStreams = S::kUnitColumns;
  static constexpr int kBlockOutputs = kRows * kColumns;

  const Convolution& conv;
  const Tiling& tiling;
  int unit_pitch;                         // of `units`: [row][column of a unit][unit]
  int line_pitch;                         // of `lines`: [row][column]
  std::vector<std::int32_t> run_offsets;  // see FindRuns
  RowWriter writer;

  HWY_NOINLINE OutputStage(const Convolution& c, const Tiling& t, int lanes)
      : conv(c), tiling(t), writer(c, c.y_row * t.dilation_h) {
    unit_pitch = lanes + kLanes;
    line_pitch = lanes * kStreams + (kStreams + 1) * kLanes;
    if (t.dilation_w > 1) FindRuns();
  }

  // Number of output channels to write together.
  int ChannelsTogether() const { return writer.transposes() ? kLanes : 1; }

  template <class Grouped>
  std::size_t sums_size(int vectors) const {
    return Grouped::kGrouped ? static_cast<std::size_t>(vectors) * S::kBlocks * kBlockOutputs * kLanes : 0;
  }
  std::size_t units_size() const { return static_cast<std::size_t>(kRows) * kStreams * unit_pitch; }
  std::size_t lines_size() const { return static_cast<std::size_t>(kRows) * line_pitch; }

  // Inverse transform of one output channel, the k-th of its tile; `products` are those of the tile's channels.
  // Grouped: the shares of the groups are accumulated in `sums`, and the last group completes them into `units`.
  template <class Grouped>
  HWY_INLINE void Invert(int group, const float* products, int k, int vectors, float* sums, float bias,
                         float* units) const {
    using Layout = ProductLayout<Grouped>;
    for (int z = 0, width; z < vectors; z += width) {
      width = NextTile(vectors - z);
      const float* tile = products + z * Layout::kVectorSize;
      for (int i = 0; i < width; i++) {
        for (int block = 0; block < S::kBlocks; block++) {
          const float* source = tile + block * Layout::BlockPitch(width) + (k * width + i) * kLanes;
          float* target = units + block * kColumns * unit_pitch + (z + i) * kLanes;
          InvertVector<Grouped>(group, source, Layout::PointPitch(width), sums, bias, target);
          sums += kBlockOutputs * kLanes;
        }
      }
    }
  }

  // Writes the rows of all bands of a chunk for some neighbouring output channels, units_size() apart in `units`.
  HWY_NOINLINE void Write(const BandRange& bands, int first_channel, int channels, const float* units,
                          float* lines) const {
    const bool dense = tiling.dilation_w == 1 && kStreams > 1;
    for (int k = 0; k < channels && dense; k++) {
      ArrangeDense(units + k * units_size(), UnitsOf(tiling, bands), lines + k * lines_size());
    }
    for (int index = bands.begin; index < bands.end; index++) {
      const Band band = BandAt(tiling, bands, index);
      const int first_row = band.tile_row * kRows * tiling.dilation_h + band.phase;
      const int rows = std::min(kRows, CeilDiv(conv.out_height - first_row, tiling.dilation_h));
      const int begin = band.first_unit * kStreams;  // chunks start at whole tiles, with all their phases
      const int count = std::min(conv.out_width - begin, band.unit_count * kStreams);
      if (rows <= 0 || count <= 0) continue;
      float* target = conv.y + band.image * conv.y_batch + first_channel * conv.y_channel +
                      static_cast<std::ptrdiff_t>(first_row) * conv.y_row + begin * conv.y_column;
      if (kStreams == 1) {  // units are columns already
        writer.Write(target, units + band.first_lane, unit_pitch, units_size(), channels, rows, count);
      } else if (dense) {
        writer.Write(target, lines + band.first_lane * kStreams, line_pitch, lines_size(), channels, rows, count);
      } else {
        for (int k = 0; k < channels; k++) {
          ArrangeDilated(units + k * units_size() + band.first_lane, rows, count, lines + k * lines_size());
        }
        writer.Write(target, lines, line_pitch, lines_size(), channels, rows, count);
      }
    }
  }

 private:
  template <class Grouped>
  HWY_INLINE void InvertVector(int group, const float* source, std::size_t point_pitch, float* sums, float bias,
                               float* units) const {
    Floats rows[Grouped::kGroupRows][kColumns];
    POLYCONV_UNROLL
    for (int h = 0; h < Grouped::kGroupRows; h++) {
      Floats points[S::W::kPoints];
      POLYCONV_UNROLL
      for (int i = 0; i < S::W::kPoints; i++) {
        points[i] = hn::Load(kFloats, source + (h * S::W::kPoints + i) * point_pitch);
      }
      TransformOutput<typename S::W>(points, rows[h]);
    }
    const Floats offset = Broadcast(bias);
    if constexpr (!Grouped::kGrouped) {
      POLYCONV_UNROLL
      for (int j = 0; j < kColumns; j++) {
        Floats points[S::H::kPoints], out[kRows];
        POLYCONV_UNROLL
        for (int h = 0; h < S::H::kPoints; h++) points[h] = rows[h][j];
        TransformOutput<typename S::H>(points, out);
        POLYCONV_UNROLL
        for (int i = 0; i < kRows; i++) Store(units + (i * kStreams + j) * unit_pitch, hn::Add(out[i], offset));
      }
    } else if (group == Grouped::kGroups - 1) {  // the points 0 and infinity: first and last row only
      POLYCONV_UNROLL
      for (int j = 0; j < kColumns; j++) {
        POLYCONV_UNROLL
        for (int i = 0; i < kRows; i++) {
          Floats sum = hn::Add(hn::Load(kFloats, sums + (j * kRows + i) * kLanes), offset);
          if (i == 0) sum = hn::Add(sum, rows[0][j]);
          if (i == kRows - 1) sum = hn::Add(sum, rows[1][j]);
          Store(units + (i * kStreams + j) * unit_pitch, sum);
        }
      }
    } else {
      switch (group) {
        case 0:
          return AccumulateGroup<0>(rows, sums);
        case 1:
          return AccumulateGroup<1>(rows, sums);
        default:
          return AccumulateGroup<2>(rows, sums);
      }
    }
  }

  template <int kPair>
  static HWY_INLINE void AccumulateGroup(const Floats (&rows)[2][kColumns], float* sums) {
    if constexpr (2 * kPair + 2 < S::H::kPoints) {
      POLYCONV_UNROLL
      for (int j = 0; j < kColumns; j++) {
        AccumulatePair<typename S::H, kPair>(hn::Add(rows[0][j], rows[1][j]), hn::Sub(rows[0][j], rows[1][j]),
                                             sums + j * kRows * kLanes);
      }
    }
  }

  // With a dilation, `dilation_w` neighbouring columns come from one stream, and the next ones from the next stream.
  // The offset of a run is that of its columns in `units`, minus the lanes before it.
  void FindRuns() {
    const int d = tiling.dilation_w, runs = RunsPerVector(d);
    const int steps = CeilDiv(tiling.piece_units * kStreams, d) + runs;  // dense columns: one stream of one tile each
    run_offsets.resize(steps);
    for (int step = 0; step < steps; step++) {
      run_offsets[step] = step % kStreams * unit_pitch + step / kStreams * d - step % runs * d;
    }
  }

  // Arranges the columns of all bands in order: lines[row][column].
  HWY_INLINE void ArrangeDense(const float* units, int count, float* lines) const {
    for (int row = 0; row < kRows; row++) {
      const float* source = units + static_cast<std::size_t>(row) * kStreams * unit_pitch;
      for (int unit = 0; unit < count; unit += kLanes) {
        Floats streams[kStreams];
        POLYCONV_UNROLL
        for (int j = 0; j < kStreams; j++) streams[j] = Load(source + j * unit_pitch + unit);
        Interleave<kStreams>(streams, lines + row * line_pitch + unit * kStreams);
      }
    }
  }

  // Arranges the columns of one band with a dilation.
  HWY_INLINE void ArrangeDilated(const float* units, int rows, int count, float* lines) const {
    WithRuns(tiling.dilation_w, [&]<int kRuns>() HWY_ATTR { MergeRuns<kRuns>(units, rows, count, lines); });
  }

  template <int kRuns>
  HWY_NOINLINE void MergeRuns(const float* units, int rows, int count, float* lines) const {
    const int d = tiling.dilation_w;
    const RunMerger<kRuns> merger(d);
    for (int column = 0, lanes; column < count; column += lanes) {
      lanes = d > kLanes ? std::min(kLanes, d - column % d) : LanesInRuns(d);
      const std::int32_t* offsets = &run_offsets[column / d];
      const float* source = units + column % d;
      for (int row = 0; row < rows; row++, source += static_cast<std::size_t>(kStreams) * unit_pitch) {
        Store(lines + row * line_pitch + column, merger.Merge([&](int run) HWY_ATTR { return source + offsets[run]; }));
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
