#include "common/output_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/memory.h"
#include "common/sanitizing.h"

namespace polyconv {
namespace {

struct Block {
  void* data;
  std::size_t bytes;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> idle;  // oldest first
  std::unordered_map<void*, std::size_t> taken;
  std::size_t idle_bytes = 0;
  std::size_t limit = std::size_t{1} << 30;

  void FreeUntil(std::size_t bytes) {
    std::size_t count = 0;
    for (; count < idle.size() && idle_bytes > bytes; count++) {
      idle_bytes -= idle[count].bytes;
      LetGo(idle[count].data, idle[count].bytes);
      std::free(idle[count].data);
    }
    idle.erase(idle.begin(), idle.begin() + static_cast<std::ptrdiff_t>(count));
  }
};

// Never destroyed: tensors may outlive every other static object. Created when the library is loaded: if a fork
// interrupted a thread that creates it at first use, the child would wait for that thread forever.
Pool& the_pool = *new Pool;

// Locked across a fork, so that a child gets a consistent pool and a free mutex.
[[maybe_unused]] const int watched =
    pthread_atfork([] { the_pool.mutex.lock(); }, [] { the_pool.mutex.unlock(); }, [] { the_pool.mutex.unlock(); });

}  // namespace

void* TakeOutputBlock(std::size_t bytes) {
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  const std::lock_guard<std::mutex> lock(the_pool.mutex);
  if (size > the_pool.limit) return nullptr;
  void* data = nullptr;
  for (std::size_t i = the_pool.idle.size(); i-- > 0 && data == nullptr;) {
    if (the_pool.idle[i].bytes != size) continue;
    data = the_pool.idle[i].data;
    the_pool.idle_bytes -= size;
    the_pool.idle.erase(the_pool.idle.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (data == nullptr) {
    data = std::aligned_alloc(kHugePage, size);
    if (data == nullptr) return nullptr;
    AdviseHugePages(data, size);
  }
  the_pool.taken.emplace(data, size);
  HandOut(data, bytes, size);
  return data;
}

void ReturnOutputBlock(void* block) {
  const std::lock_guard<std::mutex> lock(the_pool.mutex);
  const auto found = the_pool.taken.find(block);
  if (found == the_pool.taken.end()) return;
  TakeBack(block, found->second);
  the_pool.idle.push_back({block, found->second});
  the_pool.idle_bytes += found->second;
  the_pool.taken.erase(found);
  the_pool.FreeUntil(the_pool.limit);
}

void SetOutputPoolLimit(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(the_pool.mutex);
  the_pool.limit = bytes;
  the_pool.FreeUntil(bytes);
}

std::size_t OutputPoolIdleBytes() {
  const std::lock_guard<std::mutex> lock(the_pool.mutex);
  return the_pool.idle_bytes;
}

}  // namespace polyconv
