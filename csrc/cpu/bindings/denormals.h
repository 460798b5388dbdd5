// Denormal numbers, below 2^-126. A product with one takes a processor over a hundred cycles, so kernels count them as
// zero. Operands that are tiny as a whole are scaled by a power of two before, and the result is scaled back.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <xmmintrin.h>

#include <optional>

#include "bindings/tensors.h"
#include "common/memory.h"

namespace polyconv {

// Floating-point control of this thread while it lives: by default the thread's own, with denormals counted as zero.
class FloatControl {
 public:
  static constexpr unsigned kDenormalsAreZero = 0x0040, kFlushToZero = 0x8000;

  FloatControl() : FloatControl(_mm_getcsr() | kDenormalsAreZero | kFlushToZero) {}
  explicit FloatControl(unsigned control) : before_(_mm_getcsr()) { _mm_setcsr(control); }
  ~FloatControl() { _mm_setcsr(before_); }
  FloatControl(const FloatControl&) = delete;
  FloatControl& operator=(const FloatControl&) = delete;

 private:
  unsigned before_;
};

// An operand as kernels take it: the given tensor or, if all of its values are below 2^-48, a copy times 2^exponent.
// Products of two such operands lie above the denormals, as do their sums. One value that is not tiny is enough, so
// ordinary tensors are not read to their end. The copy is in `scratch`, since new pages cost more than the scaling.
struct Operand {
  static Operand Of(const Tensor& given, Scratch& scratch);

  Tensor tensor;
  int exponent = 0;
};

// Both operands of a pass.
struct Operands {
  Operands(const Tensor& first, const Tensor& second)
      : a(Operand::Of(first, scratch[0])), b(Operand::Of(second, scratch[1])) {}
  int exponent() const { return a.exponent + b.exponent; }

  static inline thread_local Scratch scratch[2];
  Operand a, b;
};

// tensor *= 2^exponent, correctly rounded: the results may be denormal.
void Rescale(const Tensor& tensor, int exponent);

// y = activation(2^exponent sum + bias + residual). `sum` is overwritten, and is `y` if there is no residual.
void FinishForward(const Tensor& sum, int exponent, const std::optional<Tensor>& bias, const Epilogue<float>& epilogue,
                   const Tensor& y);

// Forward pass on operands that were tiny: y = activation(2^exponent sum + bias + residual). `run` writes the sum.
template <class Run>
void ForwardOfTiny(const Tensor& y, int exponent, const std::optional<Tensor>& bias, const Epilogue<float>& epilogue,
                   const Run& run) {
  // A residual may be the output itself.
  const Tensor sum = epilogue.residual == nullptr ? y : torch::stable::empty_like(y);
  run(sum);
  FinishForward(sum, exponent, bias, epilogue, y);
}

}  // namespace polyconv
