// Weight gradients of square kernels, and direct summation for all others.
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_lanes/gradient_square.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "channel_lanes/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const GradientKernels* FindSquareGradientHere(const SchemeShape& shape) {
  return FindAmong<kDirect, kF45xF45, kF43xF43, kF63xF63, kF23xF23>(shape, kGradientKernelsOf);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const GradientKernels* FindSquareGradient(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindSquareGradientHere, shape);
}

const GradientKernels* FindGradient(InstructionSet set, const SchemeShape& shape) {
  const GradientKernels* found = FindSquareGradient(set, shape);
  return found != nullptr ? found : FindLongGradient(set, shape);
}
}  // namespace polyconv
#endif
