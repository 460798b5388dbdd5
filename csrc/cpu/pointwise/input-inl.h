// Where the product finds its rows: the terms of output pixels, in place or in copies of a block of pixels.
#if defined(POLYCONV_CPU_POINTWISE_INPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_POINTWISE_INPUT_INL_H_
#undef POLYCONV_CPU_POINTWISE_INPUT_INL_H_
#else
#define POLYCONV_CPU_POINTWISE_INPUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/border.h"
#include "common/convolution.h"
#include "common/integers.h"
#include "common/rounding-inl.h"
#include "common/simd-inl.h"
#include "pointwise/pointwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

inline constexpr int kLine = 16;  // floats of a cache line

// Calls fn(image, line, first column, last column, pixel) for the lines of a block of output pixels.
template <class Fn>
HWY_INLINE void ForLines(const ConvolutionShape& conv, std::int64_t first, int pixels, const Fn& fn) {
  std::int64_t row = first / conv.out_width;
  int column = static_cast<int>(first % conv.out_width);
  for (int i = 0, last; i < pixels; row++, i += last - column, column = 0) {
    last = std::min(conv.out_width, column + pixels - i);
    fn(row / conv.out_height, static_cast<int>(row % conv.out_height), column, last, i);
  }
}

// Pixels in half precision as float32. `to`: addresses of their copies.
template <class T>
HWY_NOINLINE void WidenPixels(const float* const* from, int pixels, int channels, const float* const* to) {
  for (int i = 0; i < pixels; i++) WidenTo(const_cast<float*>(to[i]), reinterpret_cast<const T*>(from[i]), channels);
}

// Addresses of the terms of a block of pixels: [run][pixel]. Behind those of copies that are widened later are those of
// the pixels in half precision.
class InputRuns {
 public:
  InputRuns(const Convolution& conv, const JoinedInput* joined, Element type)
      : conv_(conv),
        joined_(joined),
        type_(type),
        copied_(joined == nullptr && CopiesInput(conv)),
        length_(conv.in_channels * (copied_ ? conv.taps_w : 1)),
        count_(conv.taps_h * (copied_ ? 1 : conv.taps_w)),
        columns_((conv.out_width - 1) * conv.stride_w + conv.taps_w) {}

  int length() const { return length_; }
  int count() const { return count_; }
  bool copied() const { return copied_; }
  bool joined() const { return joined_ != nullptr; }
  bool widened() const { return type_ != Element::kFloat; }
  Element type() const { return type_; }
  int addresses() const { return count_ + (widened() ? 1 : 0); }

  // Floats of the zeros or copies that blocks of `pixels` refer to.
  std::size_t Buffer(int pixels) const {
    if (joined() || widened()) return pixels * pitch();
    if (!copied_) return conv_.in_channels;
    const int lines = std::min(conv_.out_height, (pixels - 1) / conv_.out_width + 2);
    return static_cast<std::size_t>((lines - 1) * conv_.stride_h + conv_.taps_h) * line();
  }

  // `buffer`: zeros, if nothing is copied.
  void List(std::int64_t first, int pixels, float* buffer, const float** x) const {
    if (joined_ != nullptr) {
      ListJoined(first, pixels, buffer, x);
    } else if (widened()) {
      for (int i = 0; i < pixels; i++) x[i] = buffer + i * pitch();
      ListHalves(first, pixels, x + pixels);
    } else if (copied_) {
      ListCopies(first, pixels, buffer, x);
    } else {
      ListTaps(first, pixels, buffer, x);
    }
  }

  // Writes the copies of the pixels [first, last) of a block of `pixels`, whose addresses List has written.
  void Widen(const float* const* x, int pixels, int first, int last) const {
    const auto widen = type_ == Element::kFloat16 ? &WidenPixels<Float16> : &WidenPixels<Bfloat16>;
    widen(x + pixels + first, last - first, length_, x + first);
  }

 private:
  std::size_t line() const { return static_cast<std::size_t>(columns_) * conv_.in_channels; }

  // Floats between joined pixels: not a power of two, with which the pixels of a tile would share cache lines of L1.
  std::size_t pitch() const { return RoundUp(conv_.in_channels, kLine) + kLine; }

  void ListJoined(std::int64_t first, int pixels, float* joined, const float** x) const {
    ForLines(conv_, first, pixels, [&](std::int64_t image, int line, int column, int last, int i) {
      const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(line) * conv_.stride_h;
      for (; column < last; column++, i++) {
        float* to = joined + i * pitch();
        x[i] = to;
        int channel = 0;
        for (const JoinedInput::Part& part : joined_->parts) {
          const float* from =
              part.x + image * part.batch + row * part.row + std::ptrdiff_t{column} * conv_.stride_w * part.column;
          Normalise(from, channel, part.channels, to + channel);
          channel += part.channels;
        }
      }
    });
  }

