#include "access.h"

#include <algorithm>

namespace gpu_emulator {
namespace {

// Collects distinct offsets with the lanes that share them.
void add_piece(AccessPattern& p, int32_t offset, int lane) {
  // Neighbouring lanes usually touch neighbouring pieces: check the newest first.
  for (int i = p.pieces - 1; i >= 0; i--) {
    if (p.piece[i].offset == offset) {
      p.piece[i].lanes |= 1u << lane;
      return;
    }
  }
  p.piece[p.pieces++] = {offset, 1u << lane};
}

}  // namespace

void analyse_shared(AccessPattern& p, uint32_t width) {
  p.pieces = 0;
  p.wavefronts = p.ideal = 0;
  for (int l = 0; l < kLanes; l++)
    if (p.mask >> l & 1) add_piece(p, p.delta[l], l);

  int lanes_per_phase = width == 16 ? 8 : width == 8 ? 16 : 32;
  int words_per_lane = std::max(1u, width / 4);
  for (int first = 0; first < kLanes; first += lanes_per_phase) {
    int64_t words[kLanes];
    int count = 0;
    for (int l = first; l < first + lanes_per_phase; l++) {
      if (!(p.mask >> l & 1)) continue;
      int64_t word = (static_cast<int64_t>(p.base_in_line) + p.delta[l]) >> 2;
      for (int k = 0; k < words_per_lane; k++) words[count++] = word + k;
    }
    if (!count) continue;
    std::sort(words, words + count);
    count = static_cast<int>(std::unique(words, words + count) - words);
    uint32_t per_bank[32] = {}, worst = 0;
    for (int i = 0; i < count; i++) worst = std::max(worst, ++per_bank[words[i] & 31]);
    p.wavefronts += worst;
    p.ideal += 1;
  }
}

void analyse_global(AccessPattern& p, uint32_t width) {
  p.pieces = 0;
  int64_t lines[kLanes];
  int64_t bytes[kLanes];
  int lanes = 0;
  for (int l = 0; l < kLanes; l++) {
    if (!(p.mask >> l & 1)) continue;
    int64_t at = static_cast<int64_t>(p.base_in_line) + p.delta[l];
    // Offset from the first lane's sector. An aligned access of at most 16 bytes stays inside one.
    add_piece(p, static_cast<int32_t>((at >> 5) - (p.base_in_line >> 5)) * 32, l);
    lines[lanes] = at >> 7;
    bytes[lanes++] = at;
  }
  std::sort(lines, lines + lanes);
  p.wavefronts = static_cast<uint32_t>(std::unique(lines, lines + lanes) - lines);
  std::sort(bytes, bytes + lanes);
  uint32_t unique_bytes = static_cast<uint32_t>(std::unique(bytes, bytes + lanes) - bytes) * width;
  p.ideal = (unique_bytes + kSectorBytes - 1) / kSectorBytes;
}

}  // namespace gpu_emulator
