// Denormal numbers, below 2^-126. A product with one takes a processor over a hundred cycles, so kernels count them as
// zero. Operands that are tiny as a whole are scaled by a power of two before, and the result is scaled back.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include "bindings/tensors.h"
#include "common/float_control.h"
#include "common/memory.h"
#include "common/scaling.h"

namespace polyconv {

// An operand as kernels take it: the given tensor or, if all of its values are below 2^-48, a copy times 2^exponent.
// Products of two such operands and of their sums lie above the denormals. Finding one value that is not tiny is enough,
// so ordinary tensors are not read to their end. The copy is in `scratch`, since new pages cost more than the scaling.
class Operand {
 public:
  // `most`: the largest exponent; 0 takes the tensor as it is, unread.
  Operand(const View& given, Scratch& scratch, int most = 149);
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

 private:
  int64_t strides_[5];  // of a copy

 public:
  int exponent = 0;
  const View view;

 private:
  View Scaled(const View& given, Scratch& scratch, int most);
};

// Both operands of a pass.
struct Operands {
  Operands(const View& first, const View& second) : a(first, scratch[0]), b(second, scratch[1]) {}
  int exponent() const { return a.exponent + b.exponent; }

  static inline thread_local Scratch scratch[2];
  const Operand a, b;
};

// Bits of the largest magnitude of a tensor. Those of any that has `enough`, if there is one.
std::uint32_t LargestOf(const View& tensor, std::uint32_t enough = kOrdinaryBits);

// True if no element is ordinary among some that are spread over the tensor, and among its first ones in float32, so that
// all may be tiny. Float16 has no such numbers.
bool MayBeTiny(const View& tensor);

// tensor *= 2^exponent, correctly rounded: the results may be denormal.
void Rescale(const View& tensor, int exponent);

// to[i] = activation(sums[i] + bias[i] + residual[i]), denormals included. Steps are in elements, that of the residual is
// that of `to`. `bias` and `residual` may be null. `sums` may be `to`.
struct FinishedRow {
  const float* sums;
  std::ptrdiff_t sums_step;
  const float* bias;
  std::ptrdiff_t bias_step;
  const float* residual;
  float* to;
  std::ptrdiff_t step;
};
void Finish(const FinishedRow& row, int64_t count, const Epilogue<float>& epilogue);

// Runs a forward pass on operands that are tiny: y = activation(2^exponent sum + bias + residual). `run` writes the sum.
void ForwardOfTiny(const View& y, int exponent, const std::optional<View>& bias, const Epilogue<float>& epilogue,
                   const std::function<void(const View& sum)>& run);

}  // namespace polyconv
