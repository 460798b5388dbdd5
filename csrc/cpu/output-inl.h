// From the products to the output: inverse transforms, columns back in order, rows into memory.
#if defined(POLYCONV_CPU_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_OUTPUT_INL_H_
#undef POLYCONV_CPU_OUTPUT_INL_H_
#else
#define POLYCONV_CPU_OUTPUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "products-inl.h"
#include "simd-inl.h"
#include "tiling.h"
#include "transforms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

template <class S>
struct OutputStage {
  using Layout = ProductLayout<S>;
  static constexpr int kRows = S::H::kM;
  static constexpr int kColumns = S::W::kM;
  static constexpr int kStreams = S::kUnitColumns;
  static constexpr int kBlockOutputs = kRows * kColumns;

  const Convolution& conv;
  const Tiling& tiling;
  int unit_pitch;                         // of `units`: [row][column of a unit][unit]
  int line_pitch;                         // of `lines`: [row][column]
  bool stream;                            // past the caches: the output is too large to be found there again
  std::vector<std::int32_t> run_offsets;  // see FindRuns

  OutputStage(const Convolution& c, const Tiling& t, int lanes) : conv(c), tiling(t) {
    unit_pitch = lanes + kLanes;
    line_pitch = RoundUp(t.part_units * kStreams, kLanes) + (kStreams + 1) * kLanes;
    const double bytes = 4.0 * c.batch * c.out_channels * c.out_height * c.out_width;
    stream = bytes > (8 << 20);
    if (c.dilation_w > 1 && kStreams > 1) FindRuns();
  }

  std::size_t sums_size(int vectors) const {
    return S::kGrouped ? static_cast<std::size_t>(vectors) * S::kBlocks * kBlockOutputs * kLanes : 0;
  }
  std::size_t units_size() const { return static_cast<std::size_t>(kRows) * kStreams * unit_pitch; }
  std::size_t lines_size() const { return static_cast<std::size_t>(kRows) * line_pitch; }

  // Inverse transforms of one output channel, the k-th of its tile: `products` are those of the tile's channels.
  // Grouped, the shares of the groups are collected in `sums`; the last group completes them into `units`.
  HWY_INLINE void Invert(int group, const float* products, int k, int vectors, float* sums, float bias,
                         float* units) const {
    for (int z = 0, width; z < vectors; z += width) {
      width = NextTile(vectors - z);
      const float* tile = products + z * Layout::kVectorSize;
      for (int i = 0; i < width; i++) {
        for (int block = 0; block < S::kBlocks; block++) {
          const float* source = tile + block * Layout::BlockPitch(width) + (k * width + i) * kLanes;
          float* target = units + block * kColumns * unit_pitch + (z + i) * kLanes;
          InvertVector(group, source, Layout::PointPitch(width), sums, bias, target);
          sums += kBlockOutputs * kLanes;
        }
      }
    }
  }

  // Writes the rows of one band of one output channel. `units` points at the band's first unit.
  HWY_INLINE void Write(const Band& band, int channel, const float* units, float* lines) const {
    const int d = conv.dilation_w;
    const int first_row = band.tile_row * kRows * conv.dilation_h + band.phase;
    const int rows = std::min(kRows, CeilDiv(conv.out_height - first_row, conv.dilation_h));
    const int begin = band.first_unit * kStreams;  // parts start at whole tiles, all phases of them
    const int count = std::min(conv.out_width - begin, band.unit_count * kStreams);
    if (rows <= 0 || count <= 0) return;
    float* target = conv.y + band.image * conv.y_batch + channel * conv.y_channel +
                    static_cast<std::ptrdiff_t>(first_row) * conv.y_row + begin;
    const std::ptrdiff_t row_pitch = conv.y_row * conv.dilation_h;
    if (d == 1 || kStreams == 1) {
      for (int row = 0; row < rows; row++) {
        const float* source = units + static_cast<std::size_t>(row) * kStreams * unit_pitch;
        for (int unit = 0; unit * kStreams < count; unit += kLanes) {
          Floats streams[kStreams];
          POLYCONV_UNROLL
          for (int j = 0; j < kStreams; j++) streams[j] = Load(source + j * unit_pitch + unit);
          Interleave<kStreams>(streams, lines + row * line_pitch + unit * kStreams);
        }
      }
    } else {
      WithRuns(d, [&]<int kRuns>() HWY_ATTR { MergeRuns<kRuns>(units, rows, count, lines); });
    }
    for (int row = 0; row < rows; row++) WriteLine(target + row * row_pitch, lines + row * line_pitch, count);
  }

