// Forward pass (and any other correlation) with channels in the lanes: for small images, strides, borders and
// channels_last, which cost nothing extra once pixels are packed.
//
// A unit is a pixel (direct summation) or a tile (Cook-Toom). A register tile is up to kSumRows units x kSumVectors
// vectors of output channels, summed over the input channels and, without a transform, over the taps.
#if defined(POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#endif

#include <algorithm>
#include <type_traits>
#include <vector>

#include "channel_lanes/forward.h"
#include "channel_lanes/grid.h"
#include "channel_lanes/pack-inl.h"
#include "channel_lanes/panels-inl.h"
#include "channel_lanes/products-inl.h"
#include "channel_lanes/transform-inl.h"
#include "common/memory.h"
#include "common/stages.h"
#include "common/weight_reader-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Vectors of output channels between two inverse transforms.
inline constexpr int kBlockVectors = 2 * kSumVectors;

// Terms (input channels times taps) that a register tile sums at a time: a chunk's units reuse their weights from L1.
inline constexpr int kTermsAtATime = 144;
static_assert(kTermsAtATime % kLanes == 0, "channels are cut by whole vectors, and no sum is longer than this");

// Transformed weights that stay in L2 beside the units [bytes].
inline constexpr std::size_t kWeightsInCache = 384 << 10;

// Operands of a register tile. Offsets and pitches are in floats.
struct UnitProducts {
  const float* x;               // vectors of input channels
  const std::ptrdiff_t* units;  // offset of each unit
  const std::ptrdiff_t* taps;   // offset of each tap
  int tap_count;
  int channels;
  std::size_t vector_pitch;  // between vectors of input channels
  const float* weights;      // [tap][channel][vector][lane]
  const float* ahead;        // one vector per term to prefetch: weights that are needed next
};

