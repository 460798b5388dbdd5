// Floating-point control of threads.
#pragma once

#include <xmmintrin.h>

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
  // This control, with denormals as they are.
  static unsigned Exact() { return _mm_getcsr() & ~(kDenormalsAreZero | kFlushToZero); }
  FloatControl(const FloatControl&) = delete;
  FloatControl& operator=(const FloatControl&) = delete;

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local unsigned own_ = 0;
  unsigned before_;
};

}  // namespace polyconv
