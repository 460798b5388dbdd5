// Forward kernels with channels in the lanes.
#include "channel_schemes.h"

#include "targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "channel_schemes.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// foreach_target.h comes first
#include "channel_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindChannelSchemeHere(int algorithm) {
  using F23 = CookToom<2, 3>;
  using F43 = CookToom<4, 3>;
  using F63 = CookToom<6, 3>;
  switch (static_cast<ChannelAlgorithm>(algorithm)) {
    case ChannelAlgorithm::kDirect:
      return &kForwardKernels<DirectForward>;
    case ChannelAlgorithm::kF43xF43:
      return &kForwardKernels<FastForward<F43, F43>>;
    case ChannelAlgorithm::kF63xF63:
      return &kForwardKernels<FastForward<F63, F63>>;
    case ChannelAlgorithm::kF23xF23:
      return &kForwardKernels<FastForward<F23, F23>>;
    default:
      return nullptr;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {
const SchemeKernels* FindChannelScheme(InstructionSet set, int algorithm) {
  POLYCONV_CALL_TARGET(set, FindChannelSchemeHere, algorithm);
}
}  // namespace polyconv
#endif
