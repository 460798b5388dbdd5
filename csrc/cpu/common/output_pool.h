// Pool of memory for large outputs.
//
// For a new output of hundreds of megabytes, page faults (the system clears every page) often cost more than the
// convolution. Freed blocks are kept, up to a limit, for the next output of the same size. Contents are undefined.
#pragma once

#include <cstddef>

namespace polyconv {

// Size from which a block is worth pooling: below it torch's allocator is as fast.
inline constexpr std::size_t kSmallestBlock = std::size_t{16} << 20;

// Returns null if the block exceeds the pool's limit; the caller then allocates with torch.
void* TakeOutputBlock(std::size_t bytes);
void ReturnOutputBlock(void* block);

// Limit on idle bytes. Lowering it frees the excess at once; 0 turns the pool off.
void SetOutputPoolLimit(std::size_t bytes);
std::size_t OutputPoolIdleBytes();

}  // namespace polyconv
