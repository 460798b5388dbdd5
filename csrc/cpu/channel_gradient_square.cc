// Weight gradients of square kernels, and direct summation for all others.
#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_gradient_square.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "channel_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const GradientKernels* FindSquareGradientHere(GradientAlgorithm algorithm) {
  using F23 = CookToom<2, 3>;
  using F43 = CookToom<4, 3>;
  using F63 = CookToom<6, 3>;
  using F45 = CookToom<4, 5>;
  switch (algorithm) {
    case GradientAlgorithm::kDirect:
      return &kGradientKernels<DirectGradient>;
    case GradientAlgorithm::kF45xF45:
      return &kGradientKernels<FastGradient<F45, F45, false>>;
    case GradientAlgorithm::kF43xF43:
      return &kGradientKernels<FastGradient<F43, F43, false>>;
    case GradientAlgorithm::kF63xF63:
      return &kGradientKernels<FastGradient<F63, F63, false>>;
    case GradientAlgorithm::kF23xF23:
      return &kGradientKernels<FastGradient<F23, F23, false>>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const GradientKernels* FindSquareGradient(InstructionSet set, GradientAlgorithm algorithm) {
  POLYCONV_CALL_TARGET(set, FindSquareGradientHere, algorithm);
}

const GradientKernels* FindGradient(InstructionSet set, GradientAlgorithm algorithm) {
  const GradientKernels* found = FindSquareGradient(set, algorithm);
  return found != nullptr ? found : FindLongGradient(set, algorithm);
}
}  // namespace polyconv
#endif
