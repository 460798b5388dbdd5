// Cook-Toom transforms on vectors: straight-line code that the compiler generates from the constant matrices.
#if defined(POLYCONV_CPU_COMMON_TRANSFORMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_TRANSFORMS_INL_H_
#undef POLYCONV_CPU_COMMON_TRANSFORMS_INL_H_
#else
#define POLYCONV_CPU_COMMON_TRANSFORMS_INL_H_
#endif

#include "common/cook_toom.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Non-zero entries of a row of B^T in order of summation: those without a multiplication first.
struct Terms {
  int count = 0;
  int column[8] = {};
  double factor[8] = {};
};

enum class Columns { kAll, kEven, kOdd };

template <class Alg>
constexpr Terms TermsOf(int row, Columns which) {
  Terms terms;
  for (int pass = 0; pass < 3; pass++) {
    for (int column = 0; column < Alg::kPoints; column++) {
      const double factor = Alg::kMatrices.input.at[row][column];
      const int kind = factor == 1 ? 0 : factor == -1 ? 1 : 2;
      if (factor == 0 || kind != pass) continue;
      if ((which == Columns::kEven && column % 2 != 0) || (which == Columns::kOdd && column % 2 == 0)) continue;
      terms.column[terms.count] = column;
      terms.factor[terms.count++] = factor;
    }
  }
  return terms;
}

template <class Alg, int kRow, Columns kWhich, int kTerm = 0>
HWY_INLINE Floats SumTerms(const Floats* x, Floats sum) {
  constexpr Terms kTerms = TermsOf<Alg>(kRow, kWhich);
  if constexpr (kTerm == kTerms.count) {
    return sum;
  } else {
    constexpr double kFactor = kTerms.factor[kTerm];
    const Floats value = x[kTerms.column[kTerm]];
    if constexpr (kTerm == 0) {
      sum = kFactor == 1 ? value : hn::Mul(Broadcast(static_cast<float>(kFactor)), value);
    } else if constexpr (kFactor == 1) {
      sum = hn::Add(sum, value);
    } else if constexpr (kFactor == -1) {
      sum = hn::Sub(sum, value);
    } else {
      sum = hn::MulAdd(Broadcast(static_cast<float>(kFactor)), value, sum);
    }
    return SumTerms<Alg, kRow, kWhich, kTerm + 1>(x, sum);
  }
}

// Rows of +p and -p of B^T: even columns agree up to a sign, odd ones up to the opposite sign.
template <class Alg, int kPair>
HWY_INLINE void InputPairs(const Floats* x, Floats* out) {
  if constexpr (2 * kPair + 2 < Alg::kPoints) {
    constexpr int kPlus = 2 * kPair + 1;
    const Floats even = SumTerms<Alg, kPlus, Columns::kEven>(x, hn::Zero(kFloats));
    const Floats odd = SumTerms<Alg, kPlus, Columns::kOdd>(x, hn::Zero(kFloats));
    constexpr bool kEvenAgrees = Alg::kMatrices.input.at[kPlus][2] == Alg::kMatrices.input.at[kPlus + 1][2];
    out[kPlus] = hn::Add(even, odd);
    out[kPlus + 1] = kEvenAgrees ? hn::Sub(even, odd) : hn::Sub(odd, even);
    InputPairs<Alg, kPair + 1>(x, out);
  }
}

// out = B^T x
template <class Alg>
HWY_INLINE void TransformInput(const Floats* x, Floats* out) {
  if constexpr (Alg::kIsTrivial) {
    out[0] = x[0];
  } else {
    constexpr int kLast = Alg::kPoints - 1;
    out[0] = SumTerms<Alg, 0, Columns::kAll>(x, hn::Zero(kFloats));
    InputPairs<Alg, 0>(x, out);
    if constexpr (!Alg::kIsSeven) out[kLast] = SumTerms<Alg, kLast, Columns::kAll>(x, hn::Zero(kFloats));
  }
}

// sum + A^T[kRow, +p] * (m[+p] + m[-p], or m[+p] - m[-p] in odd rows). The caller computes both once.
template <class Alg, int kRow, int kPair>
HWY_INLINE Floats AddPair(Floats sum, Floats plus, Floats minus) {
  constexpr double kFactor = Alg::kMatrices.output.at[kRow][2 * kPair + 1];
  const Floats value = kRow % 2 == 0 ? plus : minus;
  if constexpr (kFactor == 1) return hn::Add(sum, value);
  return hn::MulAdd(Broadcast(static_cast<float>(kFactor)), value, sum);
}

template <class Alg, int kRow, int kPair>
HWY_INLINE Floats AddPairs(Floats sum, const Floats* plus, const Floats* minus) {
  if constexpr (2 * kPair + 2 < Alg::kPoints) {
    sum = AddPair<Alg, kRow, kPair>(sum, plus[kPair], minus[kPair]);
    return AddPairs<Alg, kRow, kPair + 1>(sum, plus, minus);
  }
  return sum;
}

template <class Alg, int kRow>
HWY_INLINE void OutputRows(const Floats* m, const Floats* plus, const Floats* minus, Floats* y) {
  if constexpr (kRow < Alg::kM) {
    // The first pair has the point 1, whose powers are 1: it starts the sum.
    Floats sum = kRow % 2 == 0 ? plus[0] : minus[0];
    if constexpr (kRow == 0 && !Alg::kIsSeven) sum = hn::Add(sum, m[0]);
    if constexpr (kRow == Alg::kM - 1) sum = hn::Add(sum, m[Alg::kInfinity]);
    y[kRow] = AddPairs<Alg, kRow, 1>(sum, plus, minus);
    OutputRows<Alg, kRow + 1>(m, plus, minus, y);
  }
}

// y = A^T m
template <class Alg>
HWY_INLINE void TransformOutput(const Floats* m, Floats* y) {
  if constexpr (Alg::kIsTrivial) {
    y[0] = m[0];
  } else {
    constexpr int kPairs = (Alg::kPoints - 1) / 2;
    Floats plus[kPairs], minus[kPairs];
    POLYCONV_UNROLL
    for (int i = 0; i < kPairs; i++) {
      plus[i] = hn::Add(m[2 * i + 1], m[2 * i + 2]);
      minus[i] = hn::Sub(m[2 * i + 1], m[2 * i + 2]);
    }
    OutputRows<Alg, 0>(m, plus, minus, y);
  }
}

// y += A^T[:, +p and -p] (m0, m1), the share of one pair of points. The first pair stores instead.
template <class Alg, int kPair, int kRow = 0>
HWY_INLINE void AccumulatePair(Floats plus, Floats minus, float* y) {
  if constexpr (kRow < Alg::kM) {
    float* target = y + kRow * kLanes;
    if constexpr (kPair == 0) {
      StoreAligned(target, kRow % 2 == 0 ? plus : minus);
    } else {
      StoreAligned(target, AddPair<Alg, kRow, kPair>(hn::Load(kFloats, target), plus, minus));
    }
    AccumulatePair<Alg, kPair, kRow + 1>(plus, minus, y);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
