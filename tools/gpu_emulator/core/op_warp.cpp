// Warp-wide instructions and special registers.
#include <algorithm>
#include <cstring>

#include "bind.h"

namespace gpu_emulator {

void require_all_lanes(const Machine& m, const Inst& in, uint32_t mask) {
  if (mask == kAllLanes) return;
  Fault f;
  f.kind = FaultKind::Unsupported;
  f.message = m.kernel.sass[in.index].opcode + " with inactive lanes";
  throw f;
}

namespace {

// Orders the lanes that execute a warp-synchronous instruction together.
void synchronised(Machine& m, Warp& w, uint32_t mask) {
  if (m.options.check_races) m.races.warp_sync(w.id, mask, w.alive);
}

// ---- shuffle ---------------------------------------------------------------------------------------------

enum Shuffle : uint8_t { kIndex, kUp, kDown, kButterfly };

void run_shfl(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const Values from = w.values(in.src[0]), distance = w.values(in.src[1]), control = w.values(in.src[2]);
  alignas(64) uint32_t out[kLanes];
  uint32_t valid = 0;
  for (int l = 0; l < kLanes; l++) {
    // control: bits 8-12 are the lane bits that stay (the segment), bits 0-4 clamp
    uint32_t keep = control[l] >> 8 & 31, clamp = control[l] & 31;
    int most = static_cast<int>((static_cast<uint32_t>(l) & keep) | (clamp & ~keep));
    int first = static_cast<int>(static_cast<uint32_t>(l) & keep);
    int by = static_cast<int>(distance[l] & 31), source;
    bool inside;
    switch (in.kind) {
      case kIndex:
        source = first | (by & ~static_cast<int>(keep) & 31);
        inside = source <= most;
        break;
      case kUp:
        source = l - by;
        inside = source >= most;
        break;
      case kDown:
        source = l + by;
        inside = source <= most;
        break;
      default:
        source = l ^ by;
        inside = source <= most;
    }
    if (!inside) source = l;
    valid |= static_cast<uint32_t>(inside) << l;
    // A lane that does not participate provides no value.
    out[l] = mask >> source & 1 ? from[source] : kRegisterPoison;
  }
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], valid, mask);
  synchronised(m, w, mask);
}

// ---- vote, match -----------------------------------------------------------------------------------------

enum Vote : uint8_t { kAny, kAll, kEqual };

// uniform: the result belongs to the warp (VOTEU).
template <bool uniform>
void run_vote(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t ballot = w.predicate(in.psrc[0]) & mask;
  bool result = in.kind == kAny ? ballot != 0 : in.kind == kAll ? ballot == mask : ballot == mask || ballot == 0;
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = ballot;
  uint32_t told = uniform ? kAllLanes : mask;
  store_row(w, in.dst, out, told);
  store_predicate(w, in.pdst[0], result ? kAllLanes : 0, told);
  // A vote on PT is __activemask(), which orders nothing.
  if (in.psrc[0].index != kTruePredicate) synchronised(m, w, mask);
}

// R2UR: broadcasts the value of the first active lane to the warp.
void run_r2ur(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t value = w.values(in.src[0])[__builtin_ctz(mask)];
  std::fill_n(w.reg[in.dst], kLanes, value);
}

enum Reduction : uint8_t { kSum, kMin, kMax, kAnd, kOr, kXor };

// REDUX: reduces all active lanes to one value of the warp. flags: signed.
void run_redux(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const Values from = w.values(in.src[0]);
  const uint32_t bias = in.flags ? 0x80000000u : 0;
  int first = __builtin_ctz(mask);
  uint32_t result = from[first];
  for (uint32_t left = mask & (mask - 1); left; left &= left - 1) {
    uint32_t x = from[__builtin_ctz(left)];
    switch (in.kind) {
      case kSum:
        result += x;
        break;
      case kMin:
        result = std::min(result ^ bias, x ^ bias) ^ bias;
        break;
      case kMax:
        result = std::max(result ^ bias, x ^ bias) ^ bias;
        break;
      case kAnd:
        result &= x;
        break;
      case kOr:
        result |= x;
        break;
      default:
        result ^= x;
    }
  }
  std::fill_n(w.reg[in.dst], kLanes, result);
  synchronised(m, w, mask);
}

// flags: 64-bit values; kind: all.
void run_match(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const Values low = w.values(in.src[0]), high = w.values(in.src[1]);
  alignas(64) uint32_t out[kLanes] = {};
  uint32_t all_equal = 0;
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint32_t same = 0;
    for (int k = 0; k < kLanes; k++)
      if ((mask >> k & 1) && low[k] == low[l] && (!in.flags || high[k] == high[l])) same |= 1u << k;
    if (same == mask) all_equal |= 1u << l;
    out[l] = in.kind ? (same == mask ? mask : 0) : same;
  }
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], all_equal, mask);
  synchronised(m, w, mask);
}

// ---- special registers -----------------------------------------------------------------------------------

