// Cook-Toom (Winograd) matrices for one-dimensional correlation, computed at compile time.
//
// F(m, r) computes m outputs of a correlation with r taps from n = m + r - 1 products:
//
//     y = A^T [(G w) * (B^T x)]
//
// Points, in order: 0, the pairs +p and -p for p = 1, 2 and 1/2, infinity. Seven points, where one of 0 and infinity
// cannot be used: infinity, the pairs for p = 1, 1/4 and 3/2, of which the error is half of that of the others. All
// entries of A^T and B^T are small dyadic numbers, exact in float; the others are in G, which is applied in double. The
// rows of +p and -p differ only in the sign of every second column, so transforms compute an even and an odd part once
// for both (transforms-inl.h).
// polyconv/algebra/cook_toom.py has the same in exact fractions, with proofs.
#pragma once

namespace polyconv {

template <int kRows, int kColumns>
struct Matrix {
  double at[kRows][kColumns] = {};
};

namespace detail {

inline constexpr double kFinitePoints[] = {0, 1, -1, 2, -2, 0.5, -0.5};
inline constexpr double kSevenPoints[] = {0, 1, -1, 0.25, -0.25, 1.5, -1.5};  // the first one is infinity

constexpr double Magnitude(double x) {
  return x < 0 ? -x : x;
}

// Power of two that scales the smallest non-zero entry of a row into [1, 2). Exact.
template <int n>
constexpr double UnitFactor(const double (&row)[n]) {
  double smallest = 0;
  for (double entry : row) {
    if (entry != 0 && (smallest == 0 || Magnitude(entry) < smallest)) smallest = Magnitude(entry);
  }
  double factor = 1;
  while (smallest * factor < 1) factor *= 2;
  while (smallest * factor >= 2) factor /= 2;
  return factor;
}

}  // namespace detail

// F(1, 1) is direct: one product, no transform.
template <int kOutputs, int kTaps>
struct CookToom {
  static constexpr int kM = kOutputs;
  static constexpr int kR = kTaps;
  static constexpr int kPoints = kOutputs + kTaps - 1;
  static constexpr bool kIsTrivial = kPoints == 1;
  static constexpr bool kIsSeven = kPoints == 7;
  static constexpr int kInfinity = kIsSeven ? 0 : kPoints - 1;  // the place of infinity
  static_assert(kIsTrivial || kIsSeven || (kPoints % 2 == 0 && kPoints <= 8), "transforms rely on points in pairs");

  struct Matrices {
    Matrix<kPoints, kPoints> input;    // B^T
    Matrix<kPoints, kTaps> weight;     // G
    Matrix<kOutputs, kPoints> output;  // A^T
  };

  static constexpr Matrices Make() {
    Matrices m{};
    if (kIsTrivial) {
      m.input.at[0][0] = m.weight.at[0][0] = m.output.at[0][0] = 1;
      return m;
    }
    constexpr auto& kRoots = kIsSeven ? detail::kSevenPoints : detail::kFinitePoints;
    for (int point = 0; point < kPoints; point++) {
      const bool infinite = point == kInfinity;
      // Polynomial that vanishes at all other finite points, and its value at this one.
      double polynomial[kPoints] = {1};
      double value = 1;
      int degree = 0;
      for (int other = 0; other < kPoints; other++) {
        if (other == point || other == kInfinity) continue;
        const double root = kRoots[other];
        for (int i = ++degree; i > 0; i--) polynomial[i] = polynomial[i - 1] - root * polynomial[i];
        polynomial[0] *= -root;
        if (!infinite) value *= kRoots[point] - root;
      }
      const double factor = detail::UnitFactor(polynomial) * (value < 0 ? -1 : 1);
      for (int i = 0; i < kPoints; i++) m.input.at[point][i] = factor * polynomial[i];
      if (infinite) {
        m.weight.at[point][kTaps - 1] = 1 / factor;
        m.output.at[kOutputs - 1][point] = 1;
        continue;
      }
      double power = 1 / (factor * value);
      for (int i = 0; i < kTaps; i++, power *= kRoots[point]) m.weight.at[point][i] = power;
      power = 1;
      for (int i = 0; i < kOutputs; i++, power *= kRoots[point]) m.output.at[i][point] = power;
    }
    return m;
  }

  static constexpr Matrices kMatrices = Make();
};

// A scheme without its type, for code of which one copy serves all schemes.
struct SchemeNumbers {
  int taps_h, taps_w;
  int unit_rows, unit_columns;  // outputs of a unit
  int points_h, points;         // along H, and of both axes
  int blocks, slots;
};

// Computation of one 2-D tile: one algorithm per axis. Nested: along W, two tap segments of kM and kR taps are combined
// by F(2, 2), with 3 products for two blocks of outputs instead of 4. The first segment has exactly kM taps, so its
// second input tile is the first one of the second segment, and one transform serves both.
// kGrouped: the points of H are processed in pairs and the inverse along H is accumulated, so that only a part of the
// transformed input is live at a time, and it stays in L2.
template <class AlongH, class AlongW, bool kNestedAlongW, bool kGroupedPoints>
struct Scheme {
  using H = AlongH;
  using W = AlongW;
  using Ungrouped = Scheme<AlongH, AlongW, kNestedAlongW, false>;
  static constexpr bool kNested = kNestedAlongW;
  static constexpr bool kDirect = H::kIsTrivial && W::kIsTrivial;  // no transforms: plain multiplication
  static constexpr bool kGrouped = kGroupedPoints && H::kPoints > 2;
  static constexpr int kBlocks = kNested ? 2 : 1;       // blocks of W::kM outputs per unit
  static constexpr int kSlots = kNested ? 3 : 1;        // products per point and unit
  static constexpr int kUnitColumns = kBlocks * W::kM;  // output columns of a unit
  static constexpr int kTapsH = H::kR;
  static constexpr int kTapsW = kNested ? W::kM + W::kR : W::kR;
  static constexpr int kGroupRows = kGrouped ? 2 : H::kPoints;  // points of H per group
  static constexpr int kGroups = H::kPoints / kGroupRows;
  static constexpr int kGroupPoints = kGroupRows * W::kPoints;

  static constexpr SchemeNumbers kNumbers = {kTapsH,  kTapsW, H::kM, kUnitColumns, H::kPoints, H::kPoints * W::kPoints,
                                             kBlocks, kSlots};

  // Point of H at a row of a group. Groups are the pairs +p, -p; the last is {0, infinity}.
  static constexpr int PointOfH(int group, int row) {
    if (!kGrouped) return row;
    if (group < kGroups - 1) return 2 * group + 1 + row;
    return row == 0 ? 0 : H::kPoints - 1;
  }
};

}  // namespace polyconv
