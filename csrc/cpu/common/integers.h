// Integer division with the rounding that tilings need.
#pragma once

namespace polyconv {

constexpr int CeilDiv(int a, int b) {
  return (a + b - 1) / b;
}
constexpr int RoundUp(int a, int b) {
  return CeilDiv(a, b) * b;
}
constexpr int FloorMod(int a, int b) {
  return ((a % b) + b) % b;
}

}  // namespace polyconv
