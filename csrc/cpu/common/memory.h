// Scratch and output memory on huge pages.
// The kernels read and write megabytes in several dozen address streams. With 4 KiB pages, address translation alone
// costs as much as the arithmetic, and every page of a new output is a page fault.
#pragma once

#include <cstddef>

namespace polyconv {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Grow-only buffer, aligned to a huge page. Get leaves the contents undefined.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { Release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* Get(std::size_t floats);
  void Release();
  // Releases a buffer that only extreme sizes need.
  void Trim() {
    if (bytes_ > kMostKept) Release();
  }

  // One per thread, and one per calling thread for whole-problem buffers. Both persist between calls, because new pages
  // cost more than most convolutions. The schedule bounds their size: see Resolve in tile_lanes/schemes-inl.h.
  static Scratch& OfThread();
  static Scratch& Shared();

 private:
  static constexpr std::size_t kMostKept = std::size_t{128} << 20;

  float* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Requests huge pages for a buffer before its first write.
void AdviseHugePages(void* data, std::size_t bytes);

// Cuts a scratch buffer into parts, each on its own cache line with a margin of a whole vector on both sides, so that
// full vector accesses at the edges stay inside.
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
