// Integer division with the rounding that tilings need.
#pragma once

namespace polyconv {

// The sum does not overflow: extents are at most 2^31 - 2^20.
constexpr int CeilDiv(int a, int b) {
  return (a + b - 1) / b;
}
constexpr int RoundUp(int a, int b) {
  return CeilDiv(a, b) * b;
}
constexpr int FloorMod(int a, int b) {
  const int rest = a % b;
  return rest < 0 ? rest + b : rest;
}

}  // namespace polyconv
