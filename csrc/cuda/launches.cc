#include "launches.h"

#include <cstring>

namespace polyconv {
namespace {

Status Enqueue(const Driver& driver, const Launch& launch, std::span<const uint64_t> addresses, void* stream) {
  // Patched copy for this call. The driver copies it again before it returns.
  alignas(16) unsigned char parameters[kMostParameters];
  std::memcpy(parameters, launch.parameters.data(), launch.parameters.size());
  for (const Slot& slot : launch.slots) {
    const uint64_t address = addresses[slot.buffer];
    const uint64_t written = address != 0 ? address + slot.byte_offset : 0;
    std::memcpy(parameters + slot.at, &written, sizeof(written));
  }
  void* all[] = {parameters};
  const auto& grid = launch.grid;
  const auto& block = launch.block;
  return driver.launch_kernel(launch.function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                              launch.dynamic_shared, stream, all, nullptr);
}

}  // namespace

Outcome Launches::Enqueue(size_t first, size_t last, std::span<const uint64_t> addresses, void* stream) const {
  // torch has usually made this context current already.
  void* current = nullptr;
  const bool push = driver.ctx_get_current(&current) != 0 || current != context;
  if (push) {
    if (const Status status = driver.ctx_push_current(context)) return {"cuCtxPushCurrent", first, status};
  }
  Outcome outcome = {nullptr, 0, 0};
  for (size_t i = first; i < last; i++) {
    if (const Status status = polyconv::Enqueue(driver, all[i], addresses, stream)) {
      outcome = {"cuLaunchKernel", i, status};
      break;
    }
  }
  if (push) {
    const Status status = driver.ctx_pop_current(&current);
    if (status != 0 && outcome.refused == nullptr) return {"cuCtxPopCurrent", last, status};
  }
  return outcome;
}

}  // namespace polyconv
