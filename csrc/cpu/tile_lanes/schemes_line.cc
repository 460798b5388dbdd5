// Kernels of one row or one column, and direct multiplication.
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile_lanes/schemes_line.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "tile_lanes/schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindLine(const SchemeShape& shape) {
  return FindAmong<kF11xF45Nested, kF11xF45, kF45xF11, kF11xF63, kF63xF11, kDirect>(shape, kKernelsOf);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindLineScheme(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindLine, shape);
}
}  // namespace polyconv
#endif
