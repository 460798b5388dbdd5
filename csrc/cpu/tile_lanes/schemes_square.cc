// 3 x 3 taps.
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile_lanes/schemes_square.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "tile_lanes/schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindSquare(const SchemeShape& shape) {
  return FindAmong<kF43xF43, kF63xF63, kF23xF23>(shape, kKernelsOf);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindSquareScheme(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindSquare, shape);
}
}  // namespace polyconv
#endif
