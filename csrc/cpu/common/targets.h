// Instruction sets that the kernels are compiled for. Include before foreach_target.h.
#pragma once

#ifdef __aarch64__
// NEON, the baseline of ARM64. The kernels keep vectors in arrays, and those of SVE have no size.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_SCALAR | HWY_EMU128)

#define POLYCONV_CALL_TARGET(set, function, ...) return static_cast<void>(set), N_NEON::function(__VA_ARGS__)
#else
// Three levels of x86: 512-bit vectors, 256-bit with FMA, 128-bit. Those between are not worth their compile time.
#define HWY_WANT_SSE4 1
#define HWY_DISABLED_TARGETS (HWY_AVX3_DL | HWY_SSSE3 | HWY_SCALAR | HWY_EMU128)

// Highway's own dispatch would need its shared library at run time.
#define POLYCONV_CALL_TARGET(set, function, ...) \
  switch (set) {                                 \
    case InstructionSet::kAvx512:                \
      return N_AVX3::function(__VA_ARGS__);      \
    case InstructionSet::kAvx2:                  \
      return N_AVX2::function(__VA_ARGS__);      \
    default:                                     \
      return N_SSE4::function(__VA_ARGS__);      \
  }
#endif
