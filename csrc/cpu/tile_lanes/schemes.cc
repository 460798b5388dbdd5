#include "tile_lanes/schemes.h"

namespace polyconv {

const SchemeKernels* FindScheme(InstructionSet set, const SchemeShape& shape) {
  if (const SchemeKernels* found = FindSquareScheme(set, shape)) return found;
  if (const SchemeKernels* found = FindLongScheme(set, shape)) return found;
  return FindLineScheme(set, shape);
}

}  // namespace polyconv
