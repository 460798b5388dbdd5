#include "common/caches.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <unistd.h>

#include <fstream>
#endif

namespace polyconv {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kLeast = 256 * kKiB, kMost = 2048 * kKiB;  // virtual machines often report too much

#ifdef __APPLE__
// Of the fast cores, several of which share it. 0 if unknown.
long Told() {
  std::int64_t told = 0;
  std::size_t size = sizeof told;
  return sysctlbyname("hw.perflevel0.l2cachesize", &told, &size, nullptr, 0) == 0 ? static_cast<long>(told) : 0;
}
#else
// 0 or -1 if unknown.
long Told() {
  long told = sysconf(_SC_LEVEL2_CACHE_SIZE);
#ifdef __aarch64__
  if (std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index2/size"); told <= 0 && file >> told) told *= kKiB;
#endif
  return told;
}
#endif

std::size_t AskSystem() {
  const long told = Told();
  return told > 0 ? std::clamp(static_cast<std::size_t>(told), kLeast, kMost) : 1024 * kKiB;
}

std::atomic<std::size_t>& Size() {
  static std::atomic<std::size_t> size{AskSystem()};
  return size;
}

}  // namespace

std::size_t L2Bytes() {
  return Size().load(std::memory_order_relaxed);
}

void SetL2Bytes(std::size_t bytes) {
  Size().store(std::clamp(bytes, kLeast, kMost), std::memory_order_relaxed);
}

}  // namespace polyconv
