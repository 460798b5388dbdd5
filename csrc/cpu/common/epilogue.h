// What a forward pass does to its sums on their way to memory: y = activation(sum + bias + residual).
#pragma once

#include <cmath>

namespace polyconv {

// Python sends the values, and knows them by their names: see torch/facts.cc.
enum class Activation : int { kNone = 0, kRelu, kSilu, kCount };

constexpr const char* NameOf(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kSilu:
      return "silu";
    case Activation::kCount:
      break;
  }
  return "";
}

template <class T>
struct Epilogue {
  const T* residual;  // laid out as y; may be null
  Activation activation;

  bool IsEmpty() const { return residual == nullptr && activation == Activation::kNone; }
};

// One number. As in torch, NaN and -0 pass through ReLU, and SiLU of minus infinity is NaN.
inline double Activated(Activation activation, double v) {
  switch (activation) {
    case Activation::kRelu:
      return v < 0 ? 0.0 : v;
    case Activation::kSilu:
      return v / (1.0 + std::exp(-v));
    default:
      return v;
  }
}

}  // namespace polyconv
