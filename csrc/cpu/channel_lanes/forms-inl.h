// Forms of the forward pass with channels in the lanes: how direct summation and Cook-Toom load units, transform weights and
// finish sums. And the register tile that sums both.
//
// A unit is a pixel (direct summation) or a tile (Cook-Toom). A register tile is some units x some vectors of output
// channels, summed over the input channels and, without a transform, over the taps.
#if defined(POLYCONV_CPU_CHANNEL_LANES_FORMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_FORMS_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_FORMS_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_FORMS_INL_H_
#endif

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "channel_lanes/grid.h"
#include "channel_lanes/pack-inl.h"
#include "channel_lanes/panels-inl.h"
#include "channel_lanes/products-inl.h"
#include "channel_lanes/transform-inl.h"
#include "common/stages.h"
#include "common/weight_reader-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Most units of a register tile by its number of vectors of output channels: as many as registers allow, beside the
// weights and one broadcast factor. Listed units, each with an offset in a register: as in the weight gradient.
// Adjacent units: wide tiles load least per multiply-add. NEON has a vector of factors per unit.
#if HWY_TARGET == HWY_NEON
inline constexpr int kListedUnits[] = {0, 14, 9, 7};
#else
inline constexpr int kListedUnits[] = {0, kSumRows, kSumRows, kSumRows};
#endif
#if HWY_TARGET == HWY_NEON
inline constexpr int kAdjacentUnits[] = {0, 14, 9, 7, 5};
#elif HWY_TARGET <= HWY_AVX3
inline constexpr int kAdjacentUnits[] = {0, 16, 14, 9, 6};
#else
inline constexpr int kAdjacentUnits[] = {0, 12, 6, 4};
#endif
template <bool kListed>
inline constexpr const auto& kTileUnits = kAdjacentUnits;
template <>
inline constexpr const auto& kTileUnits<true> = kListedUnits;
template <bool kListed>
inline constexpr int kTileVectors = std::size(kTileUnits<kListed>) - 1;

// Most terms (input channels times taps) that a register tile sums at a time, and the size of a register tile's weights
// for them [bytes]: a chunk's units reuse them from L1.
inline constexpr int kMostTerms = 144;
inline constexpr int kWeightsInL1 = 16 << 10;

// Transformed weights that stay in L2 beside the units [bytes].
inline constexpr std::size_t kWeightsInCache = 384 << 10;

// Number of input channels summed at a time, a multiple of a vector, so that their weights fit into `cache` bytes. `bytes`
// is the size of one channel's weights.
constexpr int TermsWithin(std::size_t cache, std::size_t bytes) {
  return std::min<int>(kMostTerms, cache / bytes) / kLanes * kLanes;
}
static_assert(kMostTerms % kLanes == 0);

// Operands of a register tile. Offsets and pitches are in floats.
struct UnitProducts {
  const float* x;               // vectors of input channels
  const std::ptrdiff_t* units;  // offset of each listed unit; adjacent units are neighbouring vectors
  const std::ptrdiff_t* taps;   // offset of each tap
  int tap_count;
  int channels;
  std::size_t vector_pitch;  // between vectors of input channels
  const float* weights;      // [tap][channel][vector][lane]
  const float* ahead;        // weights of the next tile: one vector is prefetched per term
  int more_ahead;            // vectors prefetched in addition, per vector of input channels
};

