// Tiny operands: rows are scaled by a power of two where they are packed, and sums are scaled back where they are stored.
// Neither passes through memory once more. See bindings/denormals.h.
#if defined(POLYCONV_CPU_COMMON_TINY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_TINY_INL_H_
#undef POLYCONV_CPU_COMMON_TINY_INL_H_
#else
#define POLYCONV_CPU_COMMON_TINY_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/elements-inl.h"
#include "common/epilogue-inl.h"
#include "common/scaling.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Scales elements by 2^kTinyExponent, exactly.
class TinyScale {
 public:
  TinyScale() : seen_(hn::Zero(kWords)) {}

  // Whether an element was not tiny. Such tensors are not to be scaled, since others may overflow.
  bool SawOrdinary() const {
    return !hn::AllTrue(kWords, hn::Eq(hn::And(seen_, hn::Set(kWords, 0x40000000)), hn::Zero(kWords)));
  }

  // With denormals counted as zero, the product is right for all others. A denormal's mantissa, under an exponent that is
  // larger by kTinyExponent + 1, is its magnitude behind a leading one.
  HWY_INLINE Floats Up(Floats v) {
    const Words bits = hn::BitCast(kWords, v), zero = hn::Zero(kWords);
    const auto denormal = hn::Eq(hn::And(bits, hn::Set(kWords, 0x7F800000)), zero);
    const Words raised = hn::Add(bits, hn::Set(kWords, std::uint32_t{kTinyExponent + 1} << 23));
    const Words behind = hn::IfThenElse(denormal, raised, zero);
    const Floats leading = hn::BitCast(kFloats, hn::And(behind, hn::Set(kWords, 0xFF800000)));
    const Floats counted = hn::Sub(hn::BitCast(kFloats, behind), leading);
    const Floats scaled = hn::MulAdd(v, Broadcast(PowerOf(kTinyExponent)), counted);
    seen_ = hn::Or(seen_, hn::BitCast(kWords, scaled));
    return scaled;
  }

  // A row in memory. `step`: between its elements. The target is dense, with room for a vector behind it.
  HWY_NOINLINE void Up(const float* row, std::ptrdiff_t step, int count, float* target) {
    for (int i = 0; i < count && step != 1; i++) target[i] = row[i * step];
    if (step != 1) row = target;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) Store(target + i, Up(Load(row + i)));
    if (i < count) Store(target + i, Up(LoadBetween(row + i, 0, count - i)));
  }

 private:
  Words seen_;  // all bits of all results
};

// TinyScale's place where nothing is scaled.
struct NoScale {
  HWY_INLINE Floats Up(Floats v) const { return v; }
};

// Sums of tiny operands, in place: max(sum, 0 if ReLU) 2^-exponent, correctly rounded, also where it is denormal. The
// exponent is at most 2 kTinyExponent. There is room for a vector behind the last one.
inline HWY_NOINLINE void FinishTiny(const Tiny& tiny, Activation activation, float* sums, int count) {
  constexpr float kIntegers = 0x1p23f;  // from here on floats are integers, which denormal results are counted by
  const Floats normal_unit = Broadcast(PowerOf(-tiny.exponent)), unit = Broadcast(PowerOf(149 - tiny.exponent));
  const float infinity = std::numeric_limits<float>::infinity();
  const Floats low = Broadcast(activation == Activation::kRelu ? 0.0f : -infinity), integers = Broadcast(kIntegers);
  for (int i = 0; i < count; i += kLanes) {
    const Floats sum = Load(sums + i);
    const Floats v = hn::IfThenZeroElse(hn::Lt(sum, low), sum);  // NaN passes
    const Floats normal = hn::Mul(v, normal_unit);               // a zero of the same sign if it is denormal
    const Floats counted = hn::MulAdd(hn::Abs(v), unit, integers);
    const Words bits = hn::Sub(hn::BitCast(kWords, counted), hn::BitCast(kWords, integers));
    const auto is_zero = hn::RebindMask(kWords, hn::Eq(normal, hn::Zero(kFloats)));
    Store(sums + i, hn::BitCast(kFloats, hn::Or(hn::BitCast(kWords, normal), hn::IfThenElseZero(is_zero, bits))));
  }
}

// Finishes sums in a buffer if they are of tiny operands. Returns the epilogue that is left to do: denormal numbers are
// only to be copied after it.
template <class Convolution>
HWY_INLINE const Epilogue<float>& Finished(const Convolution& conv, float* sums, int count) {
  static constexpr Epilogue<float> kNothing{};
  if (HWY_LIKELY(conv.tiny.exponent == 0)) return conv.epilogue;
  FinishTiny(conv.tiny, conv.epilogue.activation, sums, count);
  return kNothing;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
