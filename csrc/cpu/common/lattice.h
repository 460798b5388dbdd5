// Input gradient of a strided convolution as unit-stride correlations, one per residue class of the pixels.
//
// Along one axis, dx[j] = sum w[r] dy[i] over the pairs with j + top = i stride + r dilation. Pixels j = a + stride u
// of one class involve only the taps r = first + q step with r dilation = a + top (mod stride), and then i = u + base -
// q (dilation / g): a correlation over the reversed taps. Exact, with proofs: polyconv/algebra/polyphase.py.
#pragma once

#include <numeric>

#include "common/integers.h"

namespace polyconv {

struct AxisPhase {
  int count;      // pixels of the class
  int taps;       // taps of the class; 0 if the stride skips these pixels
  int first_tap;  // first of the reversed taps: the last one of the class
  int tap_step;   // from tap to tap; negative
  int padding;    // before dy
  int dilation;   // of dy
};

inline AxisPhase PhaseOf(int residue, int extent, int taps, int stride, int dilation, int before) {
  const int g = std::gcd(stride, dilation), step = stride / g;
  AxisPhase phase{};
  phase.count = (extent - residue + stride - 1) / stride;
  phase.dilation = dilation / g;
  phase.tap_step = -step;
  for (int first = 0; first < step && first < taps; first++) {
    const int rest = residue + before - first * dilation;
    if (FloorMod(rest, stride) != 0) continue;
    const int base = (rest - FloorMod(rest, stride)) / stride;
    phase.taps = (taps - first + step - 1) / step;
    phase.first_tap = first + (phase.taps - 1) * step;
    phase.padding = (phase.taps - 1) * phase.dilation - base;
    break;
  }
  return phase;
}

}  // namespace polyconv