// target[vector][unit][lane] = or += the sum over taps and channels.
template <int kUnits, int kVectors>
HWY_NOINLINE void SumChannels(const UnitProducts& op, float* target, std::size_t target_pitch, bool accumulate) {
  Floats sum[kUnits][kVectors];
  std::ptrdiff_t unit[kUnits];
  POLYCONV_UNROLL
  for (int u = 0; u < kUnits; u++) {
    unit[u] = op.units[u];
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
    for (int left = op.channels; left > 0; left -= kLanes, x += op.vector_pitch) {
      const int lanes = std::min(left, kLanes);
      for (int lane = 0; lane < lanes; lane++, weights += kVectors * kLanes, ahead += kLanes) {
        hwy::Prefetch(ahead);
        Floats w[kVectors];
        POLYCONV_UNROLL
        for (int v = 0; v < kVectors; v++) w[v] = hn::Load(kFloats, weights + v * kLanes);
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

// Compiled for every number of units up to kSumRows, so that the last units of a chunk are not padded.
template <int kUnits = kSumRows>
HWY_INLINE void SumChannels(int units, int vectors, const UnitProducts& op, float* target, std::size_t target_pitch,
                            bool accumulate) {
  if constexpr (kUnits > 1) {
    if (units < kUnits) return SumChannels<kUnits - 1>(units, vectors, op, target, target_pitch, accumulate);
  }
  if (vectors == 3) return SumChannels<kUnits, 3>(op, target, target_pitch, accumulate);
  if (vectors == 2) return SumChannels<kUnits, 2>(op, target, target_pitch, accumulate);
  SumChannels<kUnits, 1>(op, target, target_pitch, accumulate);
}

// Weights of all matrices: [matrix][tile of output vectors][tap][channel][vector][lane].
struct ForwardWeights {
  int matrices, taps, channels, vectors;

  ForwardWeights(const Convolution& conv, int matrix_count, int tap_count)
      : matrices(matrix_count),
        taps(tap_count),
        channels(conv.in_channels),
        vectors(CeilDiv(conv.out_channels, kLanes)) {}

  std::size_t tile_row() const { return static_cast<std::size_t>(taps) * channels * kLanes; }  // per vector
  std::size_t matrix_size() const { return tile_row() * vectors; }
  std::size_t size() const { return matrix_size() * matrices; }

  // Calls fn(first vector, vectors) for every tile.
  template <class Fn>
  static void ForTiles(int first, int last, const Fn& fn) {
    for (int v = first, width; v < last; v += width) {
      width = NextVectors(last - v);
      fn(v, width);
    }
  }

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
  static constexpr int kTerms = kTermsAtATime;
  static bool Serves(const Convolution&) { return true; }

  DirectForward(const Convolution& conv, int units)
      : conv_(conv), panels_(conv, TileShape{1, 1, conv.taps_h, conv.taps_w, false}, units) {
    for (int r = 0; r < conv.taps_h; r++) {
      for (int s = 0; s < conv.taps_w; s++) {
        taps_.push_back(r * static_cast<std::ptrdiff_t>(panels_.x_row()) +
                        static_cast<std::ptrdiff_t>(s) * conv.dilation_w * kLanes);
      }
    }
  }

  static ForwardWeights Weights(const Convolution& conv) { return {conv, 1, conv.taps_h * conv.taps_w}; }

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

  const PackedPanels& panels() const { return panels_; }
  const std::vector<std::ptrdiff_t>& taps() const { return taps_; }
  std::size_t expanded_size() const { return 0; }
  std::size_t matrix_pitch() const { return 0; }
  std::size_t vector_pitch() const { return panels_.x_vector(); }
  std::size_t work_size() const { return 0; }
  std::size_t outputs_size(int) const { return 0; }

  void ListUnits(int chunk, std::vector<std::ptrdiff_t>* units) const {
    const PanelGrid& grid = panels_.grid();
    panels_.ForPanels(chunk, [&](const Panel& panel, int number) {
      const std::ptrdiff_t first = number * static_cast<std::ptrdiff_t>(panels_.panel_size());
      for (int i = 0; i < panel.rows; i++) {
        const std::ptrdiff_t row = first + i * grid.row_stride() * static_cast<std::ptrdiff_t>(panels_.x_row());
        for (int j = 0; j < panel.columns; j++) {
          units->push_back(row + static_cast<std::ptrdiff_t>(j) * conv_.stride_w * kLanes);
        }
      }
    });
  }
  const float* Expand(int, const float* packed, float*, float*) const { return packed; }

  // The sums are the outputs, row after row of a panel.
  void Finish(int chunk, const float* sums, std::size_t, std::size_t vector_pitch, float*, int first_vector,
              int vectors, const RowUnpacker& unpacker) const {
    const PanelGrid& grid = panels_.grid();
    panels_.ForPanels(chunk, [&](const Panel& panel, int) {
      for (int v = 0; v < vectors; v++) {
        const float* row = sums + v * vector_pitch;
        for (int i = 0; i < panel.rows; i++, row += panel.columns * kLanes) {
          unpacker.Unpack(panel.image, grid.OutputRow(panel, i), grid.FirstOutputColumn(panel), panel.columns, row,
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

// A Cook-Toom scheme without nested segments.
template <class AlongH, class AlongW>
class FastForward {
 public:
  using S = Scheme<AlongH, AlongW, false, true>;
  static constexpr int kMatrices = AlongH::kPoints * AlongW::kPoints;
  // Input channels summed at a time, so that a tile's weights for them, at all points, stay in the cache.
  static constexpr int kTerms = std::min<int>(
      kTermsAtATime, kWeightsInCache / (sizeof(float) * kMatrices * kSumVectors * kLanes) / kLanes * kLanes);
  static_assert(kTerms >= kLanes);
  static bool Serves(const Convolution& conv) {
    return conv.stride_h == 1 && conv.stride_w == 1 && conv.taps_h <= AlongH::kR && conv.taps_w <= AlongW::kR;
  }

  FastForward(const Convolution& conv, int units)
      : panels_(conv, TileShape{AlongH::kM, AlongW::kM, AlongH::kR, AlongW::kR, true}, units), taps_{0} {}

  static ForwardWeights Weights(const Convolution& conv) { return {conv, kMatrices, 1}; }

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
        reader.Read((first + v) * kLanes, channel, last,
                    [&](int c, int tap, Floats w) { StoreAligned(taps[c - channel][tap], w); });
        for (int c = channel; c < last; c++) {
          TransformTaps(taps[c - channel], target + ((c - begin) * width + v) * kLanes, matrix_pitch);
        }
      }
    }
  }

  const PackedPanels& panels() const { return panels_; }
  const std::vector<std::ptrdiff_t>& taps() const { return taps_; }
  std::size_t expanded_size() const { return kMatrices * matrix_pitch(); }
  std::size_t vector_pitch() const { return static_cast<std::size_t>(panels_.grid().ChunkUnits()) * kLanes; }
  // An odd number of vectors, against conflicts in cache sets.
  std::size_t matrix_pitch() const {
    return static_cast<std::size_t>((panels_.grid().ChunkUnits() * panels_.x_vectors()) | 1) * kLanes;
  }
  std::size_t work_size() const {
    return static_cast<std::size_t>(S::kGroupRows) * panels_.grid().InputColumns() * kLanes;
  }
  std::size_t outputs_size(int vectors) const {
    return panels_.dy_vector() * vectors * panels_.grid().MostOutputRows();
  }

  void ListUnits(int chunk, std::vector<std::ptrdiff_t>* units) const {
    int count = 0;
    panels_.ForPanels(chunk, [&](const Panel& panel, int) { count += panels_.grid().Units(panel); });
    for (int i = 0; i < count; i++) units->push_back(i * kLanes);
  }

  // Transforms all tiles of a chunk: [point][vector of channels][tile][lane], points in natural order.
  const float* Expand(int chunk, const float* packed, float* expanded, float* work) const {
    const StageTimer timer(Stage::kExpand);
    ExpandGroups<0>(chunk, packed, expanded, work);
    return expanded;
  }

  // Applies the inverse transform to the sums of all points, and writes the outputs.
  void Finish(int chunk, const float* sums, std::size_t matrix_pitch, std::size_t vector_pitch, float* outputs,
              int first_vector, int vectors, const RowUnpacker& unpacker) const {
    const PanelGrid& grid = panels_.grid();
    const std::size_t out_row = panels_.dy_vector() * vectors;
    panels_.ForPanels(chunk, [&](const Panel& panel, int) {
      for (int row = 0; row < panel.rows; row++) {
        float* rows = outputs + row * AlongH::kM * out_row;
        for (int phase = 0; phase < grid.column_phases(); phase++, sums += panel.columns * kLanes) {
          for (int v = 0; v < vectors; v++) {
            for (int t = 0; t < panel.columns; t++) {
              const int column = phase + t * AlongW::kM * grid.column_dilation();
              InvertTile(sums + v * vector_pitch + t * kLanes, matrix_pitch,
                         rows + v * panels_.dy_vector() + column * kLanes, out_row,
                         static_cast<std::size_t>(grid.column_dilation()) * kLanes);
            }
          }
        }
      }
      // All rows of one vector of channels before the next vector: rows may share cache lines.
      for (int v = 0; v < vectors; v++) {
        for (int i = 0; i < grid.OutputRows(panel); i++) {
          unpacker.Unpack(panel.image, grid.OutputRow(panel, i), grid.FirstOutputColumn(panel),
                          panel.columns * AlongW::kM * grid.column_dilation(),
                          outputs + i * out_row + v * panels_.dy_vector(), first_vector + v);
        }
      }
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

  template <int kGroup>
  void ExpandGroups(int chunk, const float* packed, float* expanded, float* work) const {
    if constexpr (kGroup < S::kGroups) {
      const PackedPanels& p = panels_;
      // Both points of a group in one step of the transform.
      constexpr int kFirst = S::PointOfH(kGroup, 0), kSecond = S::PointOfH(kGroup, S::kGroupRows - 1);
      TileLine line{};
      line.row_pitch = p.x_row();
      line.column_pitch = static_cast<std::size_t>(p.grid().column_dilation()) * kLanes;
      line.matrix_pitch = matrix_pitch();
      line.group_pitch = (kSecond - kFirst) * AlongW::kPoints * matrix_pitch();
      float* target = expanded + kFirst * AlongW::kPoints * matrix_pitch();
      p.ForPanels(chunk, [&](const Panel& panel, int number) {
        const float* x = packed + number * p.panel_size();
        line.tiles = panel.columns;
        for (int row = 0; row < panel.rows; row++) {
          for (int phase = 0; phase < p.grid().column_phases(); phase++, target += panel.columns * kLanes) {
            for (int v = 0; v < p.x_vectors(); v++) {
              line.pixels = x + row * AlongH::kM * p.x_row() + v * p.x_vector() + phase * kLanes;
              line.target = target + v * vector_pitch();
              ExpandInput<S, kGroup>(line, work);
            }
          }
        }
      });
      ExpandGroups<kGroup + 1>(chunk, packed, expanded, work);
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

  const PackedPanels panels_;
  const std::vector<std::ptrdiff_t> taps_;
};

template <class Form>
class ChannelForward {
 public:
  ChannelForward(const Convolution& conv, const float* transformed)
      : conv_(conv),
        weights_(Form::Weights(conv)),
        reader_(Form::Reader(conv)),
        transformed_(transformed),
        form_(conv, ChooseUnits(conv)) {}

  void Run(const Runtime& runtime) const {
    const PackedPanels& panels = form_.panels();
    const int units = panels.grid().ChunkUnits(), block = std::min(weights_.vectors, kBlockVectors);
    const std::size_t vector_pitch = static_cast<std::size_t>(units) * kLanes;
    const std::size_t matrix_pitch = static_cast<std::size_t>((units * block) | 1) * kLanes;
    const RowUnpacker unpacker(conv_);
    runtime.parallel_for(panels.grid().chunks(), [&](std::int64_t begin, std::int64_t end) {
      Carver carver;
      const std::size_t packed_at = carver.Take(panels.chunk_size());
      const std::size_t expanded_at = carver.Take(form_.expanded_size());
      const std::size_t sums_at = carver.Take(Form::kMatrices * matrix_pitch);
      const std::size_t outputs_at = carver.Take(form_.outputs_size(block));
      const std::size_t work_at = carver.Take(form_.work_size());
      const std::size_t weights_at = carver.Take(transformed_ == nullptr ? Form::kMatrices * kFreshPitch : 0);
      float* scratch = Scratch::OfThread().Get(carver.size());
      float* sums = scratch + sums_at;
      std::vector<std::ptrdiff_t> list;
      for (int chunk = static_cast<int>(begin); chunk < end; chunk++) {
        Pack(chunk, scratch + packed_at);
        const float* x = form_.Expand(chunk, scratch + packed_at, scratch + expanded_at, scratch + work_at);
        list.clear();
        form_.ListUnits(chunk, &list);
        for (int first = 0; first < weights_.vectors; first += block) {
          const int last = std::min(first + block, weights_.vectors);
          if (transformed_ != nullptr) {
            Multiply(x, list, first, last, sums, matrix_pitch, vector_pitch);
          } else if constexpr (Form::kMatrices > 1) {
            TransformAndMultiply(x, list, first, last, sums, matrix_pitch, vector_pitch, scratch + weights_at);
          }
          const StageTimer timer(Stage::kInvert);
          form_.Finish(chunk, sums, matrix_pitch, vector_pitch, scratch + outputs_at, first, last - first, unpacker);
        }
      }
    });
  }

 private:
  // Pitch between the points of weights transformed on the fly: an odd number of vectors, against cache set conflicts.
  static constexpr std::size_t kFreshPitch = static_cast<std::size_t>((Form::kTerms * kSumVectors) | 1) * kLanes;

  // As many units as keep the transformed input in L2, so that weights are reused often.
  static int ChooseUnits(const Convolution& conv) {
    constexpr double kCache = 1.2 * (1 << 20);
    const double unit = 4.0 * Form::kMatrices * (conv.in_channels + kBlockVectors * kLanes);
    return Form::kMatrices == 1 ? 128 : std::clamp(static_cast<int>(kCache / unit), 56, 96);
  }

  void Pack(int chunk, float* packed) const {
    const StageTimer timer(Stage::kGather);
    form_.panels().ForPanels(chunk, [&](const Panel& panel, int number) {
      form_.panels().PackInput(panel, packed + number * form_.panels().panel_size());
    });
  }

  void Multiply(const float* x, const std::vector<std::ptrdiff_t>& list, int first, int last, float* sums,
                std::size_t matrix_pitch, std::size_t vector_pitch) const {
    const StageTimer timer(Stage::kProducts);
    // Either some channels of one tap, or all channels of some taps.
    const int vectors = form_.panels().x_vectors();
    const int blocks = CeilDiv(vectors * kLanes, Form::kTerms);
    const int channels_at_a_time = blocks > 1 ? CeilDiv(vectors, blocks) * kLanes : weights_.channels;
    const int taps_at_a_time = std::max(1, Form::kTerms / channels_at_a_time);
    UnitProducts op{};
    op.vector_pitch = form_.vector_pitch();
    for (int matrix = 0; matrix < Form::kMatrices; matrix++) {
      ForwardWeights::ForTiles(first, last, [&](int v, int width) {
        const float* weights = transformed_ + matrix * weights_.matrix_size();
        float* target = sums + matrix * matrix_pitch + (v - first) * vector_pitch;
        for (int tap = 0; tap < weights_.taps; tap += taps_at_a_time) {
          op.taps = form_.taps().data() + tap;
          op.tap_count = std::min(taps_at_a_time, weights_.taps - tap);
          for (int channel = 0; channel < weights_.channels; channel += channels_at_a_time) {
            op.x = x + matrix * form_.matrix_pitch() + channel / kLanes * form_.vector_pitch();
            op.channels = std::min(channels_at_a_time, weights_.channels - channel);
            op.weights = weights + weights_.Offset(v, width, v, tap, channel);
            MultiplyUnits(op, list, width, target, vector_pitch, tap + channel > 0);
          }
        }
      });
    }
  }

  // Like Multiply, with weights transformed on the fly, for a tile and some channels at a time.
  void TransformAndMultiply(const float* x, const std::vector<std::ptrdiff_t>& list, int first, int last, float* sums,
                            std::size_t matrix_pitch, std::size_t vector_pitch, float* fresh) const {
    UnitProducts op{};
    op.vector_pitch = form_.vector_pitch();
    op.taps = form_.taps().data();
    op.tap_count = 1;
    ForwardWeights::ForTiles(first, last, [&](int v, int width) {
      for (int channel = 0; channel < weights_.channels; channel += Form::kTerms) {
        op.channels = std::min(Form::kTerms, weights_.channels - channel);
        {
          const StageTimer timer(Stage::kWeights);
          Form::Transform(reader_, v, width, channel, channel + op.channels, fresh, kFreshPitch);
        }
        const StageTimer timer(Stage::kProducts);
        for (int matrix = 0; matrix < Form::kMatrices; matrix++) {
          op.x = x + matrix * form_.matrix_pitch() + channel / kLanes * form_.vector_pitch();
          op.weights = fresh + matrix * kFreshPitch;
          float* target = sums + matrix * matrix_pitch + (v - first) * vector_pitch;
          MultiplyUnits(op, list, width, target, vector_pitch, channel > 0);
        }
      }
    });
  }

  // Units are cut into equal register tiles. Each prefetches its share of the next weights, which follow in memory.
  static HWY_INLINE void MultiplyUnits(UnitProducts op, const std::vector<std::ptrdiff_t>& list, int width,
                                       float* target, std::size_t vector_pitch, bool accumulate) {
    const int count = static_cast<int>(list.size()), tiles = CeilDiv(count, kSumRows);
    const int terms = op.tap_count * op.channels;
    op.ahead = op.weights + terms * width * kLanes;
    for (int tile = 0; tile < tiles; tile++, op.ahead += terms * kLanes) {
      const int unit = count * tile / tiles, end = count * (tile + 1) / tiles;
      op.units = list.data() + unit;
      SumChannels(end - unit, width, op, target + unit * kLanes, vector_pitch, accumulate);
    }
  }

  const Convolution& conv_;
  const ForwardWeights weights_;
  const WeightReader reader_;
  const float* transformed_;  // null: transform on the fly
  const Form form_;
};

template <class Form>
void TransformAll(const Convolution& conv, float* transformed, const Runtime& runtime) {
  const StageTimer timer(Stage::kWeights);
  const ForwardWeights weights = Form::Weights(conv);
  const WeightReader reader = Form::Reader(conv);
  constexpr int kBlock = kBlockVectors;
  // Same tiles as in the products, which never cross the end of a block of output channels.
  runtime.parallel_for(CeilDiv(weights.vectors, kBlock), [&](std::int64_t begin, std::int64_t end) {
    for (int block = static_cast<int>(begin); block < end; block++) {
      const int last = std::min((block + 1) * kBlock, weights.vectors);
      ForwardWeights::ForTiles(block * kBlock, last, [&](int first, int width) {
        Form::PutWeights(reader, weights, first, width, transformed);
      });
    }
  });
}

// Calls fn.template operator()<form>() with `Form`, or with direct summation if `Form` does not serve the problem.
template <class Form, class Fn>
auto WithForm(const Convolution& conv, const Fn& fn) {
  return Form::Serves(conv) ? fn.template operator()<Form>() : fn.template operator()<DirectForward>();
}

template <class Form>
std::size_t ForwardWeightsSize(const Convolution& conv) {
  return WithForm<Form>(conv, [&]<class Chosen>() { return Chosen::Weights(conv).size(); });
}

template <class Form>
void TransformForwardWeights(const Convolution& conv, float* transformed, const Runtime& runtime) {
  WithForm<Form>(conv, [&]<class Chosen>() { TransformAll<Chosen>(conv, transformed, runtime); });
}

template <class Form>
void RunForward(const Convolution& conv, const Schedule&, const float* transformed, const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  WithForm<Form>(conv, [&]<class Chosen>() { ChannelForward<Chosen>(conv, transformed).Run(runtime); });
}

template <class Form>
bool TakesPlainForwardWeights(const Convolution& conv) {
  return WithForm<Form>(conv, [&]<class Chosen>() { return Chosen::TakesPlainWeights(conv); });
}

inline int LongestForwardSum(int) {
  return kTermsAtATime;
}

template <class Form>
inline constexpr SchemeKernels kForwardKernels = {&ForwardWeightsSize<Form>, &TransformForwardWeights<Form>,
                                                  &TakesPlainForwardWeights<Form>, &RunForward<Form>,
                                                  &LongestForwardSum};

template <SchemeShape kShape>
using ForwardOf = std::conditional_t<kShape == kDirect, DirectForward, FastForward<AlongH<kShape>, AlongW<kShape>>>;

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
