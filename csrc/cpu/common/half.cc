#include "common/half.h"

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/half.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "common/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

template <class T>
void WidenAs(const HalfRuns& runs, const T* source, float* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.step, target += runs.length) {
    std::size_t i = 0;
    for (; i + kLanes <= runs.length; i += kLanes) Store(target + i, LoadWide(source + i));
    const int rest = static_cast<int>(runs.length - i);
    if (rest > 0) StoreSome(target + i, LoadSome(source + i, rest), rest);
  }
}

template <class T>
void RoundAs(const HalfRuns& runs, const float* source, T* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.length, target += runs.step) {
    std::size_t i = 0;
    for (; i + kLanes <= runs.length; i += kLanes) StoreNarrow(target + i, Load(source + i));
    const int rest = static_cast<int>(runs.length - i);
    if (rest > 0) StoreSome(target + i, LoadSome(source + i, rest), rest);
  }
}

void WidenHere(Element type, const HalfRuns& runs, const void* source, float* target) {
  WithElement(type, [&](auto one) { WidenAs(runs, static_cast<const decltype(one)*>(source), target); });
}

void RoundHere(Element type, const HalfRuns& runs, const float* source, void* target) {
  WithElement(type, [&](auto one) { RoundAs(runs, source, static_cast<decltype(one)*>(target)); });
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

void Widen(InstructionSet set, Element type, const HalfRuns& runs, const void* source, float* target) {
  POLYCONV_CALL_TARGET(set, WidenHere, type, runs, source, target);
}

void Round(InstructionSet set, Element type, const HalfRuns& runs, const float* source, void* target) {
  POLYCONV_CALL_TARGET(set, RoundHere, type, runs, source, target);
}

}  // namespace polyconv
#endif
