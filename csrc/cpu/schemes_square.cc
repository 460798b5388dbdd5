// 3 x 3 taps.
#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "schemes_square.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindSquare(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kF43xF43:
      return &kKernels<F43, F43, false>;
    case Algorithm::kF63xF63:
      return &kKernels<F63, F63, false>;
    case Algorithm::kF23xF23:
      return &kKernels<F23, F23, false>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindSquareScheme(InstructionSet set, Algorithm algorithm) {
  POLYCONV_CALL_TARGET(set, FindSquare, algorithm);
}
}  // namespace polyconv
#endif
