// Convolutions of groups of a few channels on channels_last tensors: a vector of output channels covers several groups.
//
// An output needs every input of its group. Step d of a tap multiplies the input, whose lanes are rotated by d within
// each group, by the weights in the same order. So all lanes compute; with a vector per group most lanes would be idle.
#if defined(POLYCONV_CPU_POINTWISE_GROUPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_POINTWISE_GROUPS_INL_H_
#undef POLYCONV_CPU_POINTWISE_GROUPS_INL_H_
#else
#define POLYCONV_CPU_POINTWISE_GROUPS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/border.h"
#include "common/convolution.h"
#include "common/epilogue-inl.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/scheme_kernels.h"
#include "common/simd-inl.h"
#include "common/stages.h"
#include "pointwise/pointwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// In `conv`, in_channels are those of one group, which has as many outputs; out_channels are those of all groups.
// Weights: [vector of output channels][tap][rotation][lane].
class GroupedProduct {
  // Register tile: pixels of one row, or of two rows that share lines of input.
  static constexpr int kRows = 2;
#if HWY_TARGET <= HWY_AVX3
  static constexpr int kPixels = 7;
#else
  static constexpr int kPixels = 4;
#endif
  static constexpr int kBandFloats = 6 << 10;  // of the copied lines of a band, which stay in L1

 public:
  static std::size_t WeightsOfVector(const ConvolutionShape& conv) {
    return std::size_t{1} * conv.taps_h * conv.taps_w * conv.in_channels * kLanes;
  }

  GroupedProduct(const Convolution& conv, const float* weights)
      : conv_(conv),
        weights_(weights),
        vectors_(CeilDiv(conv.out_channels, kLanes)),
        width_(std::max(conv.out_width, kPixels)),
        lanes_(conv.in_channels * kLanes) {
    columns_.resize((width_ - 1) * conv.stride_w + (conv.taps_w - 1) * conv.dilation_w + 1, -1);
    const int read = (conv.out_width - 1) * conv.stride_w + (conv.taps_w - 1) * conv.dilation_w + 1;
    for (int j = 0; j < read; j++) columns_[j] = SourceIndex(conv.border, j - conv.left, conv.in_width);
    line_ = static_cast<std::ptrdiff_t>(columns_.size()) * kLanes;
    const int lines = static_cast<int>(kBandFloats / line_) - (conv.taps_h - 1) * conv.dilation_h - 1;
    band_rows_ = std::clamp(lines / conv.stride_h + 1, std::min(kRows, conv.out_height), conv.out_height);
    for (int d = 0; d < conv.in_channels; d++) {
      for (int lane = 0; lane < kLanes; lane++) lanes_[d * kLanes + lane] = Source(lane, d);
    }
  }

  void Run(const Runtime& runtime) const {
    const int bands = CeilDiv(conv_.out_height, band_rows_);
    Carver carver;
    const std::size_t lines = carver.Take(line_ * Lines(band_rows_));
    const std::size_t sums = carver.Take(std::size_t{1} * kRows * width_ * kLanes);
    runtime.parallel_for(std::int64_t{1} * conv_.batch * bands * vectors_, [&](std::int64_t begin, std::int64_t end) {
      const StageTimer timer(Stage::kProducts);
      float* scratch = Scratch::OfThread().Get(carver.size());
      for (std::int64_t task = begin; task < end; task++) {
        const int vector = static_cast<int>(task % vectors_), band = static_cast<int>(task / vectors_ % bands);
        RunBand(task / vectors_ / bands, band * band_rows_, vector, scratch + lines, scratch + sums);
      }
    });
  }

  // Weights of one vector of output channels.
  static void Pack(const Convolution& conv, int vector, float* target) {
    const int inputs = conv.in_channels;
    for (int r = 0; r < conv.taps_h; r++) {
      for (int s = 0; s < conv.taps_w; s++) {
        for (int d = 0; d < inputs; d++, target += kLanes) {
          for (int lane = 0; lane < kLanes; lane++) {
            const int output = vector * kLanes + lane, input = (lane + d) % inputs;
            target[lane] = output < conv.out_channels
                               ? conv.w[output * conv.w_out + input * conv.w_in + r * conv.w_row + s * conv.w_column]
                               : 0.0f;
          }
        }
      }
    }
  }

 private:
  // The lane that rotation d moves to `lane`.
  int Source(int lane, int d) const {
    const int first = lane / conv_.in_channels * conv_.in_channels;
    return first + (lane + d) % conv_.in_channels;
  }

  // Lines of input that a block of output rows reads.
  int Lines(int rows) const { return (rows - 1) * conv_.stride_h + (conv_.taps_h - 1) * conv_.dilation_h + 1; }

  void RunBand(std::int64_t image, int first, int vector, float* lines, float* sums) const {
    const int channel = vector * kLanes, channels = std::min(conv_.out_channels - channel, kLanes);
    const int rows = std::min(band_rows_, conv_.out_height - first);
    const float* x = conv_.x + image * conv_.x_batch + channel;
    for (int t = 0; t < Lines(rows); t++) {
      const int row = SourceIndex(conv_.border, first * conv_.stride_h + t - conv_.top, conv_.in_height);
      CopyLine(row < 0 ? nullptr : x + row * conv_.x_row, channels, lines + t * line_);
    }
    const float* weights = weights_ + vector * WeightsOfVector(conv_);
    const bool share = conv_.stride_h == 1 && conv_.dilation_h == 1;
    for (int row = 0, count; row < rows; row += count) {
      count = share && rows - row >= kRows ? kRows : 1;
      for (int j = 0; j < width_; j += kPixels) {
        const int begin = std::min(j, width_ - kPixels);  // the last tile may repeat some pixels
        const float* from = lines + row * conv_.stride_h * line_ + begin * conv_.stride_w * kLanes;
        if (count == kRows) {
          SumTile<kRows>(from, weights, sums + begin * kLanes);
        } else {
          SumTile<1>(from, weights, sums + begin * kLanes);
        }
      }
      Finish(image, first + row, count, channel, channels, sums);
    }
  }

