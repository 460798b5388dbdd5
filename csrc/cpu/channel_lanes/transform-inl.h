// Transforms of the weight gradient, with channels in the lanes.
//
// y = A^T [(G w) * (B^T x)], so by the chain rule dw = G^T [(A dy) * (B^T x)]: x is transformed as in the forward pass,
// dy by the powers of the points. All non-dyadic factors are in G^T, which is applied once, at the end, in double.
#if defined(POLYCONV_CPU_CHANNEL_LANES_TRANSFORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_TRANSFORM_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_TRANSFORM_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_TRANSFORM_INL_H_
#endif

#include "common/transforms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Groups of points: pairs +p and -p, which share most of their work; the last is {0, infinity}. See Scheme::PointOfH.
template <class Alg>
inline constexpr int kPointGroups = Alg::kIsTrivial ? 1 : Alg::kPoints / 2;
template <class Alg>
inline constexpr int kGroupOfPoints = Alg::kIsTrivial ? 1 : 2;

// Points of one group of B^T x.
template <class Alg, int kGroup>
HWY_INLINE void InputGroup(const Floats* x, Floats* out) {
  if constexpr (Alg::kIsTrivial) {
    out[0] = x[0];
  } else if constexpr (kGroup == kPointGroups<Alg> - 1) {
    out[0] = SumTerms<Alg, 0, Columns::kAll>(x, hn::Zero(kFloats));
    out[1] = SumTerms<Alg, Alg::kPoints - 1, Columns::kAll>(x, hn::Zero(kFloats));
  } else {
    constexpr int kPlus = 2 * kGroup + 1;
    const Floats even = SumTerms<Alg, kPlus, Columns::kEven>(x, hn::Zero(kFloats));
    const Floats odd = SumTerms<Alg, kPlus, Columns::kOdd>(x, hn::Zero(kFloats));
    constexpr bool kEvenAgrees = Alg::kMatrices.input.at[kPlus][2] == Alg::kMatrices.input.at[kPlus + 1][2];
    out[0] = hn::Add(even, odd);
    out[1] = kEvenAgrees ? hn::Sub(even, odd) : hn::Sub(odd, even);
  }
}

// Every second term of the sum of dy[i] point^i, from i = kFirst on.
template <class Alg, int kPoint, int kFirst>
HWY_INLINE Floats SumPowers(const Floats* dy) {
  constexpr double kFactor = Alg::kMatrices.output.at[kFirst][kPoint];
  const Floats factor = Broadcast(static_cast<float>(kFactor));
  if constexpr (kFirst + 2 >= Alg::kM) {
    return kFactor == 1 ? dy[kFirst] : hn::Mul(factor, dy[kFirst]);
  } else {
    const Floats rest = SumPowers<Alg, kPoint, kFirst + 2>(dy);
    return kFactor == 1 ? hn::Add(dy[kFirst], rest) : hn::MulAdd(factor, dy[kFirst], rest);
  }
}

// Points of one group of A dy.
template <class Alg, int kGroup>
HWY_INLINE void OutputGradientGroup(const Floats* dy, Floats* out) {
  if constexpr (Alg::kIsTrivial) {
    out[0] = dy[0];
  } else if constexpr (kGroup == kPointGroups<Alg> - 1) {
    out[0] = dy[0];
    out[1] = dy[Alg::kM - 1];
  } else {
    const Floats even = SumPowers<Alg, 2 * kGroup + 1, 0>(dy);
    const Floats odd = SumPowers<Alg, 2 * kGroup + 1, 1>(dy);
    out[0] = hn::Add(even, odd);
    out[1] = hn::Sub(even, odd);
  }
}

// All points of A dy, in natural order.
template <class Alg, int kGroup = 0>
HWY_INLINE void TransformOutputGradient(const Floats* dy, Floats* out) {
  if constexpr (Alg::kIsTrivial) {
    out[0] = dy[0];
  } else if constexpr (kGroup == kPointGroups<Alg> - 1) {
    out[0] = dy[0];
    out[Alg::kPoints - 1] = dy[Alg::kM - 1];
  } else {
    OutputGradientGroup<Alg, kGroup>(dy, out + 2 * kGroup + 1);
    TransformOutputGradient<Alg, kGroup + 1>(dy, out);
  }
}

// Store in one of many sequential streams, none of them in L1: prefetches the line after the next.
HWY_INLINE void StoreOnward(float* place, Floats v) {
  StoreAligned(place, v);
  __builtin_prefetch(place + 2 * kLanes, 1, 3);
}

// A row of tiles of one vector of channels: source and target of a transform.
struct TileLine {
  const float* pixels;       // of the first tile
  std::size_t row_pitch;     // between rows of pixels
  std::size_t column_pitch;  // between columns of one phase
  int tiles;
  float* target;  // [matrix][tile][lane]
  std::size_t matrix_pitch;
  std::size_t group_pitch;  // between the points of a group along H
};

