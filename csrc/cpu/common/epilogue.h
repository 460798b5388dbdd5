// Epilogue of a forward pass: y = activation(sum + bias + residual).
#pragma once

#include <cmath>

namespace polyconv {

// Python finds the values by their names: see bindings/facts.cc.
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

// Scalar version. As in torch, NaN and -0 pass through ReLU, and SiLU of minus infinity is NaN.
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