// target[vector][unit][lane] = or += the sum over taps and channels.
template <int kUnits, int kVectors, bool kListed>
HWY_NOINLINE void SumChannels(const UnitProducts& op, float* target, std::size_t target_pitch, bool accumulate) {
  Floats sum[kUnits][kVectors];
  std::ptrdiff_t unit[kUnits];
  POLYCONV_UNROLL
  for (int u = 0; u < kUnits; u++) {
    unit[u] = kListed ? op.units[u] : u * kLanes;
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      sum[u][v] = hn::Zero(kFloats);
      hwy::Prefetch(target + v * target_pitch + u * kLanes);  // needed at the end
    }
  }
  const float* HWY_RESTRICT weights = op.weights;
  const float* ahead = op.ahead;
  for (int tap = 0; tap < op.tap_count; tap++) {
    const float* x = op.x + op.taps[tap];
#if HWY_TARGET == HWY_NEON
    const int more = op.more_ahead * kLanes;
    for (int whole = op.channels / kLanes; whole > 0; whole--, x += op.vector_pitch) {
      for (const int line : {0, more / 2, more}) hwy::Prefetch(ahead + line);
      Floats factors[kUnits];
      POLYCONV_UNROLL
      for (int u = 0; u < kUnits; u++) factors[u] = Load(x + unit[u]);
      AddTerms(factors, weights, sum);
      weights += kLanes * kVectors * kLanes, ahead += kLanes * kLanes + more;
    }
    for (int left = op.channels % kLanes; left > 0; left = 0) {
#else
    for (int left = op.channels; left > 0; left -= kLanes, x += op.vector_pitch) {
#endif
      const int lanes = std::min(left, kLanes);
      for (int i = 0; i < op.more_ahead; i++, ahead += kLanes) hwy::Prefetch(ahead);
      for (int lane = 0; lane < lanes; lane++, weights += kVectors * kLanes, ahead += kLanes) {
        hwy::Prefetch(ahead);
        Floats w[kVectors];
        POLYCONV_UNROLL
        for (int v = 0; v < kVectors; v++) w[v] = Load(weights + v * kLanes);
        POLYCONV_UNROLL
        for (int u = 0; u < kUnits; u++) {
          const Floats factor = Broadcast(x[unit[u] + lane]);
          POLYCONV_UNROLL
          for (int v = 0; v < kVectors; v++) sum[u][v] = hn::MulAdd(factor, w[v], sum[u][v]);
        }
      }
    }
  }
  POLYCONV_UNROLL
  for (int u = 0; u < kUnits; u++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* place = target + v * target_pitch + u * kLanes;
      StoreAligned(place, accumulate ? hn::Add(sum[u][v], hn::Load(kFloats, place)) : sum[u][v]);
    }
  }
}

using SumKernel = void (*)(const UnitProducts& op, float* target, std::size_t target_pitch, bool accumulate);

// Compiled for every number of units, so that the last units of a chunk are not padded.
template <bool kListed, int kVectors, int... kUnits>
SumKernel SumKernelAmong(int units, std::integer_sequence<int, kUnits...>) {
  static constexpr SumKernel kKernels[] = {&SumChannels<kUnits + 1, kVectors, kListed>...};
  return kKernels[units - 1];
}

template <bool kListed, int kVectors = kTileVectors<kListed>>
SumKernel SumKernelFor(int units, int vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return SumKernelFor<kListed, kVectors - 1>(units, vectors);
  }
  return SumKernelAmong<kListed, kVectors>(units, std::make_integer_sequence<int, kTileUnits<kListed>[kVectors]>());
}

// Weights of all matrices: [matrix][tile of output vectors][tap][channel][vector][lane].
struct ForwardWeights {
  int matrices, taps, channels, vectors;
  std::vector<int> starts;  // first vector of each tile, and the end

  ForwardWeights(const Convolution& conv, int matrix_count, int tap_count, int widest)
      : matrices(matrix_count),
        taps(tap_count),
        channels(conv.in_channels),
        vectors(CeilDiv(conv.out_channels, kLanes)) {
    for (int v = 0; v < vectors; v += NextVectors(vectors - v, widest)) starts.push_back(v);
    starts.push_back(vectors);
  }

  int tiles() const { return static_cast<int>(starts.size()) - 1; }
  int Width(int tile) const { return starts[tile + 1] - starts[tile]; }
  std::size_t tile_row() const { return static_cast<std::size_t>(taps) * channels * kLanes; }  // per vector
  std::size_t matrix_size() const { return tile_row() * vectors; }
  std::size_t size() const { return matrix_size() * matrices; }

  // Offset of one vector within its matrix.
  std::size_t Offset(int first_vector, int width, int vector, int tap, int channel) const {
    return first_vector * tile_row() +
           ((static_cast<std::size_t>(tap) * channels + channel) * width + vector - first_vector) * kLanes;
  }
};

// Weights are transformed in double, half a vector at a time.
inline constexpr hn::ScalableTag<double> kWeightDoubles{};
inline constexpr int kWeightLanes = hn::MaxLanes(kWeightDoubles);
using WeightDoubles = hn::Vec<hn::ScalableTag<double>>;
static_assert(kLanes == 2 * kWeightLanes);

// Direct summation over all taps: units are packed pixels.
class DirectForward {
 public:
  static constexpr int kMatrices = 1;
  static constexpr bool kListed = true;
  static constexpr int kTerms = kMostTerms;
  static constexpr int kFreshTerms = 0;  // no weights are transformed on the fly
  static constexpr int kBlockTiles = 2;
  static bool Serves(const Convolution&) { return true; }

