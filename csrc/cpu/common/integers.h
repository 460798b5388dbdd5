// Division of integers, rounded the way that tilings need it.
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
