// The launches of one plan on one device, with everything but the addresses and the stream in place.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "driver.h"

namespace polyconv {

// Bytes that a kernel may take as parameters on every GPU.
inline constexpr size_t kMostParameters = 4096;

// Where in the parameters an address goes: that of a buffer, by its number, and so many bytes further.
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

// The function of the driver that failed, or null; the number of the launch that it was about; what it returned.
struct Outcome {
  const char* refused;
  size_t launch;
  Status status;
};

// Never changed once it is made: threads share it, and no lock is needed.
struct Launches {
  Driver driver;
  void* context;
  std::vector<Launch> all;

  // Enqueues those from `first` up to `last`, in the device's context, which is made current where it is not. A buffer
  // whose address is zero is absent: kernels get a null pointer, whatever the offset. Does not wait for the GPU.
  Outcome Enqueue(size_t first, size_t last, std::span<const uint64_t> addresses, void* stream) const;
};

}  // namespace polyconv
