// Cycle counters per stage, for development: compiled only with -DPOLYCONV_STAGE_COUNTERS.
#pragma once

#include <cstdint>

#ifdef POLYCONV_STAGE_COUNTERS
#include <x86intrin.h>
#endif

namespace polyconv {

enum class Stage : int { kWeights, kLoad, kGather, kExpand, kProducts, kInvert, kWrite, kCount };

#ifdef POLYCONV_STAGE_COUNTERS
inline thread_local std::uint64_t stage_cycles[static_cast<int>(Stage::kCount)] = {};

class StageTimer {
 public:
  explicit StageTimer(Stage stage) : stage_(static_cast<int>(stage)), start_(__rdtsc()) {}
  ~StageTimer() { stage_cycles[stage_] += __rdtsc() - start_; }
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
