// The data caches of a core: what is alive at a time is cut to fit them.
//
// A chunk has to be large, so that the weights that stream past serve many tiles, and small enough to stay in L2 from
// the image to the output. Cores in use have from 256 KiB to 2 MiB of it, and the best cut of one is up to a third
// slower on the other. Cuts are pure functions of the problem and of these sizes: same machine, same bits.
#pragma once

#include <cstddef>

namespace polyconv {

// Bytes of a core's L2 cache, as the system tells it, within the sizes that the cuts were made for.
std::size_t L2Bytes();

// Another size from now on: for tests. Calls that are under way keep what they have asked for.
void SetL2Bytes(std::size_t bytes);

}  // namespace polyconv
