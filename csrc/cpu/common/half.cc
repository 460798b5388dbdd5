#include "common/half.h"

#include <algorithm>

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/half.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "common/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

template <class T>
void WidenAs(const HalfRuns& runs, const T* source, float* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.step, target += runs.length) {
    WidenTo(target, source, static_cast<std::ptrdiff_t>(runs.length));
  }
}

template <class T>
void RoundAs(const HalfRuns& runs, const float* source, T* target) {
  for (std::size_t run = 0; run < runs.runs; run++, source += runs.length, target += runs.step) {
    RoundTo(target, source, static_cast<std::ptrdiff_t>(runs.length));
  }
}

// Calls fn(pixel, channel, pixels, channels) for squares of a vector's lanes, smaller at the ends.
template <class Fn>
HWY_INLINE void ForSquares(const HalfPlanes& planes, const Fn& fn) {
  constexpr std::size_t kSide = kLanes;
  for (std::size_t p = 0; p < planes.pixels; p += kSide) {
    for (std::size_t c = 0; c < planes.channels; c += kSide) {
      fn(p, c, static_cast<int>(std::min(kSide, planes.pixels - p)),
         static_cast<int>(std::min(kSide, planes.channels - c)));
    }
  }
}

template <class T>
void WidenPlanesAs(const HalfPlanes& planes, const T* source, float* target) {
  ForSquares(planes, [&](std::size_t p, std::size_t c, int pixels, int channels) HWY_ATTR {
    const T* from = source + static_cast<std::ptrdiff_t>(c) * planes.step + p;
    float* to = target + p * planes.channels + c;
    Floats v[kLanes];
    for (int i = 0; i < kLanes; i++, from += planes.step) {
      v[i] = i >= channels ? hn::Zero(kFloats) : pixels == kLanes ? LoadWide(from) : LoadSome(from, pixels);
    }
    Transpose(v);
    for (int i = 0; i < pixels; i++, to += planes.channels) {
      if (channels == kLanes) {
        Store(to, v[i]);
      } else {
        StoreSome(to, v[i], channels);
      }
    }
  });
}

template <class T>
void RoundPlanesAs(const HalfPlanes& planes, const float* source, T* target) {
  ForSquares(planes, [&](std::size_t p, std::size_t c, int pixels, int channels) HWY_ATTR {
    const float* from = source + p * planes.channels + c;
    T* to = target + static_cast<std::ptrdiff_t>(c) * planes.step + p;
    Floats v[kLanes];
    for (int i = 0; i < kLanes; i++, from += planes.channels) {
      v[i] = i >= pixels ? hn::Zero(kFloats) : channels == kLanes ? Load(from) : LoadSome(from, channels);
    }
    Transpose(v);
    for (int i = 0; i < channels; i++, to += planes.step) {
      if (pixels == kLanes) {
        StoreNarrow(to, v[i]);
      } else {
        StoreSome(to, v[i], pixels);
      }
    }
  });
}

void WidenPlanesHere(Element type, const HalfPlanes& planes, const void* source, float* target) {
  WithElement(type, [&](auto one) { WidenPlanesAs(planes, static_cast<const decltype(one)*>(source), target); });
}

void RoundPlanesHere(Element type, const HalfPlanes& planes, const float* source, void* target) {
  WithElement(type, [&](auto one) { RoundPlanesAs(planes, source, static_cast<decltype(one)*>(target)); });
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

void WidenPlanes(InstructionSet set, Element type, const HalfPlanes& planes, const void* source, float* target) {
  POLYCONV_CALL_TARGET(set, WidenPlanesHere, type, planes, source, target);
}

void RoundPlanes(InstructionSet set, Element type, const HalfPlanes& planes, const float* source, void* target) {
  POLYCONV_CALL_TARGET(set, RoundPlanesHere, type, planes, source, target);
}

}  // namespace polyconv
#endif
