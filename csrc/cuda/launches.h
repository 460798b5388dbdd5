// Launches of one plan on one device, complete but for the addresses of the buffers and the stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "driver.h"

namespace polyconv {

// Limit on kernel parameters on every GPU [bytes].
inline constexpr size_t kMostParameters = 4096;

// An address in the parameters: byte `at` receives the address of buffer number `buffer` plus `byte_offset`.
struct Slot {
  size_t at;
  size_t buffer;
  uint64_t byte_offset;
};

struct Launch {
  void* function;
  std::array<unsigned, 3> grid, block;
  unsigned dynamic_shared;
  std::vector<unsigned char> parameters;
  std::vector<Slot> slots;
};

// Result of Enqueue: the driver function that failed (null on success), the index of its launch, and its status.
struct Outcome {
  const char* refused;
  size_t launch;
  Status status;
};

// Immutable, so threads share it without a lock.
struct Launches {
  Driver driver;
  void* context;
  std::vector<Launch> all;

  // Enqueues the launches from `first` up to `last`, with the device's context current, and does not wait for the GPU.
  // An address of zero marks an absent buffer: kernels get a null pointer, whatever the offset.
  Outcome Enqueue(size_t first, size_t last, std::span<const uint64_t> addresses, void* stream) const;
};

}  // namespace polyconv
