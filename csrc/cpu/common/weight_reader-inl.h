// Reads weights as vectors of output channels, one per tap of each input channel.
// In memory, taps (in channels_last, input channels; in an input gradient, perhaps output channels) are contiguous. So
// kLanes rows, one per output channel, are read as vectors and transposed. Element by element, the weights of a layer
// with a small image would take longer than its convolution.
#if defined(POLYCONV_CPU_COMMON_WEIGHT_READER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_WEIGHT_READER_INL_H_
#undef POLYCONV_CPU_COMMON_WEIGHT_READER_INL_H_
#else
#define POLYCONV_CPU_COMMON_WEIGHT_READER_INL_H_
#endif

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "common/convolution.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// `count` taps along an axis, from `first`, `step` apart.
struct TapRange {
  int first, count, step;
};

class WeightReader {
 public:
  // Taps are numbered r * tap_pitch + s.
  WeightReader(const ConvolutionShape& conv, const float* w, TapRange rows, TapRange columns, int tap_pitch)
      : w_(w + rows.first * conv.w_row + columns.first * conv.w_column),
        out_channels_(conv.out_channels),
        out_pitch_(conv.w_out),
        in_pitch_(conv.w_in),
        row_pitch_(rows.step * conv.w_row),
        column_pitch_(columns.step * conv.w_column),
        rows_(rows.count),
        columns_(columns.count),
        tap_pitch_(tap_pitch) {
    lowest_ = std::min<std::ptrdiff_t>(0, (rows_ - 1) * row_pitch_) +
              std::min<std::ptrdiff_t>(0, (columns_ - 1) * column_pitch_);
    const std::ptrdiff_t span = std::abs((rows_ - 1) * row_pitch_) + std::abs((columns_ - 1) * column_pitch_) + 1;
    if (out_pitch_ == 1) {
      order_ = Order::kOutputs;
    } else if (in_pitch_ == 1) {
      order_ = Order::kInputs;
    } else if (span <= kWidestHoles * rows_ * columns_) {
      order_ = Order::kTaps;
      tap_at_.assign(static_cast<std::size_t>(span), -1);
      ForTaps([&](int tap, std::ptrdiff_t at) {
        int& there = tap_at_[static_cast<std::size_t>(at - lowest_)];
        if (there >= 0) order_ = Order::kAny;  // several taps at one address: an expanded weight
        there = tap;
      });
    }
  }

  // Calls put(channel, tap, vector) for the input channels [first, last), in no particular order. Lanes behind the last
  // output channel are zeros.
  template <class Put>
  HWY_INLINE void Read(int first_output, int first, int last, const Put& put) const {
    const float* w = w_ + first_output * out_pitch_;
    const int lanes = std::min(kLanes, out_channels_ - first_output);
    switch (order_) {
      case Order::kOutputs:
        return ForTaps([&](int tap, std::ptrdiff_t at) {
          for (int c = first; c < last; c++) put(c, tap, LoadFirst(w + at + c * in_pitch_, lanes));
        });
      case Order::kInputs:
        return ForTaps([&](int tap, std::ptrdiff_t at) {
          Turn(w + at + first, lanes, last - first, [&](int i, Floats v) { put(first + i, tap, v); });
        });
      case Order::kTaps:
        return ReadTaps(w + lowest_, lanes, first, last, put);
      case Order::kAny:
        return ForTaps([&](int tap, std::ptrdiff_t at) {
          for (int c = first; c < last; c++) put(c, tap, LoadApart(w + at + c * in_pitch_, lanes));
        });
    }
  }

 private:
  // Dimension that is contiguous in memory.
  enum class Order { kOutputs, kInputs, kTaps, kAny };

  // Most floats that are read per tap, those skipped between taps included: still faster than one tap at a time.
  static constexpr int kWidestHoles = 4;

  // Prefetch distance [floats].
  static constexpr int kAhead = 64;

  template <class Fn>
  HWY_INLINE void ForTaps(const Fn& fn) const {
    for (int r = 0; r < rows_; r++) {
      for (int s = 0; s < columns_; s++) fn(r * tap_pitch_ + s, r * row_pitch_ + s * column_pitch_);
    }
  }

  // The input channels of a dense weight form one long row. Otherwise each channel is a separate row.
  template <class Put>
  HWY_INLINE void ReadTaps(const float* w, int lanes, int first, int last, const Put& put) const {
    const int span = static_cast<int>(tap_at_.size());
    const bool dense = in_pitch_ == span;
    const int together = dense ? last - first : 1;
    for (int c = first; c < last; c += together) {
      int channel = c, at = 0;
      Turn(w + c * in_pitch_, lanes, together * span, [&](int, Floats v) {
        if (tap_at_[at] >= 0) put(channel, tap_at_[at], v);
        if (++at == span) at = 0, channel++;
      });
    }
  }

  // Calls put(i, vector of element i of every lane's row), in order.
  template <class Put>
  HWY_INLINE void Turn(const float* rows, int lanes, int length, const Put& put) const {
    for (int first = 0; first < length; first += kLanes) {
      const int count = std::min(kLanes, length - first);
      Floats v[kLanes];
      POLYCONV_UNROLL
      for (int lane = 0; lane < kLanes; lane++) {
        const float* row = rows + lane * out_pitch_ + first;
        hwy::Prefetch(row + kAhead);  // too many streams for the hardware prefetcher
        v[lane] = lane < lanes ? LoadFirst(row, count) : hn::Zero(kFloats);
      }
      Transpose(v);
      for (int i = 0; i < count; i++) put(first + i, v[i]);
    }
  }

  static HWY_INLINE Floats LoadFirst(const float* p, int count) {
    return count == kLanes ? Load(p) : LoadBetween(p, 0, count);
  }

  HWY_INLINE Floats LoadApart(const float* p, int lanes) const {
    HWY_ALIGN float copy[kLanes] = {};
    for (int lane = 0; lane < lanes; lane++) copy[lane] = p[lane * out_pitch_];
    return hn::Load(kFloats, copy);
  }

  const float* w_;  // address of the first tap
  int out_channels_;
  std::ptrdiff_t out_pitch_, in_pitch_, row_pitch_, column_pitch_;
  int rows_, columns_, tap_pitch_;
  Order order_ = Order::kAny;
  std::ptrdiff_t lowest_;    // offset of the tap with the lowest address from the first tap
  std::vector<int> tap_at_;  // tap number by address from there, or -1
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
