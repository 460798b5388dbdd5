// Conversion of rows of elements between float32 and half precision.
#if defined(POLYCONV_CPU_COMMON_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_ROUNDING_INL_H_
#undef POLYCONV_CPU_COMMON_ROUNDING_INL_H_
#else
#define POLYCONV_CPU_COMMON_ROUNDING_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "common/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Two vectors.
template <class T>
HWY_INLINE void StoreNarrow(T* p, Floats low, Floats high) {
  StoreNarrow(p, low);
  StoreNarrow(p + kLanes, high);
}
// Upper halves are taken from both at once. NaN, which rounding may make an infinity, is rare: it has a branch.
HWY_INLINE void StoreNarrow(Bfloat16* p, Floats low, Floats high) {
  if (HWY_UNLIKELY(!hn::AllFalse(kFloats, hn::IsNaN(hn::Add(low, high))))) {
    StoreNarrow(p, low);
    StoreNarrow(p + kLanes, high);
    return;
  }
  constexpr hn::Repartition<std::uint16_t, FloatTag> kPairs{};
  const auto rounded = [&](Floats v) HWY_ATTR {
    const Words bits = hn::BitCast(kWords, v), odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kWords, 1));
    return hn::BitCast(kPairs, hn::Add(bits, hn::Add(odd, hn::Set(kWords, 0x7FFF))));
  };
  hn::StoreU(hn::ConcatOdd(kPairs, rounded(high), rounded(low)), kPairs, &p->bits);
}

// Rounds neighbouring elements. The last vector overlaps the one before it if there is one.
template <class T>
HWY_INLINE void RoundTo(T* target, const float* source, std::ptrdiff_t count) {
  std::ptrdiff_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) StoreNarrow(target + i, Load(source + i), Load(source + i + kLanes));
  if (i + kLanes <= count) StoreNarrow(target + i, Load(source + i)), i += kLanes;
  if (i == count) return;
  if (count >= kLanes) {
    StoreNarrow(target + count - kLanes, Load(source + count - kLanes));
  } else {
    StoreSome(target, LoadSome(source, static_cast<int>(count)), static_cast<int>(count));
  }
}

// Widens neighbouring elements. The last vector overlaps the one before it if there is one.
template <class T>
HWY_INLINE void WidenTo(float* target, const T* source, std::ptrdiff_t count) {
  std::ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(target + i, LoadWide(source + i));
  const int rest = static_cast<int>(count - i);
  if (rest > 0 && i > 0) {
    Store(target + i + rest - kLanes, LoadWide(source + i + rest - kLanes));
  } else if (rest > 0) {
    StoreSome(target, LoadSome(source, rest), rest);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
