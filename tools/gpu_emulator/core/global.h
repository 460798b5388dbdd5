// Global memory is host memory: buffers are registered with their bounds, addresses are unchanged.
//
// Per-byte state of a buffer is in lazily mapped pages: a huge buffer of which a kernel touches little costs little.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpu_emulator {

// Zero-filled memory that takes space only where it is touched.
class LazyMemory {
 public:
  LazyMemory() = default;
  explicit LazyMemory(size_t bytes);
  ~LazyMemory();
  LazyMemory(LazyMemory&& other) noexcept;
  LazyMemory& operator=(LazyMemory&& other) noexcept;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Granularity at which stores are attributed to threads: neighbouring 16-bit elements may belong to two threads.
constexpr int kWriterBytes = 2;

struct Buffer {
  uint64_t begin = 0, end = 0;
  // Added to an address before it is split into sectors and lines: only CUDA allocations start on 256-byte boundaries.
  uint64_t bias = 0;
  LazyMemory readers;          // per 32-byte sector: number of the last block that read it
  LazyMemory written_sectors;  // one bit per 32-byte sector
  LazyMemory writers;          // per kWriterBytes: 1 + index of the thread that stored there

  uint64_t sector_index(uint64_t address) const { return ((address + bias) >> 5) - ((begin + bias) >> 5); }
};

class GlobalMemory {
 public:
  struct Range {
    uint64_t address, size, origin;
  };
  GlobalMemory(const Range* ranges, size_t count, bool track_writers);

  // The buffer that holds [address, address + size) entirely, or null.
  Buffer* find(uint64_t address, uint64_t size);
  std::string describe_nearest(uint64_t address, uint64_t size) const;

  // Counts a sector once per launch, and reads also once per block (the traffic of a perfect L1).
  void touch_read(Buffer& b, uint64_t address) {
    uint32_t& last = reinterpret_cast<uint32_t*>(b.readers.data())[b.sector_index(address)];
    unique_read_ += last == 0;
    block_unique_read_ += last != block_;
    last = block_;
  }
  void touch_write(Buffer& b, uint64_t address) {
    uint64_t index = b.sector_index(address);
    uint8_t& byte = b.written_sectors.data()[index >> 3];
    uint8_t bit = static_cast<uint8_t>(1u << (index & 7));
    unique_written_ += !(byte & bit);
    byte |= bit;
  }
  void start_block() { block_++; }
  uint64_t unique_read() const { return unique_read_; }
  uint64_t block_unique_read() const { return block_unique_read_; }
  uint64_t unique_written() const { return unique_written_; }
  bool tracks_writers() const { return track_writers_; }

 private:
  std::vector<Buffer> buffers_;  // sorted, not overlapping
  size_t last_ = 0;
  bool track_writers_;
  uint32_t block_ = 0;  // blocks started
  uint64_t unique_read_ = 0, block_unique_read_ = 0, unique_written_ = 0;
};

}  // namespace gpu_emulator
