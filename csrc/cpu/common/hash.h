// 64-bit hash of memory, to detect writes to weights that do not move their version counter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyconv {

// Any change of bits or of their order changes the hash, but for one case in about 2^63: no kind of change (negation,
// powers of two, swapped channels, a single bit) is systematically missed. Equal on all processors; as fast as memory.
std::uint64_t Hash(const void* data, std::size_t bytes);

}  // namespace polyconv
