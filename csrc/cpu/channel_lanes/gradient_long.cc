// Weight gradients of kernels that are wider than high, or a single row or column.
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_lanes/gradient_long.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "channel_lanes/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const GradientKernels* FindLongGradientHere(const SchemeShape& shape) {
  return FindAmong<kF45xF45Nested, kF11xF45Nested, kF11xF45, kF45xF11, kF43xF45, kF43xF45Nested, kF11xF63, kF63xF11>(
      shape, kGradientKernelsOf);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const GradientKernels* FindLongGradient(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindLongGradientHere, shape);
}
}  // namespace polyconv
#endif