  DirectForward(const Convolution& conv, int units, int threads)
      : conv_(conv), panels_(conv, TileShape{1, 1, conv.taps_h, conv.taps_w, false}, units, threads) {
    for (int r = 0; r < conv.taps_h; r++) {
      for (int s = 0; s < conv.taps_w; s++) {
        taps_.push_back(r * static_cast<std::ptrdiff_t>(panels_.x_row()) +
                        static_cast<std::ptrdiff_t>(s) * conv.dilation_w * kLanes);
      }
    }
  }

  static ForwardWeights Weights(const Convolution& conv) {
    return {conv, 1, conv.taps_h * conv.taps_w, kTileVectors<kListed>};
  }

  static bool TakesPlainWeights(const Convolution&) { return false; }

  static WeightReader Reader(const Convolution& conv) {
    return {conv, conv.w, {0, conv.taps_h, 1}, {0, conv.taps_w, 1}, conv.taps_w};
  }

  // Copies the weights of a tile into the layout of ForwardWeights.
  static void PutWeights(const WeightReader& reader, const ForwardWeights& weights, int first, int width,
                         float* target) {
    for (int v = first; v < first + width; v++) {
      reader.Read(v * kLanes, 0, weights.channels, [&](int channel, int tap, Floats w) {
        Store(target + weights.Offset(first, width, v, tap, channel), w);
      });
    }
  }

  const PanelGrid& grid() const { return panels_.grid(); }
  int x_vectors() const { return panels_.x_vectors(); }
  const std::vector<std::ptrdiff_t>& taps() const { return taps_; }
  std::size_t packed_size() const { return panels_.chunk_size(); }
  std::size_t expanded_size() const { return 0; }
  std::size_t matrix_pitch() const { return 0; }
  std::size_t vector_pitch() const { return panels_.x_vector(); }
  std::size_t work_size() const { return 0; }
  std::size_t outputs_size() const { return 0; }

  void ListUnits(int chunk, std::vector<std::ptrdiff_t>* units) const {
    grid().ForPanels(chunk, [&](const Panel& panel, int number) {
      const std::ptrdiff_t first = number * static_cast<std::ptrdiff_t>(panels_.panel_size());
      for (int i = 0; i < panel.rows; i++) {
        const std::ptrdiff_t row = first + i * grid().row_stride() * static_cast<std::ptrdiff_t>(panels_.x_row());
        for (int j = 0; j < panel.columns; j++) {
          units->push_back(row + static_cast<std::ptrdiff_t>(j) * conv_.stride_w * kLanes);
        }
      }
    });
  }

  // Packs all pixels of a chunk.
  const float* Load(int chunk, float* packed, float*, float*) const {
    const StageTimer timer(Stage::kGather);
    grid().ForPanels(chunk, [&](const Panel& panel, int number) {
      panels_.PackInput(panel, packed + number * panels_.panel_size());
    });
    return packed;
  }

  // The sums are the outputs, row after row of a panel.
  void Finish(int chunk, const float* sums, std::size_t, std::size_t vector_pitch, float*, int first_vector,
              int vectors, const RowUnpacker& unpacker) const {
    grid().ForPanels(chunk, [&](const Panel& panel, int) {
      for (int v = 0; v < vectors; v++) {
        const float* row = sums + v * vector_pitch;
        for (int i = 0; i < panel.rows; i++, row += panel.columns * kLanes) {
          unpacker.Unpack(panel.image, grid().OutputRow(panel, i), grid().FirstOutputColumn(panel), panel.columns, row,
                          first_vector + v);
        }
      }
      sums += panel.rows * panel.columns * kLanes;
    });
  }

 private:
  const Convolution& conv_;
  const PackedPanels panels_;
  std::vector<std::ptrdiff_t> taps_;
};

// Reads taps[channel - first][tap] of a vector of output channels. One copy serves all schemes of as many taps.
template <int kTaps>
HWY_NOINLINE void ReadTaps(const WeightReader& reader, int first_output, int first, int last,
                           float (&taps)[kLanes][kTaps][kLanes]) {
  reader.Read(first_output, first, last,
              [&](int channel, int tap, Floats w) { StoreAligned(taps[channel - first][tap], w); });
}