  // Channels of one pixel. The last vector may extend into channels that are written later, or past the last one.
  HWY_INLINE void Normalise(const float* x, int channel, int count, float* to) const {
    const Floats least = Broadcast(joined_->least);
    const float *scale = joined_->scale + channel, *shift = joined_->shift + channel;
    int c = 0;
    for (; c + kLanes <= count; c += kLanes) {
      Store(to + c, hn::Max(least, hn::MulAdd(Load(x + c), Load(scale + c), Load(shift + c))));
    }
    if (const int rest = count - c; rest > 0) {
      const auto load = [&](const float* p) HWY_ATTR { return LoadBetween(p + c, 0, rest); };
      Store(to + c, hn::Max(least, hn::MulAdd(load(x), load(scale), load(shift))));
    }
  }

  void ListHalves(std::int64_t first, int pixels, const float** x) const {
    ForLines(conv_, first, pixels, [&](std::int64_t image, int line, int column, int last, int i) {
      const auto* halves = reinterpret_cast<const Bfloat16*>(conv_.x) + image * conv_.x_batch + line * conv_.x_row;
      for (; column < last; column++, i++) {
        x[i] = reinterpret_cast<const float*>(halves + column * conv_.x_column);
      }
    });
  }

  void ListTaps(std::int64_t first, int pixels, const float* zeros, const float** x) const {
    ForLines(conv_, first, pixels, [&](std::int64_t image, int line, int column, int last, int i) {
      const float** target = x + i;
      for (int r = 0; r < conv_.taps_h; r++) {
        const float* row = RowAt(image, line * conv_.stride_h + r * conv_.dilation_h);
        for (int s = 0; s < conv_.taps_w; s++, target += pixels) {
          const int shift = s * conv_.dilation_w - conv_.left;
          for (int j = column; j < last; j++) {
            const int from = SourceIndex(conv_.border, j * conv_.stride_w + shift, conv_.in_width);
            target[j - column] = row == nullptr || from < 0 ? zeros : row + from * conv_.x_column;
          }
        }
      }
    });
  }

  // The pixels are of one image.
  void ListCopies(std::int64_t first, int pixels, float* copies, const float** x) const {
    const int top = static_cast<int>(first / conv_.out_width % conv_.out_height) * conv_.stride_h;
    int copied = top;  // rows before this one
    ForLines(conv_, first, pixels, [&](std::int64_t image, int line, int column, int last, int i) {
      const int row = line * conv_.stride_h;
      for (copied = std::max(copied, row); copied < row + conv_.taps_h; copied++) {
        CopyRow(RowAt(image, copied), copies + (copied - top) * this->line());
      }
      for (int r = 0; r < conv_.taps_h; r++) {
        const float* from = copies + (row - top + r) * this->line();
        const float** target = x + static_cast<std::ptrdiff_t>(r) * pixels + i;
        for (int j = column; j < last; j++) target[j - column] = from + j * conv_.stride_w * conv_.in_channels;
      }
    });
  }

  // Row of the padded image. Null: zeros.
  const float* RowAt(std::int64_t image, int padded) const {
    const int row = SourceIndex(conv_.border, padded - conv_.top, conv_.in_height);
    return row < 0 ? nullptr : conv_.x + image * conv_.x_batch + row * conv_.x_row;
  }

  void CopyRow(const float* row, float* to) const {
    const int channels = conv_.in_channels;
    if (row == nullptr) {
      std::fill_n(to, line(), 0.0f);
      return;
    }
    const int begin = std::clamp(conv_.left, 0, columns_),
              end = std::clamp(conv_.left + conv_.in_width, begin, columns_);
    const auto outside = [&](int first, int last) {
      for (int j = first; j < last; j++) {
        const int from = SourceIndex(conv_.border, j - conv_.left, conv_.in_width);
        for (int c = 0; c < channels; c++) {
          to[j * channels + c] = from < 0 ? 0.0f : row[from * conv_.x_column + c * conv_.x_channel];
        }
      }
    };
    outside(0, begin);
    const float* inside = row + (begin - conv_.left) * conv_.x_column;
    if (conv_.x_channel == 1 && conv_.x_column == channels) {
      std::memcpy(to + begin * channels, inside, sizeof(float) * (end - begin) * channels);
    } else {
      int done = begin;
      if (channels == 3 && conv_.x_column == 1) {
        for (; done + kLanes <= end; done += kLanes, inside += kLanes) {
          hn::StoreInterleaved3(Load(inside), Load(inside + conv_.x_channel), Load(inside + 2 * conv_.x_channel),
                                kFloats, to + done * channels);
        }
      }
      for (int c = 0; c < channels; c++, inside += conv_.x_channel) {
        for (int j = done; j < end; j++) to[j * channels + c] = inside[(j - done) * conv_.x_column];
      }
    }
    outside(end, columns_);
  }

  const Convolution& conv_;
  const JoinedInput* joined_;  // null: conv_.x is the input
  const Element type_;         // of conv_.x; in half precision there is one tap
  const bool copied_;
  const int length_, count_, columns_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
