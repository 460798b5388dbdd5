// Tensor elements as vectors of floats: half precision is widened when it is loaded and rounded once when it is stored.
#if defined(POLYCONV_CPU_COMMON_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_ELEMENTS_INL_H_
#undef POLYCONV_CPU_COMMON_ELEMENTS_INL_H_
#else
#define POLYCONV_CPU_COMMON_ELEMENTS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "common/elements.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

using WordTag = hn::RebindToUnsigned<FloatTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;
inline constexpr WordTag kWords{};
inline constexpr HalfTag kHalves{};
using Words = hn::Vec<WordTag>;
using Halves = hn::Vec<HalfTag>;

HWY_INLINE Floats Widen(Halves v, Bfloat16) {
  return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(kWords, v)));
}

// To nearest, ties to even. NaN stays NaN.
HWY_INLINE Halves Narrow(Floats v, Bfloat16) {
  const Words bits = hn::BitCast(kWords, v);
  const Words odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kWords, 1));
  const Words rounded = hn::Add(bits, hn::Add(odd, hn::Set(kWords, 0x7FFF)));
  const Words quiet = hn::Or(bits, hn::Set(kWords, 0x00400000));
  const Words chosen = hn::IfThenElse(hn::RebindMask(kWords, hn::IsNaN(v)), quiet, rounded);
  return hn::TruncateTo(kHalves, hn::ShiftRight<16>(chosen));
}

#if HWY_TARGET <= HWY_AVX2
using Float16Tag = hn::Rebind<hwy::float16_t, FloatTag>;

HWY_INLINE Floats Widen(Halves v, Float16) {
  return hn::PromoteTo(kFloats, hn::BitCast(Float16Tag(), v));
}

HWY_INLINE Halves Narrow(Floats v, Float16) {
  return hn::BitCast(kHalves, hn::DemoteTo(Float16Tag(), v));
}
#else
// Without instructions for it: float arithmetic shifts exponents and rounds mantissas.
HWY_INLINE Floats Widen(Halves v, Float16) {
  const Words bits = hn::ShiftLeft<16>(hn::PromoteTo(kWords, v));
  const Words sign = hn::And(bits, hn::Set(kWords, 0x80000000u)), twice = hn::Add(bits, bits);
  const Words shifted = hn::Add(hn::ShiftRight<4>(twice), hn::Set(kWords, 0xE0u << 23));
  const Floats normal = hn::Mul(hn::BitCast(kFloats, shifted), Broadcast(0x1.0p-112f));
  const Words tiny = hn::Or(hn::ShiftRight<17>(twice), hn::Set(kWords, 126u << 23));
  const Floats subnormal = hn::Sub(hn::BitCast(kFloats, tiny), Broadcast(0.5f));
  const auto is_tiny = hn::Lt(twice, hn::Set(kWords, 1u << 27));
  const Floats magnitude = hn::IfThenElse(hn::RebindMask(kFloats, is_tiny), subnormal, normal);
  return hn::BitCast(kFloats, hn::Or(sign, hn::BitCast(kWords, magnitude)));
}

HWY_INLINE Halves Narrow(Floats v, Float16) {
  const Words bits = hn::BitCast(kWords, v);
  const Words sign = hn::And(bits, hn::Set(kWords, 0x80000000u)), twice = hn::Add(bits, bits);
  const Floats bounded = hn::Mul(hn::Mul(hn::Abs(v), Broadcast(0x1.0p+112f)), Broadcast(0x1.0p-110f));
  const Words exponent = hn::Max(hn::And(twice, hn::Set(kWords, 0xFF000000u)), hn::Set(kWords, 0x71000000u));
  const Words bias = hn::Add(hn::ShiftRight<1>(exponent), hn::Set(kWords, 0x07800000u));
  const Words sum = hn::BitCast(kWords, hn::Add(hn::BitCast(kFloats, bias), bounded));
  const Words number = hn::Add(hn::And(hn::ShiftRight<13>(sum), hn::Set(kWords, 0x7C00)),  //
                               hn::And(sum, hn::Set(kWords, 0x0FFF)));
  const Words chosen = hn::IfThenElse(hn::RebindMask(kWords, hn::IsNaN(v)), hn::Set(kWords, 0x7E00), number);
  return hn::TruncateTo(kHalves, hn::Or(hn::ShiftRight<16>(sign), chosen));
}
#endif

HWY_INLINE Floats LoadWide(const float* p) {
  return Load(p);
}
template <class T>
HWY_INLINE Floats LoadWide(const T* p) {
  return Widen(hn::LoadU(kHalves, &p->bits), T());
}

// The first `count` elements, and zeros.
template <class T>
HWY_INLINE Floats LoadSome(const T* p, int count) {
  T copy[kLanes] = {};
  std::memcpy(copy, p, sizeof(T) * count);
  return LoadWide(copy);
}
HWY_INLINE Floats LoadSome(const float* p, int count) {
  return LoadBetween(p, 0, count);
}

HWY_INLINE void StoreNarrow(float* p, Floats v) {
  Store(p, v);
}
template <class T>
HWY_INLINE void StoreNarrow(T* p, Floats v) {
  hn::StoreU(Narrow(v, T()), kHalves, &p->bits);
}

// Non-temporal; p is aligned to kLanes elements.
HWY_INLINE void StreamNarrow(float* p, Floats v) {
  hn::Stream(v, kFloats, p);
}
template <class T>
HWY_INLINE void StreamNarrow(T* p, Floats v) {
  hn::Stream(Narrow(v, T()), kHalves, &p->bits);
}

// The first `count` elements only.
template <class T>
HWY_INLINE void StoreSome(T* p, Floats v, int count) {
  T copy[kLanes];
  StoreNarrow(copy, v);
  std::memcpy(p, copy, sizeof(T) * count);
}
HWY_INLINE void StoreSome(float* p, Floats v, int count) {
  StoreBetween(p, v, 0, count);
}

template <class T>
HWY_INLINE float One(const T* p) {
  return hn::GetLane(LoadSome(p, 1));
}
HWY_INLINE float One(const float* p) {
  return *p;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