// A Cook-Toom scheme without nested segments.
template <class AlongH, class AlongW>
class FastForward {
 public:
  using S = Scheme<AlongH, AlongW, false, true>;
  static constexpr int kMatrices = AlongH::kPoints * AlongW::kPoints;
  static constexpr bool kListed = false;
  static constexpr int kTerms = TermsWithin(kWeightsInL1, sizeof(float) * kTileVectors<kListed> * kLanes);
  // Weights transformed on the fly, of a tile of the usual width and all points, stay in L2.
  static constexpr int kFreshTerms = TermsWithin(kWeightsInCache, sizeof(float) * kMatrices * kSumVectors * kLanes);
  static_assert(kFreshTerms >= kLanes);
  // Small images have few units, whose sums are small: then x is read once for many output channels.
  static constexpr int kBlockTiles = 4;
  static bool Serves(const Convolution& conv) {
    return conv.stride_h == 1 && conv.stride_w == 1 && conv.taps_h <= AlongH::kR && conv.taps_w <= AlongW::kR;
  }

  FastForward(const Convolution& conv, int units, int threads)
      : grid_(conv, TileShape{AlongH::kM, AlongW::kM, AlongH::kR, AlongW::kR, true}, units, threads),
        packer_(InputPixels(conv)),
        column_(conv.x_column),
        segment_(std::min(Segment(conv), grid_.panel_columns())),
        // Odd numbers of columns, against conflicts of rows in cache sets.
        x_row_(static_cast<std::size_t>(grid_.InputColumns(segment_) | 1) * kLanes),
        y_row_(static_cast<std::size_t>(grid_.OutputColumns(segment_) | 1) * kLanes),
        taps_{0} {}

  static ForwardWeights Weights(const Convolution& conv) { return {conv, kMatrices, 1, kTileVectors<kListed>}; }

  // If the transformed weights exceed the cache, writing and reading them takes longer than the products of a small
  // image. They are then made tile by tile, for some input channels at a time, and used by all units of a chunk.
  static bool TakesPlainWeights(const Convolution& conv) {
    return Weights(conv).size() * sizeof(float) > kWeightsInCache;
  }

  static WeightReader Reader(const Convolution& conv) {
    return {conv, conv.w, {0, conv.taps_h, 1}, {0, conv.taps_w, 1}, AlongW::kR};
  }

  // Transforms the weights of a tile.
  static void PutWeights(const WeightReader& reader, const ForwardWeights& weights, int first, int width,
                         float* target) {
    Transform(reader, first, width, 0, weights.channels, target + weights.Offset(first, width, first, 0, 0),
              weights.matrix_size());
  }

  // Transforms the weights of the input channels [begin, end): target[point][channel][vector][lane].
  static void Transform(const WeightReader& reader, int first, int width, int begin, int end, float* target,
                        std::size_t matrix_pitch) {
    HWY_ALIGN float taps[kLanes][AlongH::kR * AlongW::kR][kLanes] = {};
    for (int channel = begin; channel < end; channel += kLanes) {
      const int last = std::min(channel + kLanes, end);
      for (int v = 0; v < width; v++) {
        ReadTaps(reader, (first + v) * kLanes, channel, last, taps);
        for (int c = channel; c < last; c++) {
          TransformTaps(taps[c - channel], target + ((c - begin) * width + v) * kLanes, matrix_pitch);
        }
      }
    }
  }

  const PanelGrid& grid() const { return grid_; }
  int x_vectors() const { return packer_.vectors(); }
  const std::vector<std::ptrdiff_t>& taps() const { return taps_; }
  std::size_t packed_size() const { return x_row_ * grid_.MostInputRows(); }
  std::size_t expanded_size() const { return kMatrices * matrix_pitch(); }
  std::size_t vector_pitch() const { return static_cast<std::size_t>(grid_.ChunkUnits()) * kLanes; }
  // An odd number of vectors, against conflicts in cache sets.
  std::size_t matrix_pitch() const { return static_cast<std::size_t>((grid_.ChunkUnits() * x_vectors()) | 1) * kLanes; }
  std::size_t work_size() const { return S::kGroupRows * x_row_; }
  std::size_t outputs_size() const { return y_row_ * AlongH::kM; }

  void ListUnits(int chunk, std::vector<std::ptrdiff_t>* units) const {
    int count = 0;
    grid_.ForPanels(chunk, [&](const Panel& panel, int) { count += grid_.Units(panel); });
    for (int i = 0; i < count; i++) units->push_back(i * kLanes);
  }

