// Checked and counted memory accesses, for loads, stores and atomics.
#pragma once
#include "machine.h"

namespace gpu_emulator {

enum class Space { Global, Shared, Local };

// kByWarp: every lane receives what any lane reads. kCopies: the write happens at some time before the thread's wait.
enum AccessFlags : uint8_t { kReads = 1, kWrites = 2, kAtomic = 4, kByWarp = 8, kCopies = 16 };

// Addresses by lane: 64-bit for global memory, 32-bit offsets for shared and local memory.
void global_addresses(const Warp& w, const Inst& in, uint64_t* address);
void window_addresses(const Warp& w, const Inst& in, uint64_t* address);

// Checks and counts an access by the lanes in `mask`; throws Fault. Then every address is valid for host_pointer.
void access(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space, uint8_t how);

inline uint8_t* host_pointer(Machine& m, Warp& w, Space space, uint64_t address, int lane) {
  switch (space) {
    case Space::Global:
      return reinterpret_cast<uint8_t*>(address);
    case Space::Shared:
      return m.shared.data() + address;
    default:
      return w.local.data() + static_cast<size_t>(lane) * m.local_bytes + address;
  }
}

// Splits generic addresses by window and calls f(space, lanes, addresses relative to the window).
template <class F>
void for_each_space(uint32_t mask, uint64_t* address, F f) {
  uint32_t shared = 0, local = 0;
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    if (address[l] - kSharedWindow < kWindowBytes) {
      shared |= 1u << l;
      address[l] -= kSharedWindow;
    } else if (address[l] - kLocalWindow < kWindowBytes) {
      local |= 1u << l;
      address[l] -= kLocalWindow;
    }
  }
  if (uint32_t global = mask & ~shared & ~local) f(Space::Global, global);
  if (shared) f(Space::Shared, shared);
  if (local) f(Space::Local, local);
}

}  // namespace gpu_emulator