// Transforms every column of the line to the points of a group along H: half[point][column][lane].
template <class Alg, int kGroup, bool kOfInput>
HWY_INLINE void TransformColumns(const TileLine& line, int columns, float* half) {
  constexpr int kRows = kOfInput ? Alg::kPoints : Alg::kM;
  constexpr int kOut = kGroupOfPoints<Alg>;
  const float* pixels = line.pixels;
  for (int j = 0; j < columns; j++, pixels += line.column_pitch) {
    Floats in[kRows], out[kOut];
    POLYCONV_UNROLL
    for (int i = 0; i < kRows; i++) in[i] = hn::Load(kFloats, pixels + i * line.row_pitch);
    if constexpr (kOfInput) {
      InputGroup<Alg, kGroup>(in, out);
    } else {
      OutputGradientGroup<Alg, kGroup>(in, out);
    }
    POLYCONV_UNROLL
    for (int i = 0; i < kOut; i++) StoreAligned(half + (i * columns + j) * kLanes, out[i]);
  }
}

template <int kCount>
HWY_INLINE void LoadColumns(const float* half, Floats* out) {
  POLYCONV_UNROLL
  for (int i = 0; i < kCount; i++) out[i] = hn::Load(kFloats, half + i * kLanes);
}

// Factors of x: X1, X0 - X1 and X2 - X1 of three neighbouring blocks if segments are nested, otherwise X0.
template <class S, int kGroup>
HWY_NOINLINE void ExpandInput(const TileLine& line, float* half) {
  using W = typename S::W;
  constexpr int kPoints = W::kPoints;
  const int columns = line.tiles * S::kUnitColumns + S::kTapsW - 1;
  TransformColumns<typename S::H, kGroup, true>(line, columns, half);
  for (int h = 0; h < S::kGroupRows; h++) {
    const float* row = half + h * columns * kLanes;
    float* target = line.target + h * line.group_pitch;
    Floats x[kPoints], first[kPoints];
    if constexpr (S::kNested) {
      LoadColumns<kPoints>(row, x);
      TransformInput<W>(x, first);
    }
    for (int t = 0; t < line.tiles; t++, row += S::kUnitColumns * kLanes, target += kLanes) {
      float* place = target;
      if constexpr (S::kNested) {
        Floats middle[kPoints];
        LoadColumns<kPoints>(row + W::kM * kLanes, x);
        TransformInput<W>(x, middle);
        POLYCONV_UNROLL
        for (int p = 0; p < kPoints; p++, place += 3 * line.matrix_pitch) {
          StoreOnward(place, middle[p]);
          StoreOnward(place + line.matrix_pitch, hn::Sub(first[p], middle[p]));
        }
        LoadColumns<kPoints>(row + 2 * W::kM * kLanes, x);
        TransformInput<W>(x, first);
        place = target + 2 * line.matrix_pitch;
        POLYCONV_UNROLL
        for (int p = 0; p < kPoints; p++, place += 3 * line.matrix_pitch) {
          StoreOnward(place, hn::Sub(first[p], middle[p]));
        }
      } else {
        LoadColumns<kPoints>(row, x);
        TransformInput<W>(x, first);
        POLYCONV_UNROLL
        for (int p = 0; p < kPoints; p++, place += line.matrix_pitch) StoreOnward(place, first[p]);
      }
    }
  }
}

// Factors of dy: D0 + D1, D0 and D1 of two neighbouring blocks if segments are nested, otherwise D0.
template <class S, int kGroup>
HWY_NOINLINE void ExpandOutputGradient(const TileLine& line, float* half) {
  using W = typename S::W;
  constexpr int kPoints = W::kPoints;
  const int columns = line.tiles * S::kUnitColumns;
  TransformColumns<typename S::H, kGroup, false>(line, columns, half);
  for (int h = 0; h < S::kGroupRows; h++) {
    const float* row = half + h * columns * kLanes;
    float* target = line.target + h * line.group_pitch;
    for (int t = 0; t < line.tiles; t++, row += S::kUnitColumns * kLanes, target += kLanes) {
      Floats dy[W::kM], first[kPoints];
      LoadColumns<W::kM>(row, dy);
      TransformOutputGradient<W>(dy, first);
      float* place = target;
      if constexpr (S::kNested) {
        Floats second[kPoints];
        LoadColumns<W::kM>(row + W::kM * kLanes, dy);
        TransformOutputGradient<W>(dy, second);
        POLYCONV_UNROLL
        for (int p = 0; p < kPoints; p++, place += 3 * line.matrix_pitch) {
          StoreOnward(place, hn::Add(first[p], second[p]));
          StoreOnward(place + line.matrix_pitch, first[p]);
          StoreOnward(place + 2 * line.matrix_pitch, second[p]);
        }
      } else {
        POLYCONV_UNROLL
        for (int p = 0; p < kPoints; p++, place += line.matrix_pitch) StoreOnward(place, first[p]);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
