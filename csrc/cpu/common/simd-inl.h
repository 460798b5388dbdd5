// Vectors of floats at the width of the instruction set, and their rearrangements.
#if defined(POLYCONV_CPU_COMMON_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_SIMD_INL_H_
#undef POLYCONV_CPU_COMMON_SIMD_INL_H_
#else
#define POLYCONV_CPU_COMMON_SIMD_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>

#define POLYCONV_UNROLL _Pragma("GCC unroll 16")

// Vector registers of the instruction set, for which register tiles are cut.
#undef POLYCONV_REGISTERS
#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
#define POLYCONV_REGISTERS 32
#else
#define POLYCONV_REGISTERS 16
#endif

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Floats = hn::Vec<FloatTag>;
inline constexpr FloatTag kFloats{};
inline constexpr int kLanes = hn::MaxLanes(FloatTag());

HWY_INLINE Floats Load(const float* p) {
  return hn::LoadU(kFloats, p);
}
HWY_INLINE void Store(float* p, Floats v) {
  hn::StoreU(v, kFloats, p);
}
HWY_INLINE void StoreAligned(float* p, Floats v) {
  hn::Store(v, kFloats, p);
}
HWY_INLINE Floats Broadcast(float value) {
  return hn::Set(kFloats, value);
}

#if HWY_TARGET == HWY_NEON
// NEON multiplies by a lane of a vector. Broadcasting a factor would take one of the pipelines that multiply.
template <int kLane>
HWY_INLINE Floats MulAddLane(Floats factors, Floats v, Floats sum) {
  return Floats(vfmaq_laneq_f32(sum.raw, v.raw, factors.raw, kLane));
}

// sums[i] += factors[i] * in, for the rows i of a tile from kLane on.
template <int kVectors, int kLane = 0>
HWY_INLINE void AddRows(Floats factors, const Floats (&in)[kVectors], Floats (*sums)[kVectors]) {
  POLYCONV_UNROLL
  for (int v = 0; v < kVectors; v++) sums[kLane][v] = MulAddLane<kLane>(factors, in[v], sums[kLane][v]);
  if constexpr (kLane + 1 < kLanes) AddRows<kVectors, kLane + 1>(factors, in, sums);
}

// sums[i] += factors[i][t] * weights[t], for all rows i and the terms t from kLane on.
template <int kRows, int kVectors, int kLane = 0>
HWY_INLINE void AddTerms(const Floats (&factors)[kRows], const float* HWY_RESTRICT weights,
                         Floats (&sums)[kRows][kVectors]) {
  Floats w[kVectors];
  POLYCONV_UNROLL
  for (int v = 0; v < kVectors; v++) w[v] = Load(weights + (kLane * kVectors + v) * kLanes);
  POLYCONV_UNROLL
  for (int i = 0; i < kRows; i++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) sums[i][v] = MulAddLane<kLane>(factors[i], w[v], sums[i][v]);
  }
  if constexpr (kLane + 1 < kLanes) AddTerms<kRows, kVectors, kLane + 1>(factors, weights, sums);
}
#endif

// Loads the lanes [first, last), and zeros elsewhere. Memory outside of them is not accessed.
HWY_INLINE Floats LoadBetween(const float* p, int first, int last) {
#if HWY_TARGET <= HWY_AVX2
  return hn::MaskedLoad(hn::AndNot(hn::FirstN(kFloats, first), hn::FirstN(kFloats, last)), kFloats, p);
#else
  alignas(16) float copy[kLanes] = {};
  for (int i = first; i < last; i++) copy[i] = p[i];
  return hn::Load(kFloats, copy);
#endif
}

// Stores the lanes [first, last) only.
HWY_INLINE void StoreBetween(float* p, Floats v, int first, int last) {
#if HWY_TARGET <= HWY_AVX2
  hn::BlendedStore(v, hn::AndNot(hn::FirstN(kFloats, first), hn::FirstN(kFloats, last)), kFloats, p);
#else
  alignas(16) float copy[kLanes];
  hn::Store(v, kFloats, copy);
  for (int i = first; i < last; i++) p[i] = copy[i];
#endif
}

// Interleaves to a0 b0 a1 b1 ..., in two vectors.
HWY_INLINE void Zip(Floats a, Floats b, Floats* first, Floats* second) {
#if HWY_TARGET <= HWY_AVX3
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  *first = Floats{_mm512_permutex2var_ps(a.raw, low, b.raw)};
  *second = Floats{_mm512_permutex2var_ps(a.raw, high, b.raw)};
#else
  const Floats low = hn::InterleaveLower(kFloats, a, b);
  const Floats high = hn::InterleaveUpper(kFloats, a, b);
#if HWY_TARGET <= HWY_AVX2  // interleaving works within 128-bit blocks
  *first = hn::ConcatLowerLower(kFloats, high, low);
  *second = hn::ConcatUpperUpper(kFloats, high, low);
#else
  *first = low;
  *second = high;
#endif
#endif
}

#if HWY_TARGET <= HWY_AVX3
// Three streams take two permutations per vector with AVX-512, about half of what Highway's generic code takes.
struct ThreeWay {
  // Sort: lane l of stream j is float 3 l + j, from the first two vectors or from the third.
  // Merge: lane l of vector j is float 16 j + l, from the first two streams or from the third.
  alignas(64) int sort_first[3][16], sort_last[3][16], merge_first[3][16], merge_last[3][16];

