// Forward kernels with channels in the lanes.
#include "channel_lanes/forward.h"

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_lanes/forward.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "channel_lanes/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindChannelSchemeHere(const SchemeShape& shape) {
  constexpr auto kernels = []<SchemeShape kShape>() { return &kForwardKernels<ForwardOf<kShape>>; };
  return FindAmong<kDirect, kF43xF43, kF63xF63, kF23xF23>(shape, kernels);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindChannelScheme(InstructionSet set, const SchemeShape& shape) {
  POLYCONV_CALL_TARGET(set, FindChannelSchemeHere, shape);
}
}  // namespace polyconv
#endif
