// Summation in a tensor core: the products of a block and the addend are aligned to the largest exponent among them and
// truncated, and their sum is rounded toward zero (Fasi et al. 2021, PeerJ CS 330; Khattak and Mikaitis, arXiv
// 2512.07004). Chips differ in the number of products per block and of bits kept below those of FP32.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machine.h"

namespace gpu_emulator {

struct TensorRounding {
  int block;       // products that are added at once
  int extra_bits;  // kept below the last bit of FP32
};
// Hopper adds twice as many as Ampere, with two extra bits.
constexpr TensorRounding kVoltaFp16 = {4, 0}, kAmpere16Bit = {8, 1}, kAmpereTf32 = {4, 1};

// A factor or an addend: significand x 2^exponent. A finite value other than zero has `bits` significant bits.
struct TensorNumber {
  int32_t significand = 0;
  int32_t exponent = 0;
  float value = 0;
  bool finite() const { return std::isfinite(value); }
};

template <int bits>
TensorNumber tensor_number(float value) {
  TensorNumber out;
  out.value = value;
  if (value == 0 || !out.finite()) return out;
  const uint32_t encoded = as_bits(value);
  uint32_t fraction = encoded & 0x7fffff;
  int field = static_cast<int>(encoded >> 23 & 0xff);
  if (field) {
    fraction |= 1u << 23;
  } else {  // subnormal
    const int zeros = __builtin_clz(fraction) - 8;
    fraction <<= zeros;
    field = 1 - zeros;
  }
  const int32_t magnitude = static_cast<int32_t>(fraction >> (24 - bits));  // exact: the value has no more bits
  out.significand = encoded >> 31 ? -magnitude : magnitude;
  out.exponent = field - 127 - (bits - 1);
  return out;
}

inline double power_of_two(int exponent) {
  return as_double(static_cast<uint64_t>(exponent + 1023) << 52);
}

inline int64_t shifted_toward_zero(int64_t x, int left) {
  if (left >= 0) return x * (int64_t{1} << left);
  const int right = std::min(-left, 62);
  return x < 0 ? -(-x >> right) : x >> right;
}

// One block: a[k] * b[k] summed over k, plus c. `bits`: length of a factor's significand, 11 for FP16.
template <TensorRounding rounding, int bits>
float tensor_block_sum(const TensorNumber* a, const TensorNumber* b, float c) {
  constexpr int kNothing = -100000;
  const TensorNumber addend = tensor_number<24>(c);
  bool finite = addend.finite();
  // The exponent of a product is the sum of its factors', though its significand may have one bit more.
  int largest = addend.significand ? addend.exponent + 23 : kNothing;
  for (int k = 0; k < rounding.block; k++) {
    finite = finite && a[k].finite() && b[k].finite();
    if (a[k].significand && b[k].significand)
      largest = std::max(largest, a[k].exponent + b[k].exponent + 2 * (bits - 1));
  }
  if (!finite) {
    float sum = c;
    for (int k = 0; k < rounding.block; k++) sum += a[k].value * b[k].value;
    return sum;
  }
  if (largest == kNothing) return 0;
  const int unit = largest - 23 - rounding.extra_bits;  // exponent of the last bit that is kept
  int64_t sum = shifted_toward_zero(addend.significand, addend.exponent - unit);
  for (int k = 0; k < rounding.block; k++) {
    const int64_t product = static_cast<int64_t>(a[k].significand) * b[k].significand;
    sum += shifted_toward_zero(product, a[k].exponent + b[k].exponent - unit);
  }
  if (sum == 0) return 0;
  constexpr int kLeastExponent = -149;  // of FP32's subnormals
  const int length = 64 - __builtin_clzll(static_cast<uint64_t>(std::abs(sum)));
  const int excess = std::max({0, length - 24, kLeastExponent - unit});
  const int64_t rounded = shifted_toward_zero(sum, -excess);
  return static_cast<float>(static_cast<double>(rounded) * power_of_two(unit + excess));
}

// Any whole number of blocks, one after the other.
template <TensorRounding rounding, int bits, int products>
float tensor_sum(const TensorNumber* a, const TensorNumber* b, float c) {
  static_assert(products % rounding.block == 0);
  for (int k = 0; k < products; k += rounding.block) c = tensor_block_sum<rounding, bits>(a + k, b + k, c);
  return c;
}

}  // namespace gpu_emulator
