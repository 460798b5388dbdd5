#include "common/scaling.h"

#include <algorithm>
#include <bit>

// Loops that the compiler vectorises for each instruction set.
#ifdef __x86_64__
#define POLYCONV_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define POLYCONV_CLONES
#endif

namespace polyconv {
namespace {

using std::int64_t;

constexpr std::uint32_t kMagnitude = 0x7fffffff, kSmallestNormal = 0x00800000;
constexpr int kDenormalUnit = 149;  // denormals are multiples of 2^-149

std::uint32_t Bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

POLYCONV_CLONES std::uint32_t LargestOfRow(const float* from, int64_t count, int64_t step) {
  std::uint32_t largest = 0;
  if (step == 1) {
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, Bits(from[i]) & kMagnitude);
  } else {
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, Bits(from[i * step]) & kMagnitude);
  }
  return largest;
}

// 2^exponent, or the nearest power of two that is a normal number.
float Power(int exponent) {
  return PowerOf(std::clamp(exponent, -126, 127));
}

// 2^exponent as a product of two floats, each a normal number.
struct PowerOfTwo {
  explicit PowerOfTwo(int exponent) : one(Power(exponent / 2)), other(Power(exponent - exponent / 2)) {}
  float one, other;
};

// The bits of one of two magnitudes, with the sign of `value`. Without a branch, so that loops are vectorised.
float Chosen(bool counts, std::uint32_t counted, float normal, float value) {
  const std::uint32_t mask = -static_cast<std::uint32_t>(counts);
  return std::bit_cast<float>((counted & mask) | (Bits(normal) & ~mask) | (Bits(value) & ~kMagnitude));
}

// to = from * 2^exponent for tiny values, the results being ordinary. Integers take the place of denormal operands. If
// there are normal numbers, the exponent is below 127.
struct Up {
  explicit Up(int exponent) : normal(Power(exponent)), denormal(Power(exponent - kDenormalUnit)) {}
  float operator()(float value) const {
    const std::uint32_t magnitude = Bits(value) & kMagnitude;
    const float counted = static_cast<float>(static_cast<std::int32_t>(magnitude)) * denormal;
    return Chosen(magnitude < kSmallestNormal, Bits(counted), std::bit_cast<float>(magnitude) * normal, value);
  }
  float normal, denormal;
};

// to = from * 2^exponent for ordinary values and a negative exponent. Denormal results are rounded as integers; those
// below all of them are zero with any small factor.
struct Down {
  explicit Down(int exponent) : normal(exponent), denormal(Power(exponent + kDenormalUnit)) {}
  float operator()(float value) const {
    constexpr float kIntegers = 0x1p23f;  // from here on floats are integers
    const float magnitude = std::bit_cast<float>(Bits(value) & kMagnitude);
    const float scaled = magnitude * normal.one * normal.other;
    const float counted = magnitude * denormal + kIntegers;
    return Chosen(Bits(scaled) < kSmallestNormal, Bits(counted) - Bits(kIntegers), scaled, value);
  }
  PowerOfTwo normal;
  float denormal;
};

template <class Scale>
inline __attribute__((always_inline)) std::uint32_t Apply(const Scaled& numbers, int64_t count, int exponent) {
  const Scale scale(exponent);
  const float* from = numbers.from;
  float* to = numbers.to;
  std::uint32_t bits = 0;
  if (numbers.from_step == 1 && numbers.to_step == 1) {
#ifdef __clang__  // in place, too
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (int64_t i = 0; i < count; i++) bits |= Bits(to[i] = scale(from[i]));
  } else {
    for (int64_t i = 0; i < count; i++) bits |= Bits(to[i * numbers.to_step] = scale(from[i * numbers.from_step]));
  }
  return bits;
}

}  // namespace

int ExponentFor(std::uint32_t largest) {
  if (largest == 0 || largest >= kOrdinaryBits) return 0;
  return largest < kSmallestNormal ? kDenormalUnit - std::bit_width(largest) + 1
                                   : 127 - static_cast<int>(largest >> 23);
}

std::uint32_t LargestMagnitude(const float* from, std::int64_t count, std::int64_t step, std::uint32_t enough) {
  constexpr int64_t kAtOnce = 1024;
  std::uint32_t largest = 0;
  for (int64_t begin = 0; begin < count && largest < enough; begin += kAtOnce) {
    largest = std::max(largest, LargestOfRow(from + begin * step, std::min(kAtOnce, count - begin), step));
  }
  return largest;
}

POLYCONV_CLONES std::uint32_t ScaleUp(const Scaled& numbers, std::int64_t count, int exponent) {
  return Apply<Up>(numbers, count, exponent);
}
POLYCONV_CLONES std::uint32_t ScaleDown(const Scaled& numbers, std::int64_t count, int exponent) {
  return Apply<Down>(numbers, count, exponent);
}

int Normalise(float* numbers, std::int64_t count) {
  const int exponent = ExponentFor(LargestMagnitude(numbers, count));
  if (exponent > 0) ScaleUp({numbers, 1, numbers, 1}, count, exponent);
  return exponent;
}

}  // namespace polyconv
