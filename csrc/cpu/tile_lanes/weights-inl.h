// Weight transform in double: G_h w G_w^T per pair of channels, in the layout that the products read.
#if defined(POLYCONV_CPU_TILE_LANES_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_WEIGHTS_INL_H_
#undef POLYCONV_CPU_TILE_LANES_WEIGHTS_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_WEIGHTS_INL_H_
#endif

#include <algorithm>

#include "common/cook_toom.h"
#include "common/simd-inl.h"
#include "tile_lanes/products-inl.h"
#include "tile_lanes/segments.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// transformed[point][tile of output channels][slot][channel][k]; a channel is a segment of an input channel. Output
// channels that pad the last tile are zeros.
template <class S>
struct WeightStage {
  static constexpr int kPointsH = S::H::kPoints;
  static constexpr int kPointsW = S::W::kPoints;
  using DoubleTag = hn::ScalableTag<double>;
  using Doubles = hn::Vec<DoubleTag>;
  static constexpr int kDoubles = hn::MaxLanes(DoubleTag());
  static constexpr int kVectors = kTileChannels / kDoubles;  // per tile of output channels

  const Convolution& conv;
  const Taps all_taps;
  int channels;       // of the input, segments included
  int channel_tiles;  // of the output

  explicit WeightStage(const Convolution& c)
      : conv(c),
        all_taps(c, S::kTapsH, S::kTapsW),
        channels(all_taps.channels()),
        channel_tiles(CeilDiv(c.out_channels, kTileChannels)) {}

  std::size_t tile_size() const { return static_cast<std::size_t>(S::kSlots) * channels * kTileChannels; }
  std::size_t slot_pitch() const { return static_cast<std::size_t>(channels) * kTileChannels; }
  std::size_t point_pitch() const { return channel_tiles * tile_size(); }
  std::size_t size() const { return point_pitch() * kPointsH * kPointsW; }
  // `point`: number within the group. The layout does not depend on groups: weights serve every order of the stages.
  std::size_t offset(int group, int point, int tile) const {
    const int natural = S::PointOfH(group, point / kPointsW) * kPointsW + point % kPointsW;
    return natural * point_pitch() + tile * tile_size();
  }

  // All points of the weights between one input channel and one tile of output channels.
  void Transform(int tile, int channel, float* transformed) const {
    const auto [image_channel, segment_h, segment_w] = all_taps.At(channel);
    const TapSegment& rows = all_taps.h.segments[segment_h];
    const TapSegment& columns = all_taps.w.segments[segment_w];
    const int count = std::min(kTileChannels, conv.out_channels - tile * kTileChannels);
    const float* w = conv.w + image_channel * conv.w_in + tile * kTileChannels * conv.w_out +
                     rows.first_tap * conv.w_row + columns.first_tap * conv.w_column;
    const std::ptrdiff_t row_pitch = all_taps.h.tap_step * conv.w_row;
    const std::ptrdiff_t column_pitch = all_taps.w.tap_step * conv.w_column;
    HWY_ALIGN double taps[S::kTapsH][S::kTapsW][kTileChannels] = {};
    for (int k = 0; k < count; k++) {
      for (int r = 0; r < rows.taps; r++) {
        for (int s = 0; s < columns.taps; s++) taps[r][s][k] = w[k * conv.w_out + r * row_pitch + s * column_pitch];
      }
    }
    float* target = transformed + channel * kTileChannels;
    for (int v = 0; v < kVectors; v++) TransformVector(&taps[0][0][v * kDoubles], tile, target + v * kDoubles);
  }

 private:
  // Along W first: half[block][row of taps][point]. Nested, block 0 has W::kM taps and block 1 the other W::kR.
  static HWY_INLINE void TransformRows(const double* taps, Doubles (&half)[S::kBlocks][S::kTapsH][kPointsW]) {
    constexpr DoubleTag d;
    for (int r = 0; r < S::kTapsH; r++, taps += S::kTapsW * kTileChannels) {
      POLYCONV_UNROLL
      for (int block = 0; block < S::kBlocks; block++) {
        const double* first = taps + block * S::W::kM * kTileChannels;
        constexpr int kFirstCount = S::kNested ? S::W::kM : S::W::kR;
        const int count = block == 0 ? kFirstCount : S::W::kR;
        POLYCONV_UNROLL
        for (int j = 0; j < kPointsW; j++) {
          Doubles sum = hn::Zero(d);
          POLYCONV_UNROLL
          for (int s = 0; s < count; s++) {
            const double factor = S::W::kMatrices.weight.at[j][s];
            sum = hn::MulAdd(hn::Set(d, factor), hn::Load(d, first + s * kTileChannels), sum);
          }
          half[block][r][j] = sum;
        }
      }
    }
  }

  HWY_INLINE void TransformVector(const double* taps, int tile, float* transformed) const {
    Doubles half[S::kBlocks][S::kTapsH][kPointsW];
    TransformRows(taps, half);
    float* target = transformed + tile * tile_size();
    for (int h = 0; h < kPointsH; h++) {
      const double* factors = S::H::kMatrices.weight.at[h];
      POLYCONV_UNROLL
      for (int j = 0; j < kPointsW; j++, target += point_pitch()) {
        const Doubles first = SumRows(factors, half[0], j);
        if constexpr (S::kNested) {  // the factors of x1, x0 - x1 and x2 - x1
          const Doubles second = SumRows(factors, half[1], j);
          Put(hn::Add(first, second), target);
          Put(first, target + slot_pitch());
          Put(second, target + 2 * slot_pitch());
        } else {
          Put(first, target);
        }
      }
    }
  }

  static HWY_INLINE Doubles SumRows(const double* factors, const Doubles (&rows)[S::kTapsH][kPointsW], int j) {
    constexpr DoubleTag d;
    Doubles sum = hn::Mul(hn::Set(d, factors[0]), rows[0][j]);
    POLYCONV_UNROLL
    for (int r = 1; r < S::kTapsH; r++) sum = hn::MulAdd(hn::Set(d, factors[r]), rows[r][j], sum);
    return sum;
  }

  static HWY_INLINE void Put(Doubles v, float* target) {
    const hn::Rebind<float, DoubleTag> narrow;
    hn::StoreU(hn::DemoteTo(narrow, v), narrow, target);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
