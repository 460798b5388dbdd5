// Weight gradients of kernels that are wider than high, or a single row or column.
#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_gradient_long.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "channel_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const GradientKernels* FindLongGradientHere(GradientAlgorithm algorithm) {
  using F11 = CookToom<1, 1>;
  using F43 = CookToom<4, 3>;
  using F63 = CookToom<6, 3>;
  using F45 = CookToom<4, 5>;
  switch (algorithm) {
    case GradientAlgorithm::kF45xF45Nested:
      return &kGradientKernels<FastGradient<F45, F45, true>>;
    case GradientAlgorithm::kF11xF45Nested:
      return &kGradientKernels<FastGradient<F11, F45, true>>;
    case GradientAlgorithm::kF11xF45:
      return &kGradientKernels<FastGradient<F11, F45, false>>;
    case GradientAlgorithm::kF45xF11:
      return &kGradientKernels<FastGradient<F45, F11, false>>;
    case GradientAlgorithm::kF43xF45:
      return &kGradientKernels<FastGradient<F43, F45, false>>;
    case GradientAlgorithm::kF43xF45Nested:
      return &kGradientKernels<FastGradient<F43, F45, true>>;
    case GradientAlgorithm::kF11xF63:
      return &kGradientKernels<FastGradient<F11, F63, false>>;
    case GradientAlgorithm::kF63xF11:
      return &kGradientKernels<FastGradient<F63, F11, false>>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const GradientKernels* FindLongGradient(InstructionSet set, GradientAlgorithm algorithm) {
  POLYCONV_CALL_TARGET(set, FindLongGradientHere, algorithm);
}
}  // namespace polyconv
#endif
