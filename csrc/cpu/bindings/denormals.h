// Denormal numbers, below 2^-126. A product with one takes a processor over a hundred cycles, so kernels count them as
// zero. Operands that are tiny as a whole are scaled by a power of two before, and the result is scaled back.
#pragma once

#include <xmmintrin.h>

#include <functional>
#include <optional>

#include "bindings/tensors.h"
#include "common/memory.h"

namespace polyconv {

// Floating-point control of this thread while it lives: by default the thread's own, with denormals counted as zero.
class FloatControl {
 public:
  static constexpr unsigned kDenormalsAreZero = 0x0040, kFlushToZero = 0x8000;

  FloatControl() : FloatControl(_mm_getcsr() | kDenormalsAreZero | kFlushToZero) {}
  explicit FloatControl(unsigned control) : before_(_mm_getcsr()) {
    if (depth_++ == 0) own_ = before_;
    _mm_setcsr(control);
  }
  ~FloatControl() {
    depth_--;
    _mm_setcsr(before_);
  }

  // The control that this thread had before all others.
  static unsigned Own() { return depth_ == 0 ? _mm_getcsr() : own_; }
  FloatControl(const FloatControl&) = delete;
  FloatControl& operator=(const FloatControl&) = delete;

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local unsigned own_ = 0;
  unsigned before_;
};

// An operand as kernels take it: the given tensor or, if all of its values are below 2^-48, a copy times 2^exponent.
// Products of two such operands and of their sums lie above the denormals. Finding one value that is not tiny is enough,
// so ordinary tensors are not read to their end. The copy is in `scratch`, since new pages cost more than the scaling.
class Operand {
 public:
  Operand(const View& given, Scratch& scratch);
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

 private:
  int64_t strides_[5];  // of a copy

 public:
  int exponent = 0;
  const View view;

 private:
  View Scaled(const View& given, Scratch& scratch);
};

// Both operands of a pass.
struct Operands {
  Operands(const View& first, const View& second) : a(first, scratch[0]), b(second, scratch[1]) {}
  int exponent() const { return a.exponent + b.exponent; }

  static inline thread_local Scratch scratch[2];
  const Operand a, b;
};

// tensor *= 2^exponent, correctly rounded: the results may be denormal.
void Rescale(const View& tensor, int exponent);

// Runs a forward pass on operands that are tiny: y = activation(2^exponent sum + bias + residual). `run` writes the sum.
void ForwardOfTiny(const View& y, int exponent, const std::optional<View>& bias, const Epilogue<float>& epilogue,
                   const std::function<void(const View& sum)>& run);

}  // namespace polyconv