  // Transforms all tiles of a chunk: [point][vector of channels][tile][lane], points in natural order. Pixels are
  // packed for one segment and one vector of channels at a time, and are still in L1 when they are transformed.
  const float* Load(int chunk, float* packed, float* expanded, float* work) const {
    float* target = expanded;
    grid_.ForPanels(chunk, [&](const Panel& panel, int) {
      ForSegments(panel, [&](const Panel& segment) {
        for (int v = 0; v < x_vectors(); v++) {
          Pack(segment, v, packed);
          const StageTimer timer(Stage::kExpand);
          float* tiles = target + v * vector_pitch() + (segment.first_column - panel.first_column) * kLanes;
          ExpandGroups<0>(segment, panel.columns, packed, tiles, work);
        }
      });
      target += grid_.Units(panel) * kLanes;
    });
    return expanded;
  }

  // Applies the inverse transform to the sums of all points, and writes the outputs.
  void Finish(int chunk, const float* sums, std::size_t matrix_pitch, std::size_t vector_pitch, float* outputs,
              int first_vector, int vectors, const RowUnpacker& unpacker) const {
    const std::size_t column_pitch = static_cast<std::size_t>(grid_.column_dilation()) * kLanes;
    grid_.ForPanels(chunk, [&](const Panel& panel, int) {
      ForSegments(panel, [&](const Panel& segment) {
        // All rows of one vector of channels before the next vector: rows may share cache lines.
        for (int v = 0; v < vectors; v++) {
          const float* line = sums + v * vector_pitch + (segment.first_column - panel.first_column) * kLanes;
          for (int row = 0; row < panel.rows; row++) {
            for (int phase = 0; phase < grid_.column_phases(); phase++, line += panel.columns * kLanes) {
              for (int t = 0; t < segment.columns; t++) {
                InvertTile(line + t * kLanes, matrix_pitch, outputs + phase * kLanes + t * AlongW::kM * column_pitch,
                           y_row_, column_pitch);
              }
            }
            for (int i = 0; i < AlongH::kM; i++) {
              unpacker.Unpack(panel.image, grid_.OutputRow(panel, row * AlongH::kM + i),
                              grid_.FirstOutputColumn(segment), grid_.OutputColumns(segment.columns),
                              outputs + i * y_row_, first_vector + v);
            }
          }
        }
      });
      sums += grid_.Units(panel) * kLanes;
    });
  }

 private:
  // All points of one input channel, for a vector of output channels.
  static HWY_INLINE void TransformTaps(const float (&taps)[AlongH::kR * AlongW::kR][kLanes], float* target,
                                       std::size_t matrix_pitch) {
    WeightDoubles half[AlongH::kR][AlongW::kPoints][2];
    POLYCONV_UNROLL
    for (int r = 0; r < AlongH::kR; r++) {
      POLYCONV_UNROLL
      for (int h = 0; h < 2; h++) {
        WeightDoubles row[AlongW::kR];
        POLYCONV_UNROLL
        for (int s = 0; s < AlongW::kR; s++) row[s] = LoadDoubles(taps[r * AlongW::kR + s] + h * kWeightLanes);
        POLYCONV_UNROLL
        for (int j = 0; j < AlongW::kPoints; j++) {
          half[r][j][h] = WeighedSum<AlongW>(j, [&](int s) { return row[s]; });
        }
      }
    }
    POLYCONV_UNROLL
    for (int i = 0; i < AlongH::kPoints; i++) {
      POLYCONV_UNROLL
      for (int j = 0; j < AlongW::kPoints; j++, target += matrix_pitch) {
        const auto low = hn::DemoteTo(kHalf, WeighedSum<AlongH>(i, [&](int r) { return half[r][j][0]; }));
        const auto high = hn::DemoteTo(kHalf, WeighedSum<AlongH>(i, [&](int r) { return half[r][j][1]; }));
        Store(target, hn::Combine(kFloats, high, low));
      }
    }
  }

  static constexpr hn::Rebind<float, hn::ScalableTag<double>> kHalf{};

  static HWY_INLINE WeightDoubles LoadDoubles(const float* p) {
    return hn::PromoteTo(kWeightDoubles, hn::Load(kHalf, p));
  }

