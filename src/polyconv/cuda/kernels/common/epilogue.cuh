// Epilogue of a forward kernel, applied to a finished sum before it is stored:   y = activation(sum + residual)
//
// An instance of a kernel that takes WithEpilogue<Params> has an epilogue. One that takes Params has none, and its
// machine code contains nothing of this file. The activation and whether there is a residual are run-time values,
// uniform across threads, so the branches cost one instruction each.
#pragma once

#include "common/common.cuh"

namespace polyconv {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2 };

template <class Params>
struct WithEpilogue : Params {
  const float* residual;  // laid out as `written`; null: none
  int activation;

  // Bytes from an element of `written` to its residual.
  __device__ __forceinline__ i64 residual_bytes() const {
    return reinterpret_cast<i64>(residual) - reinterpret_cast<i64>(this->written);
  }
};

template <class Params>
struct EpilogueOf {
  static constexpr bool kExists = false;
};
template <class Params>
struct EpilogueOf<WithEpilogue<Params>> {
  static constexpr bool kExists = true;
};

// NaN stays NaN.
__device__ __forceinline__ float relu(float z) {
  return z < 0.f ? 0.f : z;
}

// z / (1 + exp(-z)) from the two approximations of the special function units. Their errors are at most 2^-22 and 2^-23
// of their values (PTX ISA: ex2.approx, rcp.approx), the rounded exponent shifts the exponential by less than |z| *
// 8e-8, and two operations round: together less than 3.2e-7 * |z|. If the exponential is infinite the result is -0, or
// NaN for z = -infinity, as z / (1 + exp(-z)) in torch.
__device__ __forceinline__ float silu(float z) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.442695041f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return z * inverse;
}

template <int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount], int activation) {
  if (Activation(activation) == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = relu(values[i]);
  } else if (Activation(activation) == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = silu(values[i]);
  }
}

// Applies the epilogue to the sum that is stored at `to`. Without an epilogue, returns the sum.
template <class Params>
__device__ __forceinline__ float finished(const Params& p, float sum, const float* to) {
  if constexpr (EpilogueOf<Params>::kExists) {
    float value[1] = {p.residual ? sum + *add_bytes(to, p.residual_bytes()) : sum};
    activate(value, p.activation);
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
    activate(value, p.activation);
    return make_float4(value[0], value[1], value[2], value[3]);
  } else {
    return sums;
  }
}

}  // namespace polyconv
