// Mapping of a warp-wide memory access onto banks, sectors and lines.
//
// In a loop the lanes keep their distances and only the base moves, so the analysis of an access is cached per
// instruction, keyed by the distances, the active lanes and the base within a 128-byte line.
#pragma once
#include <cstdint>
#include <memory>

#include "race.h"

namespace gpu_emulator {

constexpr uint32_t kSectorBytes = 32;
constexpr uint32_t kLineBytes = 128;  // also the span of the 32 shared-memory banks

struct AccessPattern {
  // Key.
  uint32_t mask = 0;
  uint32_t base_in_line = 0;
  alignas(64) int32_t delta[kLanes] = {};  // bytes from the first active lane; 0 for inactive lanes
  // Distinct pieces: for shared memory the accessed words of `width` bytes, for global memory 32-byte sectors.
  struct Piece {
    int32_t offset;  // bytes from the first active lane's address (sectors: from its sector)
    uint32_t lanes;
  };
  int pieces = 0;
  Piece piece[kLanes];
  uint32_t wavefronts = 0;  // shared: passes through the banks; global: distinct 128-byte lines
  uint32_t ideal = 0;       // shared: passes without conflicts; global: sectors if perfectly packed
};

// Shared memory has 32 banks of 4 bytes. A 64-bit access runs as two half-warps, a 128-bit one as four
// quarter-warps; within each, the passes needed are the largest number of distinct words in one bank.
void analyse_shared(AccessPattern& p, uint32_t width);
void analyse_global(AccessPattern& p, uint32_t width);

class PatternCache {
 public:
  // `base` is the first active lane's address; `delta` must be 0 in inactive lanes.
  template <void (*analyse)(AccessPattern&, uint32_t)>
  const AccessPattern& find(uint32_t mask, uint32_t base_in_line, const int32_t* delta, uint32_t width) {
    if (!entries_) entries_ = std::make_unique<AccessPattern[]>(kEntries);
    AccessPattern& p = entries_[(base_in_line >> 2) % kEntries];
    uint32_t different = (p.mask ^ mask) | (p.base_in_line ^ base_in_line);
    for (int l = 0; l < kLanes; l++) different |= static_cast<uint32_t>(p.delta[l] ^ delta[l]);
    if (different) {
      p.mask = mask;
      p.base_in_line = base_in_line;
      for (int l = 0; l < kLanes; l++) p.delta[l] = delta[l];
      analyse(p, width);
    }
    return p;
  }

 private:
  static constexpr int kEntries = 32;
  std::unique_ptr<AccessPattern[]> entries_;
};

}  // namespace gpu_emulator
