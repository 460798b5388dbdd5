// Asynchronous copies from global to shared memory (LDGSTS), and waits for them.
//
// The bytes are moved at once. On hardware they arrive at any time before the wait: until then, any access is a race.
#include <algorithm>
#include <cstring>

#include "bind.h"
#include "memory.h"

namespace gpu_emulator {
namespace {

enum CopyFlags : uint8_t { kZeroFill = 1, kPredicated = 2 };

// src[0..1] and offset: global address; src[4..5] and imm: shared address.
void run_ldgsts(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t from[kLanes], to[kLanes];
  global_addresses(w, in, from);
  const uint32_t *base = w.row(in.src[4]), *uniform = w.row(in.src[5]);
  uint32_t bytes[kLanes], loads = mask;
  if (in.flags & kPredicated) loads &= w.predicate(in.psrc[0]);  // the others write zeros
  for (int l = 0; l < kLanes; l++) {
    to[l] = (base[l] << in.scale_shift) + uniform[l] + in.imm;
    bytes[l] = in.width;
    if (in.flags & kZeroFill) {  // the low bits of the address are the number of missing bytes
      bytes[l] -= static_cast<uint32_t>(from[l] & (in.width - 1u));
      from[l] &= ~static_cast<uint64_t>(in.width - 1u);
    }
  }
  access(m, w, in, mask, to, Space::Shared, kWrites | kCopies);
  if (loads) access(m, w, in, loads, from, Space::Global, kReads);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint8_t* shared = host_pointer(m, w, Space::Shared, to[l], l);
    memset(shared, 0, in.width);
    if (loads >> l & 1) memcpy(shared, host_pointer(m, w, Space::Global, from[l], l), bytes[l]);
    if (m.options.check_races) w.copies.push_back({static_cast<uint32_t>(to[l]), in.width, l, w.copy_groups[l]});
  }
}

// LDGSTS.E.BYPASS.128.ZFILL [R13+0xc00], [R10.64], P0. Without ZFILL the predicate is that of cp.async's ignore-src,
// which is also what ptxas makes of a source size that is either 0 or all.
void bind_ldgsts(Binder& b) {
  Inst& in = b.inst;
  if (!b.take("E")) throw Unsupported("32-bit global address");
  b.ignore({"BYPASS", "LTC64B", "LTC128B", "LTC256B"});  // caching hints
  const int width = b.take_one({"128", "64"});
  in.width = width == 0 ? 16 : width == 1 ? 8 : 4;
  if (b.take("ZFILL")) in.flags |= kZeroFill;
  b.address();
  in.src[4] = in.src[0];
  in.src[5] = in.src[1];
  in.imm = static_cast<uint32_t>(in.offset);
  in.wide_address = true;
  b.address();
  if (b.more()) {
    in.flags |= kPredicated;
    b.predicate_source(0);
  }
  b.kernel().asynchronous_copies = true;
  in.run = run_ldgsts;
}

// Closes the group of the copies that a lane has started since the previous LDGDEPBAR.
void run_ldgdepbar(Machine&, Warp& w, const Inst&, uint32_t mask) {
  for (int l = 0; l < kLanes; l++) w.copy_groups[l] += mask >> l & 1;
}

// imm: number of newest closed groups that need not be complete.
void run_wait(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  auto complete = [&](const AsynchronousCopy& c) {
    return (mask >> c.lane & 1) && static_cast<uint64_t>(c.group) + in.imm < w.copy_groups[c.lane];
  };
  for (const AsynchronousCopy& c : w.copies)
    if (complete(c)) m.races.finish_copy(w.id, c.lane, c.begin, c.begin + c.bytes);
  w.copies.erase(std::remove_if(w.copies.begin(), w.copies.end(), complete), w.copies.end());
}

}  // namespace

bool bind_copy(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  if (op == "LDGSTS") {
    bind_ldgsts(b);
  } else if (op == "LDGDEPBAR") {
    in.run = run_ldgdepbar;
  } else if (op == "DEPBAR") {  // groups of copies count in scoreboard 0; nothing else is in flight here
    const bool of_copies = b.take("LE") && b.more() && b.next().text == "SB0";
    in.imm = of_copies ? b.immediate() : kNoLimit;
    while (b.more()) b.next();
    in.run = run_wait;
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
