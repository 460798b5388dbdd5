// Kernels that are wider than high, and 5 x 5.
#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "schemes_long.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindLong(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kF45xF45Nested:
      return &kKernels<F45, F45, true>;
    case Algorithm::kF45xF45:
      return &kKernels<F45, F45, false>;
    case Algorithm::kF43xF45:
      return &kKernels<F43, F45, false>;
    case Algorithm::kF43xF45Nested:
      return &kKernels<F43, F45, true>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindLongScheme(InstructionSet set, Algorithm algorithm) {
  POLYCONV_CALL_TARGET(set, FindLong, algorithm);
}
}  // namespace polyconv
#endif
