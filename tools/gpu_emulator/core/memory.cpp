#include "memory.h"

#include <algorithm>
#include <cstdio>

namespace gpu_emulator {

void global_addresses(const Warp& w, const Inst& in, uint64_t* address) {
  const uint32_t *low = w.row(in.src[0]), *high = w.row(in.src[1]);
  for (int l = 0; l < kLanes; l++) address[l] = pair(low[l], high[l]) + static_cast<uint64_t>(in.offset);
}

void window_addresses(const Warp& w, const Inst& in, uint64_t* address) {
  const uint32_t *base = w.row(in.src[0]), *uniform = w.row(in.src[1]), offset = static_cast<uint32_t>(in.offset);
  for (int l = 0; l < kLanes; l++) address[l] = (base[l] << in.scale_shift) + uniform[l] + offset;
}

namespace {

Fault address_fault(FaultKind kind, int lane, uint64_t address, std::string message) {
  Fault f;
  f.kind = kind;
  f.lane = lane;
  f.has_address = true;
  f.address = address;
  f.message = std::move(message);
  return f;
}

void check_alignment(const Inst& in, uint32_t mask, const uint64_t* address, const char* what) {
  uint64_t low_bits = 0;
  for (int l = 0; l < kLanes; l++) low_bits |= (mask >> l & 1) ? address[l] : 0;
  if (!(low_bits & (in.width - 1u))) return;
  for (int l = 0; l < kLanes; l++)
    if ((mask >> l & 1) && address[l] & (in.width - 1u))
      throw address_fault(FaultKind::Misaligned, l, address[l],
                          std::string(what) + " access of " + std::to_string(in.width) + " bytes is not aligned");
}

// Distances from the first active lane. Returns false if they do not fit into int32_t.
bool distances(uint32_t mask, const uint64_t* address, uint64_t base, int32_t* delta) {
  uint64_t wide = 0;
  for (int l = 0; l < kLanes; l++) {
    int64_t d = (mask >> l & 1) ? static_cast<int64_t>(address[l] - base) : 0;
    delta[l] = static_cast<int32_t>(d);
    wide |= static_cast<uint64_t>(d + (1ll << 30)) >> 31;
  }
  return wide == 0;
}

// ---- global ----------------------------------------------------------------------------------------------

void check_writers(Machine& m, Warp& w, const Inst& in, Buffer& b, int lane, uint64_t address, bool writes) {
  uint64_t block = (static_cast<uint64_t>(m.block_id[2]) * m.grid[1] + m.block_id[1]) * m.grid[0] + m.block_id[0];
  uint32_t me = static_cast<uint32_t>(block * m.threads + static_cast<uint64_t>(w.id) * kLanes + lane) + 1;
  uint32_t* writer = reinterpret_cast<uint32_t*>(b.writers.data()) + (address - (b.begin & ~3ull)) / kWriterBytes;
  for (int i = 0; i < std::max(1, in.width / kWriterBytes); i++) {
    uint32_t other = writer[i];
    bool other_block = other && (other - 1) / m.threads != (me - 1) / m.threads;
    if (other && other != me && (writes || other_block)) {
      Fault f = address_fault(FaultKind::GlobalRace, lane, address,
                              std::string(writes ? "store to" : "load of") + " a global word that thread " +
                                  std::to_string((other - 1) % m.threads) + " of block " +
                                  std::to_string((other - 1) / m.threads) + " (linear) stored to in this launch");
      throw f;
    }
    if (writes) writer[i] = me;
  }
}

// Lanes in different buffers, or with distances beyond int32_t: lane by lane, without the cache.
void count_scattered(Machine& m, const Inst& in, uint32_t mask, const uint64_t* address, uint8_t how, Counters& c) {
  uint64_t sectors[kLanes], lines[kLanes], bytes[kLanes];
  int n = 0;
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    Buffer* b = m.global.find(address[l], in.width);
    uint64_t at = address[l] + b->bias;
    if (how & kReads) m.global.touch_read(*b, address[l]);
    if (how & kWrites) m.global.touch_write(*b, address[l]);
    sectors[n] = at >> 5;
    lines[n] = at >> 7;
    bytes[n++] = at;
  }
  auto distinct = [n](uint64_t* x) {
    std::sort(x, x + n);
    return static_cast<uint64_t>(std::unique(x, x + n) - x);
  };
  c.requests++;
  c.sectors += distinct(sectors);
  c.lines += distinct(lines);
  c.ideal += (distinct(bytes) * in.width + kSectorBytes - 1) / kSectorBytes;
}

void access_global(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, uint8_t how) {
  check_alignment(in, mask, address, "global");
  int first = __builtin_ctz(mask);
  uint64_t low = ~0ull, high = 0;
  for (int l = 0; l < kLanes; l++) {
    uint64_t a = (mask >> l & 1) ? address[l] : address[first];
    low = std::min(low, a);
    high = std::max(high, a);
  }
  Buffer* b = m.global.find(low, in.width);
  bool together = b && high <= b->end - in.width;
  if (!together) {
    for (int l = 0; l < kLanes; l++)
      if ((mask >> l & 1) && !m.global.find(address[l], in.width))
        throw address_fault(FaultKind::OutOfBounds, l, address[l],
                            "global access out of bounds: " + m.global.describe_nearest(address[l], in.width));
  }
  if (m.global.tracks_writers() && !(how & kAtomic)) {
    for (int l = 0; l < kLanes; l++)
      if (mask >> l & 1) check_writers(m, w, in, *m.global.find(address[l], in.width), l, address[l], how & kWrites);
  }
  Counters& c = m.counters[in.index];
  alignas(64) int32_t delta[kLanes];
  if (!together || !distances(mask, address, address[first], delta)) {
    count_scattered(m, in, mask, address, how, c);
    return;
  }
  uint64_t placed = address[first] + b->bias;
  const AccessPattern& p = m.global_patterns[in.index].find<analyse_global>(
      mask, static_cast<uint32_t>(placed % kLineBytes), delta, in.width);
  c.requests++;
  c.sectors += static_cast<uint64_t>(p.pieces);
  c.lines += p.wavefronts;
  c.ideal += p.ideal;
  uint64_t sector = (placed & ~static_cast<uint64_t>(kSectorBytes - 1)) - b->bias;
  for (int i = 0; i < p.pieces; i++) {
    uint64_t at = sector + static_cast<uint64_t>(static_cast<int64_t>(p.piece[i].offset));
    if (how & kReads) m.global.touch_read(*b, at);
    if (how & kWrites) m.global.touch_write(*b, at);
  }
}

// ---- shared ----------------------------------------------------------------------------------------------

[[noreturn]] void throw_race(const RaceHit& hit, bool writes) {
  Fault f = address_fault(hit.kind == RaceHit::kUnwritten ? FaultKind::UninitialisedShared : FaultKind::SharedRace,
                          hit.lane, hit.offset, "");
  char where[64];
  snprintf(where, sizeof where, "shared memory at offset 0x%x", hit.offset);
  if (hit.kind == RaceHit::kUnwritten) {
    f.message = std::string("read of ") + where + ", which no thread has written";
    throw f;
  }
  if (hit.kind == RaceHit::kUnfinishedCopy) {
    f.kind = FaultKind::UnfinishedCopy;
    f.other_thread = hit.other_warp * kLanes + hit.other_lane;
    f.message = std::string(writes ? "write to " : "read of ") + where + ", which an asynchronous copy of thread " +
                std::to_string(f.other_thread) + " may still write: it has not waited for it";
    throw f;
  }
  std::string other = "warp " + std::to_string(hit.other_warp);
  if (hit.other_lane >= 0) {
    f.other_thread = hit.other_warp * kLanes + hit.other_lane;
    other = "thread " + std::to_string(f.other_thread);
  }
  f.message = std::string(writes ? "write to " : "read of ") + where + " races with a " +
              (hit.kind == RaceHit::kWithWrite ? "write" : "read") + " by " + other + ": no barrier orders them";
  throw f;
}

// Lanes of one store that hit the same word must store equal values.
void check_store_collision(Warp& w, const Inst& in, uint32_t lanes, uint64_t address) {
  if ((lanes & (lanes - 1)) == 0) return;
  int words = std::max(1, in.width / 4);
  int first = __builtin_ctz(lanes);
  uint32_t relevant = in.width >= 4 ? 0xffffffffu : (1u << (8 * in.width)) - 1;
  for (int i = 0; i < words; i++) {
    const uint32_t* row = w.row(in.src[2]) + (in.src[2].row == kZeroRegister && !in.src[2].pooled ? 0 : i * kLanes);
    for (uint32_t left = lanes & (lanes - 1); left; left &= left - 1) {
      int l = __builtin_ctz(left);
      if (((row[l] ^ row[first]) & relevant) == 0) continue;
      Fault f = address_fault(FaultKind::SharedRace, l, address,
                              "two threads of one store write different values to one shared word");
      f.other_thread = w.id * kLanes + first;
      throw f;
    }
  }
}

void access_shared(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, uint8_t how) {
  check_alignment(in, mask, address, "shared");
  uint64_t high = 0;
  for (int l = 0; l < kLanes; l++) high = std::max(high, (mask >> l & 1) ? address[l] : 0);
  if (high + in.width > m.shared_bytes) {
    for (int l = 0; l < kLanes; l++)
      if ((mask >> l & 1) && address[l] + in.width > m.shared_bytes)
        throw address_fault(FaultKind::OutOfBounds, l, address[l],
                            "shared access out of bounds: " + std::to_string(in.width) + " bytes at offset " +
                                std::to_string(address[l]) + " of " + std::to_string(m.shared_bytes));
  }
  int first = __builtin_ctz(mask);
  uint64_t base = address[first];
  alignas(64) int32_t delta[kLanes];
  distances(mask, address, base, delta);
  const AccessPattern& p =
      m.shared_patterns[in.index].find<analyse_shared>(mask, static_cast<uint32_t>(base % kLineBytes), delta, in.width);
  Counters& c = m.counters[in.index];
  c.shared_requests++;
  c.shared_wavefronts += p.wavefronts;
  c.shared_ideal += p.ideal;
  if (!m.options.check_races) return;
  bool tolerate = m.kernel.shared_cas;
  for (int i = 0; i < p.pieces; i++) {
    uint32_t begin = static_cast<uint32_t>(base + static_cast<uint64_t>(static_cast<int64_t>(p.piece[i].offset)));
    uint32_t lanes = how & kByWarp ? w.active : p.piece[i].lanes;
    RaceHit hit;
    if (how & kCopies) {
      if (lanes & (lanes - 1))
        throw address_fault(FaultKind::SharedRace, __builtin_ctz(lanes), begin, "two threads copy to one shared word");
      hit = m.races.start_copy(w.id, __builtin_ctz(lanes), begin, begin + in.width);
    } else if (how & kAtomic) {
      hit = m.races.atomic(w.id, lanes, begin, begin + in.width, tolerate);
    } else if (how & kWrites) {
      check_store_collision(w, in, lanes, begin);
      hit = m.races.write(w.id, lanes, begin, begin + in.width);
    } else {
      hit = m.races.read(w.id, lanes, begin, begin + in.width, tolerate);
    }
    if (hit) throw_race(hit, how & kWrites);
  }
}

// ---- local -----------------------------------------------------------------------------------------------

// The hardware interleaves local memory by lane, so a word of all lanes is one 128-byte line.
void access_local(Machine& m, Warp&, const Inst& in, uint32_t mask, const uint64_t* address) {
  check_alignment(in, mask, address, "local");
  for (int l = 0; l < kLanes; l++)
    if ((mask >> l & 1) && address[l] + in.width > m.local_bytes)
      throw address_fault(FaultKind::OutOfBounds, l, address[l],
                          "local access out of bounds: offset " + std::to_string(address[l]) + " of " +
                              std::to_string(m.local_bytes) + " bytes of stack");
  uint64_t slots[kLanes];
  int n = 0;
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) slots[n++] = address[l] / 4;
  std::sort(slots, slots + n);
  uint64_t distinct = static_cast<uint64_t>(std::unique(slots, slots + n) - slots);
  uint64_t words = std::max(1, in.width / 4);
  Counters& c = m.counters[in.index];
  c.requests++;
  c.lines += distinct * words;
  c.sectors += std::max<uint64_t>(distinct * words, (static_cast<uint64_t>(n) * words + 7) / 8);
  c.ideal += (static_cast<uint64_t>(n) * words + 7) / 8;
}

}  // namespace

void access(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space, uint8_t how) {
  if (m.tracer)
    for (int l = 0; l < kLanes; l++) m.lane_address[l] = address[l];
  switch (space) {
    case Space::Global:
      access_global(m, w, in, mask, address, how);
      break;
    case Space::Shared:
      access_shared(m, w, in, mask, address, how);
      break;
    case Space::Local:
      access_local(m, w, in, mask, address);
      break;
  }
}

}  // namespace gpu_emulator
