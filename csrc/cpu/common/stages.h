// Cycle counters per stage, for development: compiled only with -DPOLYCONV_STAGE_COUNTERS.
#pragma once

#include <cstdint>

#if defined(POLYCONV_STAGE_COUNTERS) && defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace polyconv {

enum class Stage : int { kWeights, kLoad, kGather, kExpand, kProducts, kInvert, kWrite, kCount };

#ifdef POLYCONV_STAGE_COUNTERS
inline std::uint64_t Cycles() {
#ifdef __aarch64__
  std::uint64_t ticks;  // of the system's clock, 24 MHz to 1 GHz: user programs cannot read cycles
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return __rdtsc();
#endif
}

inline thread_local std::uint64_t stage_cycles[static_cast<int>(Stage::kCount)] = {};

class StageTimer {
 public:
  explicit StageTimer(Stage stage) : stage_(static_cast<int>(stage)), start_(Cycles()) {}
  ~StageTimer() { stage_cycles[stage_] += Cycles() - start_; }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  int stage_;
  std::uint64_t start_;
};
#else
class StageTimer {
 public:
  explicit StageTimer(Stage) {}
  ~StageTimer() {}
};
#endif

}  // namespace polyconv
