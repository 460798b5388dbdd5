// Kernels that are wider than high, and 5 x 5.
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile_lanes/schemes_long.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "tile_lanes/schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindLong(const SchemeShape& shape) {
  return FindAmong<kF45xF45Nested, kF45xF45, kF43xF45, kF43xF45Nested>(shape, kKernelsOf);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindLongScheme(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindLong, shape);
}
}  // namespace polyconv
#endif
