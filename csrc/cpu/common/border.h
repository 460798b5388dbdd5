// What stands outside an image.
#pragma once

#include <algorithm>

#include "common/convolution.h"
#include "common/integers.h"

namespace polyconv {

// The pixel that stands at `index` along an axis of `extent` pixels, or -1 where a zero does. Tiles that jut out may ask
// for places beyond any border: what they get is multiplied by zeros and only has to exist.
inline int SourceIndex(Border border, int index, int extent) {
  if (index >= 0 && index < extent) return index;
  switch (border) {
    case Border::kReflect: {
      const int last = extent - 1;
      if (last == 0) return 0;
      const int folded = FloorMod(index, 2 * last);
      return folded <= last ? folded : 2 * last - folded;
    }
    case Border::kReplicate:
      return std::clamp(index, 0, extent - 1);
    case Border::kCircular:
      return FloorMod(index, extent);
    default:
      return -1;
  }
}

}  // namespace polyconv
