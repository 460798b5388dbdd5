// Input and output rows of the depthwise kernels.
#if defined(POLYCONV_CPU_DEPTHWISE_LINES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_LINES_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_LINES_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_LINES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "common/integers.h"
#include "common/padded_line.h"
#include "common/simd-inl.h"
#include "common/tiny-inl.h"
#include "depthwise/depthwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Rows that share their input. Outputs u, u + output_step, u + 2 output_step, ... and the taps r, r + tap_step, ... of
// one of tap_step classes read the same source rows, `period` apart: row t of them is read by tap q of output t - q.
// Stride and dilation only change these steps.
struct SharedRows {
  int period, output_step, tap_step;

  explicit SharedRows(const DepthwiseAxis& axis)
      : period(std::lcm(axis.stride, axis.dilation)),
        output_step(period / axis.stride),
        tap_step(period / axis.dilation) {}

  int TapsOf(int tap_class, int taps) const { return taps <= tap_class ? 0 : CeilDiv(taps - tap_class, tap_step); }
};

// Prefetch distance [floats]: a few rows of a small image, which are too short for the hardware prefetcher.
inline constexpr int kPrefetch = 1024;

// Padded lines of floats, with room for whole vectors past the end of each residue.
class LinePacker {
 public:
  LinePacker(const DepthwiseAxis& width, Border border)
      : layout_(width.stride, width.before, width.source, RoomFor(width)), border_(border), reach_(width.reach) {}

  const LineLayout& layout() const { return layout_; }

  // An odd number of cache lines, against conflicts of neighbouring lines in cache sets.
  std::size_t pitch() const { return (layout_.size() + 31) / 32 * 32 + 16; }

  // Call once before the first Pack: positions that no pixel is written to stay zero.
  void Clear(float* lines, std::size_t count) const { std::memset(lines, 0, count * pitch() * sizeof(float)); }

  HWY_NOINLINE void Pack(const float* row, std::ptrdiff_t step, float* line) const {
    if (step != 1 || layout_.stride > 2 || layout_.before < 0) {
      FillLine(layout_, border_, row, step, line);
    } else {
      if (layout_.stride == 1) {
        CopyDense(row, line + layout_.before, NoScale());
      } else {
        CopyAlternating(row, line, NoScale());
      }
      if (border_ != Border::kZeros) PackBorder(row, line);
    }
  }

  // Tiny numbers. `copy` has room for a row and a vector.
  HWY_NOINLINE void Pack(const float* row, std::ptrdiff_t step, float* line, TinyScale& scale, float* copy) const {
    if (step != 1 || layout_.stride > 2 || layout_.before < 0 || border_ != Border::kZeros) {
      scale.Up(row, step, layout_.width, copy);
      FillLine(layout_, border_, copy, 1, line);
    } else if (layout_.stride == 1) {
      CopyDense(row, line + layout_.before, scale);
    } else {
      CopyAlternating(row, line, scale);
    }
  }

 private:
  static int RoomFor(const DepthwiseAxis& width) {
    return std::max(width.reach, width.before + width.source) + 2 * kLanes * width.stride;
  }

  template <class Scale>
  HWY_INLINE void CopyDense(const float* row, float* line, Scale&& scale) const {
    int i = 0;
    for (; i + kLanes <= layout_.width; i += kLanes) {
      __builtin_prefetch(row + i + kPrefetch);
      Store(line + i, scale.Up(Load(row + i)));
    }
    if (i < layout_.width) Store(line + i, scale.Up(LoadBetween(row + i, 0, layout_.width - i)));
  }

  // Separates even and odd columns.
  template <class Scale>
  HWY_INLINE void CopyAlternating(const float* row, float* line, Scale&& scale) const {
    float* first = line + layout_.OffsetOf(layout_.before);
    float* second = line + layout_.OffsetOf(layout_.before + 1);
    Floats pair[2];
    int i = 0;
    for (; i + 2 * kLanes <= layout_.width; i += 2 * kLanes) {
      __builtin_prefetch(row + i + kPrefetch);
      __builtin_prefetch(row + i + kLanes + kPrefetch);
      Deinterleave<2>(row + i, pair);
      Store(first + i / 2, scale.Up(pair[0]));
      Store(second + i / 2, scale.Up(pair[1]));
    }
    const int rest = layout_.width - i;
    if (rest == 0) return;
    const Floats low = LoadBetween(row + i, 0, std::min(rest, kLanes));
    const Floats high = rest > kLanes ? LoadBetween(row + i + kLanes, 0, rest - kLanes) : hn::Zero(kFloats);
    Store(first + i / 2, scale.Up(hn::ConcatEven(kFloats, high, low)));
    Store(second + i / 2, scale.Up(hn::ConcatOdd(kFloats, high, low)));
  }

  void PackBorder(const float* row, float* line) const {
    const auto fill = [&](int position) {
      line[layout_.OffsetOf(position)] = row[SourceIndex(border_, position - layout_.before, layout_.width)];
    };
    for (int position = 0; position < layout_.before; position++) fill(position);
    for (int position = layout_.before + layout_.width; position < reach_; position++) fill(position);
  }

  LineLayout layout_;
  Border border_;
  int reach_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
