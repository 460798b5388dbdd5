// Floating-point control of threads.
#pragma once

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace polyconv {

// Floating-point control of this thread while it lives: by default the thread's own, with denormals counted as zero.
class FloatControl {
 public:
#ifdef __aarch64__
  static constexpr unsigned kFlush = 1u << 24;  // FPCR's FZ, for operands and results

  static unsigned Get() {
    std::uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return static_cast<unsigned>(control);
  }
  static void Set(unsigned control) { asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{control}) : "memory"); }
#else
  static constexpr unsigned kFlush = 0x8040;  // MXCSR's flush-to-zero and denormals-are-zero

  static unsigned Get() { return _mm_getcsr(); }
  static void Set(unsigned control) { _mm_setcsr(control); }
#endif

  FloatControl() : FloatControl(Get() | kFlush) {}
  explicit FloatControl(unsigned control) : before_(Get()) {
    if (depth_++ == 0) own_ = before_;
    Set(control);
  }
  ~FloatControl() {
    depth_--;
    Set(before_);
  }

  // The control that this thread had before all others.
  static unsigned Own() { return depth_ == 0 ? Get() : own_; }
  // This control, with denormals as they are.
  static unsigned Exact() { return Get() & ~kFlush; }
  FloatControl(const FloatControl&) = delete;
  FloatControl& operator=(const FloatControl&) = delete;

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local unsigned own_ = 0;
  unsigned before_;
};

}  // namespace polyconv
