// Epilogue of a forward kernel, applied to a finished sum before it is stored:   y = activation(sum + residual)
//
// An instance of a kernel that takes WithEpilogue<Params> has an epilogue. One that takes Params has none, and its
// machine code contains nothing of this file. The activation and whether there is a residual are run-time values,
// uniform across threads, so the branches cost few instructions.
#pragma once

#include "common/common.cuh"

namespace polyconv {

// Functions, each with the parameters `a` and `b`. Torch's activations are some of these (planner/epilogue.py): few
// functions keep the code of unrolled loops small.
enum class Activation : int {
  kNone,
  kClamp,        // z between a and b
  kLeakyRelu,    // z, or a * z below 0
  kSigmoid,      // 1 / (1 + exp(-z))
  kSwish,        // z / (1 + exp(-z * (a + b * z^2)))
  kHardsigmoid,  // (z + 3) / 6 between 0 and 1
  kHardswish,    // z times that
  kGelu
};

template <class Params>
struct WithEpilogue : Params {
  const float* residual;  // laid out as `written`; null: none
  int activation;
  float a, b;  // parameters of the activation

  // Bytes from an element of `written` to its residual.
  __device__ __forceinline__ i64 residual_bytes() const {
    return reinterpret_cast<i64>(residual) - reinterpret_cast<i64>(this->written);
  }
};

// An exported file with an activation has an epilogue without residual.
template <class Params>
struct EpilogueOf {
  static constexpr bool kExists = false, kResidual = false;
};
template <class Params>
struct EpilogueOf<WithEpilogue<Params>> {
  static constexpr bool kExists = true, kResidual = true;
};

// NaN stays NaN, and -0 stays -0 at a bound of 0.
__device__ __forceinline__ float clamp(float z, float low, float high) {
  const float raised = z < low ? low : z;
  return raised > high ? high : raised;
}

// 2^z and 1 / z by the special function units. Their errors are at most 2^-22 and 2^-23 of their values (PTX ISA:
// ex2.approx, rcp.approx).
__device__ __forceinline__ float power_of_two(float z) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z));
  return power;
}

__device__ __forceinline__ float reciprocal(float z) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(z));
  return inverse;
}

constexpr float kLog2E = 1.442695041f;

// 1 / (1 + exp(-z)). The rounded exponent shifts the exponential by less than |z| * 8e-8, so that the error of SiLU,
// with two more roundings, is less than 3.2e-7 * |z|. If the exponential is infinite SiLU is -0, or NaN for -infinity,
// as z / (1 + exp(-z)) in torch.
__device__ __forceinline__ float sigmoid(float z) {
  return reciprocal(1.f + power_of_two(z * -kLog2E));
}

// z times the normal distribution's cumulative probability. With d = |z|, its tail is
// exp(-d^2 / 2) P(1 / (1 + 0.6 d / sqrt(2))) with a polynomial P of relative error 4e-8, as in csrc/cpu/common.
__device__ __forceinline__ float gelu(float z) {
  const float t = reciprocal(1.f + 0.42426406871192851f * fabsf(z));
  float sum = 0.03249789774417877f;
  sum = sum * t - 0.15713098645210266f;
  sum = sum * t + 0.2770255208015442f;
  sum = sum * t - 0.16260959208011627f;
  sum = sum * t - 0.06678629666566849f;
  sum = sum * t + 0.031206319108605385f;
  sum = sum * t + 0.066436268389225f;
  sum = sum * t + 0.14106862246990204f;
  sum = sum * t + 0.1690259426832199f;
  sum = sum * t + 0.16926632821559906f;
  const float tail = sum * t * power_of_two(z * z * (-0.5f * kLog2E));
  return z * (z < 0.f ? tail : 1.f - tail);
}

template <int kCount, class Fn>
__device__ __forceinline__ void apply(float (&values)[kCount], const Fn& fn) {
#pragma unroll
  for (int i = 0; i < kCount; i++) values[i] = fn(values[i]);
}

// One switch for all values of a thread.
template <int kCount, class Params>
__device__ __forceinline__ void activate(float (&values)[kCount], const Params& p) {
  const bool gates =
      Activation(p.activation) == Activation::kSwish || Activation(p.activation) == Activation::kHardswish;
  switch (Activation(p.activation)) {
    case Activation::kClamp:
      return apply(values, [&](float z) { return clamp(z, p.a, p.b); });
    case Activation::kLeakyRelu:
      return apply(values, [&](float z) { return z > 0.f ? z : z * p.a; });
    case Activation::kSigmoid:
    case Activation::kSwish:
      // The bound keeps an infinite square from a coefficient of 0; sigmoid is 0 or 1 long before it.
      return apply(values, [&](float z) { return (gates ? z : 1.f) * sigmoid(z * (p.a + p.b * fminf(z * z, 1e4f))); });
    case Activation::kHardsigmoid:
    case Activation::kHardswish:
      return apply(values, [&](float z) { return (gates ? z : 1.f) * clamp(z + 3.f, 0.f, 6.f) * (1.f / 6.f); });
    case Activation::kGelu:
      return apply(values, gelu);
    default:
      return;
  }
}

// Applies the epilogue to the sum that is stored at `to`. Without an epilogue, returns the sum.
template <class Params>
__device__ __forceinline__ float finished(const Params& p, float sum, const float* to) {
  if constexpr (EpilogueOf<Params>::kExists) {
    float value[1] = {p.residual ? sum + *add_bytes(to, p.residual_bytes()) : sum};
    activate(value, p);
    return value[0];
  } else {
    return sum;
  }
}

// Four neighbouring sums at once.
template <class Params>
__device__ __forceinline__ float4 finished(const Params& p, float4 sums, const float* to) {
  if constexpr (EpilogueOf<Params>::kExists) {
    const float4 add = p.residual ? load4(add_bytes(to, p.residual_bytes())) : make_float4(0.f, 0.f, 0.f, 0.f);
    float value[4] = {sums.x + add.x, sums.y + add.y, sums.z + add.z, sums.w + add.w};
    activate(value, p);
    return make_float4(value[0], value[1], value[2], value[3]);
  } else {
    return sums;
  }
}

}  // namespace polyconv
