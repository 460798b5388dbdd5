#include "common/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "common/sanitizing.h"

namespace polyconv {
namespace {

// Requests huge pages: a hint, whose refusal costs only speed. Apple's systems have no such request.
void Advise([[maybe_unused]] void* pages, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(pages, bytes, MADV_HUGEPAGE);
#endif
}

}  // namespace

float* Scratch::Get(std::size_t floats) {
  const std::size_t wanted = (floats * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
  if (wanted > bytes_) {
    Release();
    // mmap aligns to small pages: allocate one huge page more, and unmap the ends.
    void* raw = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > start) munmap(raw, aligned - start);
    const std::size_t tail = start + kHugePage - aligned;
    if (tail > 0) munmap(reinterpret_cast<void*>(aligned + wanted), tail);
    Advise(reinterpret_cast<void*>(aligned), wanted);
    data_ = reinterpret_cast<float*>(aligned);
    bytes_ = wanted;
  }
  HandOut(data_, floats * sizeof(float), bytes_);
  return data_;
}

void Scratch::Release() {
  if (data_ != nullptr) {
    LetGo(data_, bytes_);
    munmap(data_, bytes_);
  }
  data_ = nullptr;
  bytes_ = 0;
}

Scratch& Scratch::OfThread() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch& Scratch::Shared() {
  static thread_local Scratch scratch;
  return scratch;
}

void AdviseHugePages(void* data, std::size_t bytes) {
  static const std::uintptr_t page = sysconf(_SC_PAGESIZE);  // up to 64 KiB on ARM
  const auto start = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (start + page - 1) / page * page;
  const std::uintptr_t last = (start + bytes) / page * page;
  if (last > first && last - first >= kHugePage) {
    Advise(reinterpret_cast<void*>(first), last - first);
  }
}

}  // namespace polyconv
