// Values outside the image.
#pragma once

#include <algorithm>

#include "common/convolution.h"
#include "common/integers.h"

namespace polyconv {

// Index of the pixel whose value stands at `index` along an axis of `extent` pixels, or -1 for zero. Tiles may extend
// beyond any border: values from there are multiplied by zeros, the index only has to be valid.
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