const char* const kSpecialNames[] = {
    "SR_TID.X",         "SR_TID.Y",         "SR_TID.Z",  "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z",     "SR_LANEID",
    "SR_EQMASK",        "SR_LTMASK",        "SR_LEMASK", "SR_GTMASK",  "SR_GEMASK",  "SR_CLOCKLO",     "SR_CLOCKHI",
    "SR_CLOCK_LO",      "SR_CLOCK_HI",      "SRZ",       "SR_NTID.X",  "SR_WARPID",  "SR_VIRTUALSMID", "SR_TID",
    "SR_GLOBALTIMERLO", "SR_GLOBALTIMERHI", "SR_SMEMSZ", "SR_VIRTID",  "SR_GRIDID"};

bool differs_by_lane(uint8_t kind) {
  return kind <= 2 || (kind >= 6 && kind <= 11) || kind == 20;
}

uint32_t special_register(const Machine& m, const Warp& w, uint8_t kind, int l) {
  uint32_t thread = static_cast<uint32_t>(w.id * kLanes + l), bit = 1u << l;
  uint32_t x = thread % m.block[0], y = thread / m.block[0] % m.block[1], z = thread / m.block[0] / m.block[1];
  switch (kind) {
    case 0:
      return x;
    case 1:
      return y;
    case 2:
      return z;
    case 3:
    case 4:
    case 5:
      return m.block_id[kind - 3];
    case 6:
      return static_cast<uint32_t>(l);
    case 7:
      return bit;
    case 8:
      return bit - 1;
    case 9:
      return (bit - 1) | bit;
    case 10:
      return ~((bit - 1) | bit);
    case 11:
      return ~(bit - 1);
    case 12:
    case 14:
    case 21:
      return static_cast<uint32_t>(m.total_executed + m.executed);
    case 13:
    case 15:
    case 22:
      return static_cast<uint32_t>((m.total_executed + m.executed) >> 32);
    case 17:
      return m.block[0];
    case 18:
      return static_cast<uint32_t>(w.id);
    case 20:
      return x | y << 16 | z << 26;
    case 23:
      return m.shared_bytes;
    default:
      return 0;  // SRZ, and identities without effect here
  }
}

void run_s2r(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = special_register(m, w, in.kind, l);
  store_row(w, in.dst, out, mask);
  if (in.flags) {  // a pair: the upper half of a clock, zero for everything else
    uint8_t upper = in.kind == 12 || in.kind == 14 ? in.kind + 1 : 16;
    for (int l = 0; l < kLanes; l++) out[l] = special_register(m, w, upper, l);
    store_row(w, in.dst + 1, out, mask);
  }
}

void bind_special(Binder& b) {
  bool narrow = b.take("32");
  b.inst.flags = b.opcode == "CS2R" && !narrow;
  b.destination();
  const Operand& name = b.next();
  for (size_t i = 0; i < sizeof kSpecialNames / sizeof *kSpecialNames; i++) {
    if (name.text == kSpecialNames[i]) {
      if (b.uniform && differs_by_lane(static_cast<uint8_t>(i))) break;
      b.inst.kind = static_cast<uint8_t>(i);
      b.inst.run = run_s2r;
      return;
    }
  }
  throw Unsupported("special register " + name.text);
}

}  // namespace

bool bind_warp(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  if (op == "SHFL") {
    int kind = b.take_one({"IDX", "UP", "DOWN", "BFLY"});
    if (kind < 0) throw Unsupported("shuffle");
    in.kind = static_cast<uint8_t>(kind);
    b.predicate_destination(0);
    b.destination();
    for (int i = 0; i < 3; i++) b.source(i);
    in.run = run_shfl;
  } else if (op == "VOTE" || op == "VOTEU") {
    int kind = b.take_one({"ANY", "ALL", "EQ"});
    if (kind < 0) throw Unsupported("vote");
    in.kind = static_cast<uint8_t>(kind);
    if (b.peek_is(Operand::Kind::Register)) b.destination();
    b.predicate_destination(0);
    b.predicate_source(0);
    in.run = op == "VOTEU" ? run_vote<true> : run_vote<false>;
  } else if (op == "MATCH") {
    int kind = b.take_one({"ANY", "ALL"});
    if (kind < 0) throw Unsupported("match");
    in.kind = static_cast<uint8_t>(kind);
    in.flags = b.take("U64");
    b.optional_predicate_destination(0);
    b.destination();
    if (in.flags) {
      b.wide_source(0);
    } else {
      b.source(0);
    }
    in.run = run_match;
  } else if (op == "REDUX") {
    int kind = b.take_one({"SUM", "MIN", "MAX", "AND", "OR", "XOR"});
    b.ignore({"U32"});
    in.kind = static_cast<uint8_t>(kind < 0 ? kAnd : kind);  // the disassembler does not name AND
    in.flags = b.take("S32");
    b.destination();
    b.source(0);
    in.run = run_redux;
  } else if (op == "R2UR") {
    b.destination();
    b.source(0);
    in.run = run_r2ur;
  } else if (op == "S2R" || op == "CS2R") {
    bind_special(b);
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