  constexpr ThreeWay() : sort_first(), sort_last(), merge_first(), merge_last() {
    for (int j = 0; j < 3; j++) {
      for (int l = 0; l < 16; l++) {
        const int from = 3 * l + j;
        sort_first[j][l] = from < 32 ? from : 0;
        sort_last[j][l] = from < 32 ? l : from - 32 + 16;
        const int stream = (16 * j + l) % 3, lane = (16 * j + l) / 3;
        merge_first[j][l] = stream < 2 ? 16 * stream + lane : 0;
        merge_last[j][l] = stream < 2 ? l : 16 + lane;
      }
    }
  }
};
inline constexpr ThreeWay kThreeWay;

HWY_INLINE void PermuteThree(const Floats* in, const int (&first)[3][16], const int (&last)[3][16], Floats* out) {
  POLYCONV_UNROLL
  for (int j = 0; j < 3; j++) {
    const __m512 two = _mm512_permutex2var_ps(in[0].raw, _mm512_load_si512(first[j]), in[1].raw);
    out[j] = Floats{_mm512_permutex2var_ps(two, _mm512_load_si512(last[j]), in[2].raw)};
  }
}
#endif

// Splits kStreams * kLanes consecutive floats: stream j gets every kStreams-th float from the j-th on.
template <int kStreams>
HWY_INLINE void Deinterleave(const float* source, Floats* streams) {
  if constexpr (kStreams == 1) {
    streams[0] = Load(source);
  } else if constexpr (kStreams == 3) {
#if HWY_TARGET <= HWY_AVX3
    const Floats in[3] = {Load(source), Load(source + kLanes), Load(source + 2 * kLanes)};
    PermuteThree(in, kThreeWay.sort_first, kThreeWay.sort_last, streams);
#else
    hn::LoadInterleaved3(kFloats, source, streams[0], streams[1], streams[2]);
#endif
  } else {
    constexpr int kHalf = kStreams / 2;
    Floats low[kHalf], high[kHalf];
    Deinterleave<kHalf>(source, low);
    Deinterleave<kHalf>(source + kHalf * kLanes, high);
    POLYCONV_UNROLL
    for (int j = 0; j < kHalf; j++) {
      streams[j] = hn::ConcatEven(kFloats, high[j], low[j]);
      streams[j + kHalf] = hn::ConcatOdd(kFloats, high[j], low[j]);
    }
  }
}

// The inverse of Deinterleave.
template <int kStreams>
HWY_INLINE void Interleave(const Floats* streams, float* target) {
  if constexpr (kStreams == 1) {
    Store(target, streams[0]);
  } else if constexpr (kStreams == 3) {
#if HWY_TARGET <= HWY_AVX3
    Floats out[3];
    PermuteThree(streams, kThreeWay.merge_first, kThreeWay.merge_last, out);
    for (int j = 0; j < 3; j++) Store(target + j * kLanes, out[j]);
#else
    hn::StoreInterleaved3(streams[0], streams[1], streams[2], kFloats, target);
#endif
  } else {
    constexpr int kHalf = kStreams / 2;
    Floats low[kHalf], high[kHalf];
    POLYCONV_UNROLL
    for (int j = 0; j < kHalf; j++) Zip(streams[j], streams[j + kHalf], &low[j], &high[j]);
    Interleave<kHalf>(low, target);
    Interleave<kHalf>(high, target + kHalf * kLanes);
  }
}

// Transposes kLanes x kLanes floats. Interleaving the first half with the second rotates the bits of every float's
// index by one; once per bit of a lane exchanges vector and lane.
HWY_INLINE void Transpose(Floats (&v)[kLanes]) {
  POLYCONV_UNROLL
  for (int bit = 1; bit < kLanes; bit *= 2) {
    Floats zipped[kLanes];
    POLYCONV_UNROLL
    for (int i = 0; i < kLanes / 2; i++) Zip(v[i], v[i + kLanes / 2], &zipped[2 * i], &zipped[2 * i + 1]);
    POLYCONV_UNROLL
    for (int i = 0; i < kLanes; i++) v[i] = zipped[i];
  }
}

// With a dilation, neighbouring lanes are contiguous in memory only for `period` lanes; then the next tile begins. A
// vector is merged from runs of `period` lanes, each with its own address. It starts with a whole run and ends with the
// last whole run that fits, or within the first one if the period exceeds a vector.
constexpr int RunsPerVector(int period) {
  return period >= kLanes ? 1 : kLanes / period;
}

// Lanes of a vector in whole runs. The lanes behind them are undefined.
constexpr int LanesInRuns(int period) {
  return period >= kLanes ? kLanes : kLanes / period * period;
}

template <int kRuns>
class RunMerger {
 public:
  HWY_INLINE explicit RunMerger(int period) {
    POLYCONV_UNROLL
    for (int i = 0; i < kRuns - 1; i++) up_to_[i] = hn::FirstN(kFloats, (i + 1) * period);
  }

  // source(i): address of lane 0 if it belonged to run i.
  template <class Address>
  HWY_INLINE Floats Merge(const Address& source) const {
    Floats v = Load(source(kRuns - 1));
    POLYCONV_UNROLL
    for (int i = kRuns - 2; i >= 0; i--) v = hn::IfThenElse(up_to_[i], Load(source(i)), v);
    return v;
  }

 private:
  hn::Mask<FloatTag> up_to_[kRuns];  // lanes of run i and of those before it
};

// Calls fn.template operator()<runs>() with the runs per vector of a period.
template <class Fn>
HWY_INLINE void WithRuns(int period, const Fn& fn) {
  switch (RunsPerVector(period)) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 3:
      return fn.template operator()<3>();
    case 4:
      return fn.template operator()<4>();
    case 5:
      return fn.template operator()<5>();
    default:
      return fn.template operator()<kLanes / 2>();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