  // One point of a transform along an axis. Unrolled, so that factors are constants and zeros cost nothing.
  template <class Axis, class Term>
  static HWY_INLINE WeightDoubles WeighedSum(int point, const Term& term) {
    WeightDoubles sum = hn::Zero(kWeightDoubles);
    POLYCONV_UNROLL
    for (int t = 0; t < Axis::kR; t++) {
      const double factor = Axis::kMatrices.weight.at[point][t];
      if (factor != 0.0) sum = hn::MulAdd(hn::Set(kWeightDoubles, factor), term(t), sum);
    }
    return sum;
  }

  // Tiles along a row whose pixels are packed together. With contiguous channels so few that they stay in L1;
  // otherwise whole rows, because their pixels are transposed in blocks.
  static int Segment(const Convolution& conv) { return conv.x_channel == 1 ? 8 : conv.out_width; }

  // Calls fn for the segments of a panel, which are panels with fewer columns.
  template <class Fn>
  void ForSegments(const Panel& panel, const Fn& fn) const {
    Panel segment = panel;
    for (int first = 0; first < panel.columns; first += segment_) {
      segment.first_column = panel.first_column + first;
      segment.columns = std::min(segment_, panel.columns - first);
      fn(segment);
    }
  }

  void Pack(const Panel& segment, int vector, float* packed) const {
    const StageTimer timer(Stage::kGather);
    const bool last = vector + 1 == x_vectors();
    const std::ptrdiff_t ahead = last ? grid_.OutputColumns(segment.columns) * column_ - vector * kLanes : kLanes;
    for (int i = 0; i < grid_.InputRows(segment); i++, packed += x_row_) {
      packer_.PackVector(segment.image, grid_.InputRow(segment, i), grid_.FirstInputColumn(segment),
                         grid_.InputColumns(segment.columns), vector, packed, ahead);
    }
  }

  // Both points of a group in one step of the transform. `columns`: tiles from a row of the target to the next.
  template <int kGroup>
  void ExpandGroups(const Panel& segment, int columns, const float* packed, float* target, float* work) const {
    if constexpr (kGroup < S::kGroups) {
      constexpr int kFirst = S::PointOfH(kGroup, 0), kSecond = S::PointOfH(kGroup, S::kGroupRows - 1);
      TileLine line{};
      line.row_pitch = x_row_;
      line.column_pitch = static_cast<std::size_t>(grid_.column_dilation()) * kLanes;
      line.tiles = segment.columns;
      line.target = target + kFirst * AlongW::kPoints * matrix_pitch();
      line.matrix_pitch = matrix_pitch();
      line.group_pitch = (kSecond - kFirst) * AlongW::kPoints * matrix_pitch();
      for (int row = 0; row < segment.rows; row++) {
        for (int phase = 0; phase < grid_.column_phases(); phase++, line.target += columns * kLanes) {
          line.pixels = packed + row * AlongH::kM * x_row_ + phase * kLanes;
          ExpandInput<S, kGroup>(line, work);
        }
      }
      ExpandGroups<kGroup + 1>(segment, columns, packed, target, work);
    }
  }

  static HWY_INLINE void InvertTile(const float* sums, std::size_t matrix_pitch, float* target, std::size_t row_pitch,
                                    std::size_t column_pitch) {
    Floats half[AlongH::kM][AlongW::kPoints];
    POLYCONV_UNROLL
    for (int j = 0; j < AlongW::kPoints; j++) {
      Floats points[AlongH::kPoints], column[AlongH::kM];
      POLYCONV_UNROLL
      for (int i = 0; i < AlongH::kPoints; i++) {
        points[i] = hn::Load(kFloats, sums + (i * AlongW::kPoints + j) * matrix_pitch);
      }
      TransformOutput<AlongH>(points, column);
      POLYCONV_UNROLL
      for (int i = 0; i < AlongH::kM; i++) half[i][j] = column[i];
    }
    POLYCONV_UNROLL
    for (int i = 0; i < AlongH::kM; i++, target += row_pitch) {
      Floats row[AlongW::kM];
      TransformOutput<AlongW>(half[i], row);
      POLYCONV_UNROLL
      for (int j = 0; j < AlongW::kM; j++) StoreAligned(target + j * column_pitch, row[j]);
    }
  }

  const PanelGrid grid_;
  const RowPacker packer_;
  const std::ptrdiff_t column_;
  const int segment_;
  const std::size_t x_row_, y_row_;
  const std::vector<std::ptrdiff_t> taps_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
