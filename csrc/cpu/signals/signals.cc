#include "signals/signals.h"

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "signals/signals.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "signals/forward-inl.h"
#include "signals/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

void Correlate(const SignalCorrelation& signal, const Runtime& runtime) {
  WithElement(signal.element, [&](auto element) { SignalRows<decltype(element)>(signal).Run(runtime); });
}

void WeightGradient(const SignalWeightGradient& gradient, const Runtime& runtime) {
  WithElement(gradient.element, [&](auto element) { SignalWeights<decltype(element)>(gradient).Run(runtime); });
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

void RunSignals(InstructionSet set, const SignalCorrelation& signal, const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, Correlate, signal, runtime);
}

void RunSignals(InstructionSet set, const SignalWeightGradient& gradient, const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, WeightGradient, gradient, runtime);
}

}  // namespace polyconv
#endif
