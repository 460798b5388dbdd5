// Memory for large outputs, reused.
//
// A new output of some hundred megabytes costs more in page faults (the system clears every page) than many a
// convolution costs in arithmetic. So blocks that tensors give back are kept, up to a limit, for the next output of the
// same size; contents are undefined, as with torch.empty.
#pragma once

#include <cstddef>

namespace polyconv {

// Null when the block would not fit the pool's limit: the caller then allocates as usual.
void* TakeOutputBlock(std::size_t bytes);
void ReturnOutputBlock(void* block);

// Bytes that may lie idle. Lowering it frees at once what is over; 0 turns the pool off.
void SetOutputPoolLimit(std::size_t bytes);
std::size_t OutputPoolIdleBytes();

}  // namespace polyconv
