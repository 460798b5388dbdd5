// Scratch memory and output memory on huge pages.
//
// The kernels stream through megabytes with several dozen address streams at a time: with 4 KiB pages the address
// translation alone costs as much as the arithmetic, and every page of a new output is a fault.
#pragma once

#include <cstddef>

namespace polyconv {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// A buffer that only grows; contents are undefined after each call of Get. Aligned to a huge page.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { Release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* Get(std::size_t floats);
  void Release();

  // One per thread, and one for whole-problem buffers of the calling thread. Both are kept between calls, because new
  // pages cost more than most convolutions; their size is bounded by the schedule: see Resolve in tile_lanes/schemes-inl.h.
  static Scratch& OfThread();
  static Scratch& Shared();

 private:
  float* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Asks the kernel for huge pages under a buffer that is about to be written for the first time.
void AdviseHugePages(void* data, std::size_t bytes);

// Hands out parts of one scratch buffer, each on its own cache line and with room for a whole vector on both sides, so
// that loads and stores of full vectors at the edges stay inside.
class Carver {
 public:
  std::size_t Take(std::size_t floats) {
    const std::size_t offset = size_ + kMargin;
    size_ = offset + (floats + 15) / 16 * 16 + kMargin;
    return offset;
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kMargin = 32;
  std::size_t size_ = 0;
};

}  // namespace polyconv
