// Powers of two for numbers that are tiny, below 2^-48: see bindings/denormals.h.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

namespace polyconv {

// Kernels that scale while they pack take operands whose elements are all tiny times 2^kTinyExponent: then denormals are
// normal numbers, and none overflows.
inline constexpr int kTinyExponent = 48;

// 2^exponent, from -126 to 127. By its bits, since ldexp takes longer than scaling a short row.
constexpr float PowerOf(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// Whether all were tiny that scaled by 2^kTinyExponent have these bits, taken together: none is 2 or larger.
inline bool WereTiny(std::uint32_t bits) {
  return (bits & 0x40000000) == 0;
}

// What a kernel does with tiny operands. Its floating-point control counts denormals as zero.
struct Tiny {
  int exponent = 0;                       // sums are times 2^exponent, results are not: 0 if no operand is tiny
  bool scales = false;                    // the operand that is packed is multiplied by 2^kTinyExponent
  std::atomic<bool>* ordinary = nullptr;  // set if that operand has an element that is not tiny: nothing is valid then
};

inline constexpr std::uint32_t kOrdinaryBits = std::uint32_t{127 - 48} << 23;  // of 2^-48

// Exponent of the factor that makes numbers ordinary if the largest magnitude has these bits. 0 if they are, or are zero.
int ExponentFor(std::uint32_t largest);

// Bits of the largest magnitude of some numbers. Those of any that has `enough`, if there is one.
std::uint32_t LargestMagnitude(const float* from, std::int64_t count, std::int64_t step = 1,
                               std::uint32_t enough = kOrdinaryBits);

inline bool IsOrdinary(std::uint32_t bits) {
  return (bits & 0x7fffffff) >= kOrdinaryBits;
}

// to = from * 2^exponent: of tiny numbers to ordinary ones, exactly; and of ordinary ones by a negative exponent,
// correctly rounded to denormal numbers. Denormals may count as zero: integers take their place.
struct Scaled {
  const float* from;
  std::int64_t from_step;
  float* to;
  std::int64_t to_step;
};
// Both return all bits of all results, taken together.
std::uint32_t ScaleUp(const Scaled& numbers, std::int64_t count, int exponent);
std::uint32_t ScaleDown(const Scaled& numbers, std::int64_t count, int exponent);

// In place. Normalise scales up if all numbers are tiny, and returns the exponent or 0.
int Normalise(float* numbers, std::int64_t count);
inline void Rescale(float* numbers, std::int64_t count, int exponent) {
  if (exponent < 0) ScaleDown({numbers, 1, numbers, 1}, count, exponent);
}

}  // namespace polyconv