  // With its border. `row`: null for zeros.
  void CopyLine(const float* row, int channels, float* to) const {
    for (const int column : columns_) {
      Floats pixel = hn::Zero(kFloats);
      if (row != nullptr && column >= 0) {
        const float* from = row + column * conv_.x_column;
        pixel = channels == kLanes ? Load(from) : LoadBetween(from, 0, channels);
      }
      StoreAligned(to, pixel);
      to += kLanes;
    }
  }

  template <int kCount>
  HWY_NOINLINE void SumTile(const float* x, const float* weights, float* sums) const {
    Floats sum[kCount][kPixels];
    POLYCONV_UNROLL
    for (int row = 0; row < kCount; row++) {
      POLYCONV_UNROLL
      for (int j = 0; j < kPixels; j++) sum[row][j] = hn::Zero(kFloats);
    }
    // Line t is tap row t of the first row and tap row t - 1 of the second.
    for (int t = 0; t < conv_.taps_h + kCount - 1; t++, x += conv_.dilation_h * line_) {
      if (kCount == 1 || t == 0) {
        AddLine<0, 0>(t, x, weights, sum);
      } else if (t == conv_.taps_h) {
        AddLine<kCount - 1, kCount - 1>(t, x, weights, sum);
      } else {
        AddLine<0, kCount - 1>(t, x, weights, sum);
      }
    }
    POLYCONV_UNROLL
    for (int row = 0; row < kCount; row++) {
      POLYCONV_UNROLL
      for (int j = 0; j < kPixels; j++) StoreAligned(sums + (row * width_ + j) * kLanes, sum[row][j]);
    }
  }

  template <int kFirst, int kLast, int kCount>
  HWY_INLINE void AddLine(int t, const float* x, const float* weights, Floats (&sum)[kCount][kPixels]) const {
    const std::ptrdiff_t tap_row = std::ptrdiff_t{1} * conv_.taps_w * conv_.in_channels * kLanes;
    const std::ptrdiff_t step = std::ptrdiff_t{1} * conv_.stride_w * kLanes;
    weights += t * tap_row;
    for (int s = 0; s < conv_.taps_w; s++, x += conv_.dilation_w * kLanes) {
      for (int d = 0; d < conv_.in_channels; d++, weights += kLanes) {
        const auto places = hn::SetTableIndices(kFloats, lanes_.data() + d * kLanes);
        Floats w[kCount];
        POLYCONV_UNROLL
        for (int row = kFirst; row <= kLast; row++) w[row] = hn::Load(kFloats, weights - row * tap_row);
        POLYCONV_UNROLL
        for (int j = 0; j < kPixels; j++) {
          const Floats rotated = hn::TableLookupLanes(hn::Load(kFloats, x + j * step), places);
          POLYCONV_UNROLL
          for (int row = kFirst; row <= kLast; row++) sum[row][j] = hn::MulAdd(rotated, w[row], sum[row][j]);
        }
      }
    }
  }

  // Writes whole rows of outputs.
  void Finish(std::int64_t image, int first, int rows, int channel, int channels, const float* sums) const {
    const Floats bias = conv_.bias == nullptr ? hn::Zero(kFloats) : LoadBetween(conv_.bias + channel, 0, channels);
    WithFinisher(conv_.epilogue, conv_.y, [&](const auto& finish) HWY_ATTR {
      for (int row = 0; row < rows; row++) {
        float* target = conv_.y + image * conv_.y_batch + (first + row) * conv_.y_row + channel;
        for (int j = 0; j < conv_.out_width; j++, target += conv_.y_column) {
          const Floats sum = hn::Add(bias, hn::Load(kFloats, sums + (row * width_ + j) * kLanes));
          const Floats finished = finish.Between(sum, target, 0, channels);
          if (channels == kLanes) {
            Store(target, finished);
          } else {
            StoreBetween(target, finished, 0, channels);
          }
        }
      }
    });
  }

  const Convolution& conv_;
  const float* weights_;
  const int vectors_, width_;  // width_: outputs of a row, at least those of a tile
  std::vector<int> columns_;   // of the source, by position in a line; -1: zeros
  std::vector<std::int32_t> lanes_;
  std::ptrdiff_t line_;  // floats
  int band_rows_;
};

inline std::size_t GroupsWeightsSize(const Convolution& conv) {
  return GroupedProduct::WeightsOfVector(conv) * CeilDiv(conv.out_channels, kLanes);
}

inline void PackGroupsWeights(const Convolution& conv, float* packed, const Runtime& runtime) {
  const StageTimer timer(Stage::kWeights);
  runtime.parallel_for(CeilDiv(conv.out_channels, kLanes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t v = begin; v < end; v++) {
      GroupedProduct::Pack(conv, static_cast<int>(v), packed + v * GroupedProduct::WeightsOfVector(conv));
    }
  });
}

inline void RunGroupsOfFew(const Convolution& conv, const Schedule&, const float* packed, const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  GroupedProduct(conv, packed).Run(runtime);
}

inline constexpr SchemeKernels kGroupsKernels = {&GroupsWeightsSize, &PackGroupsWeights,
                                                 [](const Convolution&) { return false; }, &RunGroupsOfFew,
                                                 [](int terms) { return terms; }};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
