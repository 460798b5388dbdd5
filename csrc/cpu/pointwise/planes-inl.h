// 1x1 convolutions in half precision of planes (NCHW): lanes of a vector hold pixels. Pixels are the panels of the
// product's second factor, widened while they are packed; rows of its first factor are those of the weight. Neither
// side is transposed, and sums are rounded by rows.
#if defined(POLYCONV_CPU_POINTWISE_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_POINTWISE_PLANES_INL_H_
#undef POLYCONV_CPU_POINTWISE_PLANES_INL_H_
#else
#define POLYCONV_CPU_POINTWISE_PLANES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/convolution.h"
#include "common/epilogue-inl.h"
#include "common/rounding-inl.h"
#include "common/scaling.h"
#include "common/simd-inl.h"
#include "common/stages.h"
#include "pointwise/pointwise.h"
#include "pointwise/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// A vector may be stored beyond the end of its row: the next row is written later. The last one has no next.
template <class T>
HWY_NOINLINE void PackPlanesAs(const Convolution& conv, const PlaneRuns& x, float* packed) {
  struct Part {
    const T* from;
    float* to;
    int count, room;  // pixels, and floats up to the end of the row
    int width;        // of a row
  };
  const Panels panels(conv);
  std::vector<Part> parts;
  int panel = 0, column = 0;
  const auto width = [&] { return (panels.First(panel + 1) - panels.First(panel)) * kLanes; };
  for (PlaneRuns::Run run : x.runs) {
    for (int count; run.count > 0; run.from += count, run.count -= count, column += count) {
      if (column == width()) panel++, column = 0;
      count = std::min(run.count, width() - column);
      float* to = packed + std::size_t{1} * panels.First(panel) * kLanes * panels.terms + column;
      parts.push_back({static_cast<const T*>(x.data) + run.from, to, count, width() - column, width()});
    }
  }
  const T* end = static_cast<const T*>(x.end);
  for (int term = 0; term < panels.terms; term++) {
    if (column % kLanes != 0) {  // lanes without a pixel
      const Part& last = parts.back();
      Store(last.to + last.room - kLanes, hn::Zero(kFloats));
    }
    for (Part& part : parts) {
      int i = 0;
      for (; i + kLanes <= part.count; i += kLanes) Store(part.to + i, LoadWide(part.from + i));
      if (i < part.count) {
        const Floats rest =
            end - part.from < i + kLanes ? LoadSome(part.from + i, part.count - i) : LoadWide(part.from + i);
        if (term + 1 < panels.terms || i + kLanes <= part.room) {
          Store(part.to + i, rest);
        } else {
          StoreBetween(part.to + i, rest, 0, part.count - i);
        }
      }
      part.from += x.channel, part.to += part.width;
    }
  }
}

inline int PackPlanes(const Convolution& conv, const PlaneRuns& x, float* packed) {
  const StageTimer timer(Stage::kGather);
  const auto pack = x.type == Element::kFloat16 ? &PackPlanesAs<Float16> : &PackPlanesAs<Bfloat16>;
  pack(conv, x, packed);
  return Normalise(packed, static_cast<std::int64_t>(Panels(conv).size()));
}

template <class T>
HWY_NOINLINE void RoundRowAs(const PlaneRuns& y, std::ptrdiff_t channel, const float* sums) {
  T* row = static_cast<T*>(y.data) + channel * y.channel;
  for (const PlaneRuns::Run& run : y.runs) {
    RoundTo(row + run.from, sums, run.count);
    sums += run.count;
  }
}

// Adds the bias and applies the activation of conv to its sums, and rounds them.
inline void RoundRows(const Convolution& conv, const PlaneRuns& y) {
  const StageTimer timer(Stage::kWrite);
  const Epilogue<float>& epilogue = conv.epilogue;
  const bool finishes = conv.bias != nullptr || epilogue.activation != Activation::kNone;
  const auto round = y.type == Element::kFloat16 ? &RoundRowAs<Float16> : &RoundRowAs<Bfloat16>;
  for (int row = 0; row < conv.out_width; row++) {
    float* sums = conv.y + row * conv.y_column;
    if (finishes) FinishSums(epilogue, conv.bias == nullptr ? 0.0f : conv.bias[row], sums, conv.out_channels);
    round(y, row, sums);
  }
}

inline constexpr HalfKernels kHalfKernels = {&RunHalfPointwise, &PackPlanes, &RoundRows};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
