#include "output_pool.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "sanitizing.h"

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

// Never destroyed: tensors may outlive every other static object.
Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

void* TakeOutputBlock(std::size_t bytes) {
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Pool& pool = ThePool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  if (size > pool.limit) return nullptr;
  void* data = nullptr;
  for (std::size_t i = pool.idle.size(); i-- > 0 && data == nullptr;) {
    if (pool.idle[i].bytes != size) continue;
    data = pool.idle[i].data;
    pool.idle_bytes -= size;
    pool.idle.erase(pool.idle.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (data == nullptr) {
    data = std::aligned_alloc(kHugePage, size);
    if (data == nullptr) return nullptr;
    AdviseHugePages(data, size);
  }
  pool.taken.emplace(data, size);
  HandOut(data, bytes, size);
  return data;
}

void ReturnOutputBlock(void* block) {
  Pool& pool = ThePool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  const auto found = pool.taken.find(block);
  if (found == pool.taken.end()) return;
  TakeBack(block, found->second);
  pool.idle.push_back({block, found->second});
  pool.idle_bytes += found->second;
  pool.taken.erase(found);
  pool.FreeUntil(pool.limit);
}

void SetOutputPoolLimit(std::size_t bytes) {
  Pool& pool = ThePool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.limit = bytes;
  pool.FreeUntil(bytes);
}

std::size_t OutputPoolIdleBytes() {
  Pool& pool = ThePool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return pool.idle_bytes;
}

}  // namespace polyconv
