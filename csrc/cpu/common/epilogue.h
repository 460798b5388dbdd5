// Epilogue of a forward pass: y = activation(sum + bias + residual).
#pragma once

#include <cmath>

namespace polyconv {

// Definitions as in torch. Python finds the values by their names: see bindings/facts.cc.
enum class Activation : int {
  kNone = 0,
  kRelu,
  kSilu,
  kClamp,  // to [a, b]
  kHardswish,
  kHardsigmoid,
  kGelu,
  kGeluTanh,
  kLeakyRelu,  // slope a
  kSigmoid,
  kCount
};

constexpr const char* NameOf(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kSilu:
      return "silu";
    case Activation::kClamp:
      return "clamp";
    case Activation::kHardswish:
      return "hardswish";
    case Activation::kHardsigmoid:
      return "hardsigmoid";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kLeakyRelu:
      return "leaky_relu";
    case Activation::kSigmoid:
      return "sigmoid";
    case Activation::kCount:
      break;
  }
  return "";
}

template <class T>
struct Epilogue {
  const T* residual;  // laid out as y; may be null
  Activation activation;
  T a, b;  // parameters of the activation

  bool IsEmpty() const { return residual == nullptr && activation == Activation::kNone; }
};

// GELU with tanh is v * sigmoid(v * (kGeluLinear + kGeluCubic * v * v)): sqrt(8 / pi), and 0.044715 times that.
inline constexpr double kGeluLinear = 1.5957691216057308, kGeluCubic = 0.044715 * kGeluLinear;

// Scalar version. As in torch, NaN passes, -0 passes ReLU and clamp, and SiLU, GELU and hardswish of minus infinity are
// NaN.
inline double Activated(Activation activation, double a, double b, double v) {
  const auto clamped = [](double low, double high, double value) {
    const double raised = value < low ? low : value;
    return raised > high ? high : raised;
  };
  switch (activation) {
    case Activation::kRelu:
      return v < 0 ? 0.0 : v;
    case Activation::kSilu:
      return v / (1.0 + std::exp(-v));
    case Activation::kClamp:
      return clamped(a, b, v);
    case Activation::kHardswish:
      return v * clamped(0.0, 6.0, v + 3.0) / 6.0;
    case Activation::kHardsigmoid:
      return clamped(0.0, 6.0, v + 3.0) / 6.0;
    case Activation::kGelu:
      return v * 0.5 * std::erfc(-v * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return v / (1.0 + std::exp(-v * (kGeluLinear + kGeluCubic * v * v)));
    case Activation::kLeakyRelu:
      return v > 0 ? v : v * a;
    case Activation::kSigmoid:
      return 1.0 / (1.0 + std::exp(-v));
    default:
      return v;
  }
}

}  // namespace polyconv
