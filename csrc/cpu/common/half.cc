#include "common/half.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/half.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

inline constexpr hn::RebindToUnsigned<FloatTag> kBits{};
inline constexpr hn::Rebind<std::uint16_t, FloatTag> kHalves{};

#if HWY_TARGET > HWY_AVX2  // no F16C
inline float WidenOne(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFu, sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  const float scaled = static_cast<float>((magnitude & 0x3FFu) | (magnitude >= 0x400u ? 0x400u : 0u));
  const int exponent = std::max(1, static_cast<int>(magnitude >> 10));
  const float value = scaled * std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 102) << 23);  // 2^(e - 25)
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

inline std::uint16_t RoundOne(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}
#endif

struct Float16 {
#if HWY_TARGET <= HWY_AVX2
  static HWY_INLINE Floats Wide(const std::uint16_t* source) {
    const hn::Rebind<hwy::float16_t, FloatTag> tag;
    return hn::PromoteTo(kFloats, hn::BitCast(tag, hn::LoadU(kHalves, source)));
  }
  static HWY_INLINE void Store(Floats v, std::uint16_t* target) {
    const hn::Rebind<hwy::float16_t, FloatTag> tag;
    hn::StoreU(hn::BitCast(kHalves, hn::DemoteTo(tag, v)), kHalves, target);
  }
#else
  static HWY_INLINE Floats Wide(const std::uint16_t* source) {
    alignas(64) float wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = WidenOne(source[i]);
    return hn::Load(kFloats, wide);
  }
  static HWY_INLINE void Store(Floats v, std::uint16_t* target) {
    alignas(64) float wide[kLanes];
    hn::Store(v, kFloats, wide);
    for (int i = 0; i < kLanes; i++) target[i] = RoundOne(wide[i]);
  }
#endif
};

struct Bfloat16 {
  static HWY_INLINE Floats Wide(const std::uint16_t* source) {
    return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(kBits, hn::LoadU(kHalves, source))));
  }
  static HWY_INLINE void Store(Floats v, std::uint16_t* target) {
    const auto bits = hn::BitCast(kBits, v), high = hn::ShiftRight<16>(bits);
    const auto even = hn::And(high, hn::Set(kBits, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(even, hn::Set(kBits, 0x7FFF))));
    const auto quiet = hn::Or(high, hn::Set(kBits, 0x40));
    const auto found = hn::IfThenElse(hn::RebindMask(kBits, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(kHalves, hn::BitCast(hn::RebindToSigned<FloatTag>(), found)), kHalves, target);
  }
};

template <class Type>
void WidenAs(const HalfRuns& runs, const std::uint16_t* source, float* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.step, target += runs.length) {
    std::size_t i = 0;
    for (; i + kLanes <= runs.length; i += kLanes) Store(target + i, Type::Wide(source + i));
    if (i == runs.length) continue;
    std::uint16_t halves[kLanes] = {};
    float wide[kLanes];
    std::memcpy(halves, source + i, (runs.length - i) * sizeof *source);
    Store(wide, Type::Wide(halves));
    std::memcpy(target + i, wide, (runs.length - i) * sizeof *target);
  }
}

template <class Type>
void RoundAs(const HalfRuns& runs, const float* source, std::uint16_t* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.length, target += runs.step) {
    std::size_t i = 0;
    for (; i + kLanes <= runs.length; i += kLanes) Type::Store(Load(source + i), target + i);
    if (i == runs.length) continue;
    std::uint16_t halves[kLanes];
    float wide[kLanes] = {};
    std::memcpy(wide, source + i, (runs.length - i) * sizeof *source);
    Type::Store(Load(wide), halves);
    std::memcpy(target + i, halves, (runs.length - i) * sizeof *target);
  }
}

void WidenHere(HalfType type, const HalfRuns& runs, const std::uint16_t* source, float* target) {
  (type == HalfType::kFloat16 ? WidenAs<Float16> : WidenAs<Bfloat16>)(runs, source, target);
}

void RoundHere(HalfType type, const HalfRuns& runs, const float* source, std::uint16_t* target) {
  (type == HalfType::kFloat16 ? RoundAs<Float16> : RoundAs<Bfloat16>)(runs, source, target);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

void Widen(InstructionSet set, HalfType type, const HalfRuns& runs, const std::uint16_t* source, float* target) {
  POLYCONV_CALL_TARGET(set, WidenHere, type, runs, source, target);
}

void Round(InstructionSet set, HalfType type, const HalfRuns& runs, const float* source, std::uint16_t* target) {
  POLYCONV_CALL_TARGET(set, RoundHere, type, runs, source, target);
}

}  // namespace polyconv
#endif
