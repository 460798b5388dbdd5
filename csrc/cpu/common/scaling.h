// Powers of two for numbers that are tiny, below 2^-48: see bindings/denormals.h.
#pragma once

#include <cstdint>

namespace polyconv {

// Exponent of the factor that makes numbers ordinary if the largest magnitude has these bits. 0 if they are, or are zero.
int ExponentFor(std::uint32_t largest);

// Bits of the largest magnitude of some numbers. Those of any ordinary one, if there is one.
std::uint32_t LargestMagnitude(const float* from, std::int64_t count, std::int64_t step = 1);

inline bool IsOrdinary(std::uint32_t bits) {
  return (bits & 0x7fffffff) >= std::uint32_t{127 - 48} << 23;
}

// to = from * 2^exponent: of tiny numbers to ordinary ones, exactly; and of ordinary ones by a negative exponent,
// correctly rounded to denormal numbers. Denormals may count as zero: integers take their place.
struct Scaled {
  const float* from;
  std::int64_t from_step;
  float* to;
  std::int64_t to_step;
};
void ScaleUp(const Scaled& numbers, std::int64_t count, int exponent);
void ScaleDown(const Scaled& numbers, std::int64_t count, int exponent);

// In place. Normalise scales up if all numbers are tiny, and returns the exponent or 0.
int Normalise(float* numbers, std::int64_t count);
inline void Rescale(float* numbers, std::int64_t count, int exponent) {
  if (exponent < 0) ScaleDown({numbers, 1, numbers, 1}, count, exponent);
}

}  // namespace polyconv
