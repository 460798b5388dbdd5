// Kernels of one row or one column, and direct multiplication.
#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "schemes_line.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindLine(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kF11xF45Nested:
      return &kKernels<F11, F45, true>;
    case Algorithm::kF11xF45:
      return &kKernels<F11, F45, false>;
    case Algorithm::kF45xF11:
      return &kKernels<F45, F11, false>;
    case Algorithm::kF11xF63:
      return &kKernels<F11, F63, false>;
    case Algorithm::kF63xF11:
      return &kKernels<F63, F11, false>;
    case Algorithm::kF11xF11:
      return &kKernels<F11, F11, false>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindLineScheme(InstructionSet set, Algorithm algorithm) {
  POLYCONV_CALL_TARGET(set, FindLine, algorithm);
}
}  // namespace polyconv
#endif
