// Names of the instruction sets, and detection on this processor.
#include "common/convolution.h"

namespace polyconv {

const char* NameOf(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kSse4:
      return "sse4";
    default:
      return "neon";
  }
}

#ifdef __aarch64__
bool IsSupported(InstructionSet set) {
  return set == InstructionSet::kNeon;
}
#else
bool IsSupported(InstructionSet set) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  switch (set) {
    case InstructionSet::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    case InstructionSet::kAvx2:
      return avx2;
    case InstructionSet::kSse4:
      return __builtin_cpu_supports("sse4.2");
    default:
      return false;
  }
}
#endif

}  // namespace polyconv
