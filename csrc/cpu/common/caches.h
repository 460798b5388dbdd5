// Cache sizes that the work is cut for.
// A chunk must be large, so that streamed weights serve many tiles, and small enough to stay in L2 from input to
// output. L2 sizes in use range from 256 KiB to 2 MiB; the best cut for one is up to a third slower on the other. Cuts
// are pure functions of the problem and of these sizes: same machine, same bits.
#pragma once

#include <cstddef>

namespace polyconv {

// Size of a core's L2 cache [bytes] as the system reports it, clamped to the range that the cuts were designed for.
std::size_t L2Bytes();

// Overrides the size, for tests. Running calls keep the size that they read.
void SetL2Bytes(std::size_t bytes);

}  // namespace polyconv
