// Integer division with the rounding that tilings need.
#pragma once

namespace polyconv {

// No sum of two large numbers, which would overflow. Of a count that is not positive: 0, as long as it is above -b.
constexpr int CeilDiv(int a, int b) {
  return a > 0 ? (a - 1) / b + 1 : (a + b - 1) / b;
}
constexpr int RoundUp(int a, int b) {
  return CeilDiv(a, b) * b;
}
constexpr int FloorMod(int a, int b) {
  const int rest = a % b;
  return rest < 0 ? rest + b : rest;
}

}  // namespace polyconv
