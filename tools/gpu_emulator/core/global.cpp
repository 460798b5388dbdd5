#include "global.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

namespace gpu_emulator {

LazyMemory::LazyMemory(size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
}

LazyMemory::~LazyMemory() {
  if (data_) munmap(data_, bytes_);
}

LazyMemory::LazyMemory(LazyMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

LazyMemory& LazyMemory::operator=(LazyMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

GlobalMemory::GlobalMemory(const Range* ranges, size_t count, bool track_writers) : track_writers_(track_writers) {
  std::vector<Range> sorted(ranges, ranges + count);
  std::sort(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) {
    return a.address != b.address ? a.address < b.address : a.size > b.size;
  });
  for (const Range& r : sorted) {
    if (!r.size) continue;
    uint64_t end = r.address + r.size;
    // Overlapping views of one allocation become one buffer; neighbours that only touch stay separate.
    if (!buffers_.empty() && r.address < buffers_.back().end) {
      buffers_.back().end = std::max(buffers_.back().end, end);
      continue;
    }
    Buffer b;
    b.begin = r.address;
    b.end = end;
    b.bias = (256 - r.origin % 256) % 256;
    buffers_.push_back(std::move(b));
  }
  for (Buffer& b : buffers_) {
    size_t sectors = (b.end - b.begin) / 32 + 2;
    b.readers = LazyMemory(sectors * 4);
    b.written_sectors = LazyMemory(sectors / 8 + 1);
    if (track_writers) b.writers = LazyMemory(((b.end - b.begin) / kWriterBytes + 4) * sizeof(uint32_t));
  }
}

Buffer* GlobalMemory::find(uint64_t address, uint64_t size) {
  auto holds = [&](const Buffer& b) { return address >= b.begin && address < b.end && size <= b.end - address; };
  if (last_ < buffers_.size() && holds(buffers_[last_])) return &buffers_[last_];
  auto it = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                             [](uint64_t a, const Buffer& b) { return a < b.begin; });
  if (it == buffers_.begin() || !holds(*--it)) return nullptr;
  last_ = static_cast<size_t>(it - buffers_.begin());
  return &*it;
}

std::string GlobalMemory::describe_nearest(uint64_t address, uint64_t size) const {
  const Buffer* nearest = nullptr;
  uint64_t best = ~0ull;
  const char* side = "";
  for (const Buffer& b : buffers_) {
    uint64_t distance;
    const char* where;
    if (address < b.begin) {
      distance = b.begin - address;
      where = "before";
    } else {
      distance = address >= b.end ? address - b.end : 0;
      where = "past the end of";
    }
    if (distance < best) {
      best = distance;
      nearest = &b;
      side = where;
    }
  }
  if (!nearest) return "no buffer is registered";
  char text[200];
  snprintf(text, sizeof text, "%llu bytes at 0x%llx start %llu bytes %s the buffer [0x%llx, 0x%llx) of %llu bytes",
           static_cast<unsigned long long>(size), static_cast<unsigned long long>(address),
           static_cast<unsigned long long>(best), side, static_cast<unsigned long long>(nearest->begin),
           static_cast<unsigned long long>(nearest->end),
           static_cast<unsigned long long>(nearest->end - nearest->begin));
  return text;
}

}  // namespace gpu_emulator
