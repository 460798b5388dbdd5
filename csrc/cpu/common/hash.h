// A 64-bit hash of memory: to notice weights that were written to behind the back of their version counter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyconv {

// Another number after any change of any bit, and after any exchange of places, but for one in some 2^63: there is no
// kind of change (negation, powers of two, swapped channels, a single bit) that it is blind to. The same on every
// processor, and as fast as memory is read.
std::uint64_t Hash(const void* data, std::size_t bytes);

}  // namespace polyconv