 private:
  HWY_INLINE void InvertVector(int group, const float* source, std::size_t point_pitch, float* sums, float bias,
                               float* units) const {
    Floats rows[S::kGroupRows][kColumns];
    POLYCONV_UNROLL
    for (int h = 0; h < S::kGroupRows; h++) {
      Floats points[S::W::kPoints];
      POLYCONV_UNROLL
      for (int i = 0; i < S::W::kPoints; i++) {
        points[i] = hn::Load(kFloats, source + (h * S::W::kPoints + i) * point_pitch);
      }
      TransformOutput<typename S::W>(points, rows[h]);
    }
    const Floats offset = Broadcast(bias);
    if constexpr (!S::kGrouped) {
      POLYCONV_UNROLL
      for (int j = 0; j < kColumns; j++) {
        Floats points[S::H::kPoints], out[kRows];
        POLYCONV_UNROLL
        for (int h = 0; h < S::H::kPoints; h++) points[h] = rows[h][j];
        TransformOutput<typename S::H>(points, out);
        POLYCONV_UNROLL
        for (int i = 0; i < kRows; i++) Store(units + (i * kStreams + j) * unit_pitch, hn::Add(out[i], offset));
      }
    } else if (group == S::kGroups - 1) {  // the points 0 and infinity: they touch the first and the last row
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
  static HWY_INLINE void AccumulateGroup(const Floats (&rows)[S::kGroupRows][kColumns], float* sums) {
    if constexpr (2 * kPair + 2 < S::H::kPoints) {
      POLYCONV_UNROLL
      for (int j = 0; j < kColumns; j++) {
        AccumulatePair<typename S::H, kPair>(hn::Add(rows[0][j], rows[1][j]), hn::Sub(rows[0][j], rows[1][j]),
                                             sums + j * kRows * kLanes);
      }
    }
  }

  // With a dilation, columns p, p + 1, ... come from one stream for `dilation_w` columns and then from the next one. The
  // offset of a run is where its columns lie in `units`, less the lanes before it.
  void FindRuns() {
    const int d = conv.dilation_w, runs = RunsPerVector(d);
    const int steps = CeilDiv(tiling.part_units * kStreams, d) + runs;  // dense columns: one stream of one tile each
    run_offsets.resize(steps);
    for (int step = 0; step < steps; step++) {
      run_offsets[step] = step % kStreams * unit_pitch + step / kStreams * d - step % runs * d;
    }
  }

  template <int kRuns>
  HWY_NOINLINE void MergeRuns(const float* units, int rows, int count, float* lines) const {
    const int d = conv.dilation_w;
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

  HWY_INLINE void WriteLine(float* target, const float* line, int count) const {
    const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(target) / sizeof(float) % kLanes);
    int i = misaligned == 0 ? 0 : std::min(kLanes - misaligned, count);
    if (i > 0) StoreBetween(target, Load(line), 0, i);
    if (stream) {
      for (; i + kLanes <= count; i += kLanes) hn::Stream(Load(line + i), kFloats, target + i);
    } else {
      for (; i + kLanes <= count; i += kLanes) StoreAligned(target + i, Load(line + i));
    }
    if (i < count) StoreBetween(target + i, Load(line + i), 0, count - i);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
